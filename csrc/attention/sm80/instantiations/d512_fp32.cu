#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 512>(int, const KernelParams&, Variant, void*);
