#include "../launch.cuh"
template const char* flashbwd::sm90::head_dim_512::launch<__nv_bfloat16, 320>(const KernelParams&, void*);
