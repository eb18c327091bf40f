#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 4>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__nv_bfloat16, 5>(const KernelParams&, bool, void*);
