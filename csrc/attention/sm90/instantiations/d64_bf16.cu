#include "../launch.cuh"
template const char* flashbwd::sm90::launch<__nv_bfloat16, 64>(int, const KernelParams&, void*);
