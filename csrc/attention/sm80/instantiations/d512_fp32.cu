#include "../launch.cuh"

template const char* flashbwd::sm80::launch<float, 12>(const KernelParams&, bool, void*);
