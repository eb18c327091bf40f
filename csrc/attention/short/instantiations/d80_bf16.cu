#include "../launch.cuh"

template const char* flashbwd::short_sequences::launch<__nv_bfloat16, 80>(int, const KernelParams&, bool, void*);
