#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 256>(int, const KernelParams&, Variant, void*);
