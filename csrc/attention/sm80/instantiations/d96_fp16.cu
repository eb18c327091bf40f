#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 96>(int, const KernelParams&, Variant, void*);
