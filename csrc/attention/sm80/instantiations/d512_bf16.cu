#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__nv_bfloat16, 512>(int, const KernelParams&, Variant, void*);
