#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 8>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<float, 9>(const KernelParams&, bool, void*);
