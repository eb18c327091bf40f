#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__nv_bfloat16, tile_of(128)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kAny)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kFlashDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kEfficientDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kBias)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kScores)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kShiftsAndFlashDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kShiftsAndEfficientDropout)>(const KernelParams&,
                                                                                              void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kBiasAndEfficientDropout)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kBlockMask)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kBlockMaskAndScores)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
