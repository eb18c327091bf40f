#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__half, tile_of_unequal(192, 128)>(const KernelParams&, void*);
template const char* launch<__half, tile_of(192)>(const KernelParams&, void*);
template const char* launch<__half, tile_of(192, Feature::kAny)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
