#include "../launch.cuh"
template const char* flashbwd::sm90::launch<__nv_bfloat16, 80>(int, const KernelParams&, void*);
