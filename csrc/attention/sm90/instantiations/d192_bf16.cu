#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__nv_bfloat16, 7, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 8, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 8, true>(const KernelParams&, void*);
