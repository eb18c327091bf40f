#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__nv_bfloat16, 2, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 10, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 12, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 14, true>(const KernelParams&, void*);
