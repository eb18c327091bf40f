#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 64>(int, const KernelParams&, Variant, void*);
