#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 2, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 10, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 12, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 14, true>(const KernelParams&, void*);
