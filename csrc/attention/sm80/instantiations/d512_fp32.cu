#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 14>(const KernelParams&, bool, void*);
