#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__half, tile_by_queries(32)>(const KernelParams&, void*);
template const char* launch<__half, tile_of(32)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
