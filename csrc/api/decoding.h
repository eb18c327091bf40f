// Shared by the forward and backward operators of flex decoding.
#pragma once

#include <cstdint>

#include "../decoding/params.h"

namespace flashbwd {

// The built-in encoding of a registered modification; its kind is kNone if the modification has compiled kernels
// instead.
OrdinaryMod ordinary_modification(int64_t modification);

}  // namespace flashbwd
