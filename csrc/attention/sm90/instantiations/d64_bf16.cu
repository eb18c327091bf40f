#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__nv_bfloat16, tile_of(64)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kFlashDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kEfficientDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kBias)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kScores)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kShiftsAndFlashDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kShiftsAndEfficientDropout)>(const KernelParams&,
                                                                                             void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kBiasAndEfficientDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kBlockMask)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kBlockMaskAndScores)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
