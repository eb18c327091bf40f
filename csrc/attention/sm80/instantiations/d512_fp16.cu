#include "../launch.cuh"

template const char* flashbwd::sm80::launch<__half, 12>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<__half, 13>(const KernelParams&, bool, void*);
