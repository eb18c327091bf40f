#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 512>(int, const KernelParams&, Variant, void*);
