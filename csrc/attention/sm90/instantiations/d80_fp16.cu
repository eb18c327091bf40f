#include "../launch.cuh"
template const char* flashbwd::sm90::launch<__half, 80>(int, const KernelParams&, void*);
