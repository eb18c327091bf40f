#include "../launch.cuh"

template const char* flashbwd::sm90::launch<__half, 4, false>(const KernelParams&, void*);
