#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 2>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__nv_bfloat16, 3>(const KernelParams&, bool, void*);
