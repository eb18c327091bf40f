// Shared by the forward and backward operators of flex decoding.
#pragma once

#include <cstdint>

#include "../decoding/params.h"

namespace flashbwd {

// The built-in encoding of a registered modification. Its kind is kNone if the modification needs compiled kernels.
BuiltInMod built_in_modification(int64_t modification);

}  // namespace flashbwd
