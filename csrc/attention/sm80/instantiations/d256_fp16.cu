#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 4>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__half, 5>(const KernelParams&, bool, void*);
