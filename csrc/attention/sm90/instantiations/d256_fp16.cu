#include "../launch.cuh"
template const char* flashbwd::sm90::launch<__half, 256>(int, const KernelParams&, void*);
