#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 2>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__half, 3>(const KernelParams&, bool, void*);
