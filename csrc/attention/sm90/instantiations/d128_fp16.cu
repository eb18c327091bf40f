#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 5, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 6, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 11, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 13, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 15, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 17, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 19, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 21, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 23, true>(const KernelParams&, void*);
