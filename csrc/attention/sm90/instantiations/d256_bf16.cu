#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__nv_bfloat16, tile_of(256)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(256, Feature::kAny)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
