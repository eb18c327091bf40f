#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 128>(int, const KernelParams&, Variant, void*);
