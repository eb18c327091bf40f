#include "../launch.cuh"
template const char* flashbwd::sm90::head_dim_512::launch<__nv_bfloat16, 512>(const KernelParams&, void*);
