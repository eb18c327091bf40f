#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 0>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__nv_bfloat16, 1>(const KernelParams&, bool, void*);
