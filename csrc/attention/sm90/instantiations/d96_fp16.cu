#include "../launch.cuh"

namespace flashbwd::sm90 {

template const char* launch<__half, tile_of(96)>(const KernelParams&, void*);

}  // namespace flashbwd::sm90
