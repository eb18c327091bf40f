#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 9, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 9, true>(const KernelParams&, void*);
