#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 128>(int, const KernelParams&, Variant, void*);
