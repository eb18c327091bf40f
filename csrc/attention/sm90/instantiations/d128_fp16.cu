#include "../launch.cuh"
template const char* flashbwd::sm90::launch<__half, 128>(int, const KernelParams&, void*);
