#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 6>(const KernelParams&, bool, void*);
