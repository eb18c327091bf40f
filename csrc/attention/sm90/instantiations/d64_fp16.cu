#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 2, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 10, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 12, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 14, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 16, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 18, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 20, true>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 22, true>(const KernelParams&, void*);
