#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 32>(int, const KernelParams&, Variant, void*);
