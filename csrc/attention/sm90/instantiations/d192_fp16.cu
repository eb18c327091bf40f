#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 7, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 8, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 8, true>(const KernelParams&, void*);
