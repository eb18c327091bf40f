#include "../launch.cuh"

template const char* flashbwd::short_sequences::launch<__half, 80>(int, const KernelParams&, bool, void*);
