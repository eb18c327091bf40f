#include "../launch.cuh"
namespace flashbwd::sm90 {
template const char* launch<__nv_bfloat16, tile_of(128, Feature::kBlockMaskAndScores)>(const KernelParams&, void*);
}
