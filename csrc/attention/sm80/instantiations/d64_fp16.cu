#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 64>(int, const KernelParams&, Variant, void*);
