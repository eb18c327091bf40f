#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 0, false>(const KernelParams&, void*);
template const char* flashbwd::sm90::launch<__half, 1, false>(const KernelParams&, void*);
