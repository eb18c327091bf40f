#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 10>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<float, 11>(const KernelParams&, bool, void*);
