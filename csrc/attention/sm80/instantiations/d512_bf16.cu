#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 10>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__nv_bfloat16, 11>(const KernelParams&, bool, void*);
