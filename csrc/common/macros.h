#pragma once

#if defined(__CUDACC__)
#define FLASHBWD_HOST_DEVICE __host__ __device__
#else
#define FLASHBWD_HOST_DEVICE
#endif
