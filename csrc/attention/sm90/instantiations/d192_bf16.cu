#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__nv_bfloat16, 6, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 7, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 7, true>(const KernelParams&, void*);
