#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 160>(int, const KernelParams&, Variant, void*);
