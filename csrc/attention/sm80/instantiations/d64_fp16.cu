#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 0>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__half, 1>(const KernelParams&, bool, void*);
