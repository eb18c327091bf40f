// For products of 80 columns.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__nv_bfloat16, 3, false>(const KernelParams&, void*);
