#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // CuTe then has products of 80 columns
#include "../launch.cuh"
template const char* flashbwd::sm90::launch<__half, 80>(int, const KernelParams&, void*);
