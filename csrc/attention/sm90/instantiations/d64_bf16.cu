#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__nv_bfloat16, 2, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 10, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 12, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 14, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 16, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 18, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 20, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__nv_bfloat16, 22, true>(const KernelParams&, void*);
