#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 32>(int, const KernelParams&, Variant, void*);
