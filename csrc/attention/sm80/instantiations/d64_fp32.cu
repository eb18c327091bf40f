#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 6>(const KernelParams&, bool, void*);
template const char* flashbwd::sm80::launch<float, 7>(const KernelParams&, bool, void*);
