// For products of 80 columns.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 3, false>(const KernelParams&, void*);
