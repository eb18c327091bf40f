#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 6, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 7, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 7, true>(const KernelParams&, void*);
