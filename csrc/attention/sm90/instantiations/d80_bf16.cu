// For products of 80 columns.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__nv_bfloat16, tile_of(80)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
