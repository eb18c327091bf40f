#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__nv_bfloat16, 0, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 1, false>(const KernelParams&, void*);
