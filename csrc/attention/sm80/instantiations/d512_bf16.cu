#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 12>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__nv_bfloat16, 13>(const KernelParams&, bool, void*);
