#include "../launch.cuh"
namespace flashbwd::sm90 {
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kBlockMask)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(64, Feature::kBlockMaskAndScores)>(const KernelParams&, void*);
}
