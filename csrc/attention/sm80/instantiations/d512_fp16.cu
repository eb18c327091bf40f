#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 10>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__half, 11>(const KernelParams&, bool, void*);
