#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 192>(int, const KernelParams&, Variant, void*);
