#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__nv_bfloat16, 5, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 6, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 11, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 13, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 15, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 17, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 19, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 21, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 23, true>(const KernelParams&, void*);
