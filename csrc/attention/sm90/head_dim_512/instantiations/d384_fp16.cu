#include "../launch.cuh"
template const char* flashbwd::sm90::head_dim_512::launch<__half, 384>(const KernelParams&, void*);
