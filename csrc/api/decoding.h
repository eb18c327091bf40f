// What the operators of flex decoding share.
#pragma once

#include <cstdint>

#include "../decoding/params.h"

namespace flashbwd {

// Of a modification that Python has registered; of kind kNone for one that needs kernels compiled for it.
OrdinaryMod ordinary_modification(int64_t modification);

}  // namespace flashbwd
