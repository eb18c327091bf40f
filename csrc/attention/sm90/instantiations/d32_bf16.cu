#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__nv_bfloat16, tile_by_queries(32)>(const KernelParams&, void*);
template const char* launch<__nv_bfloat16, tile_of(32)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
