// The mask as a loop over key blocks sees it: query rows and key rows exchange their roles.
#pragma once

#include "visibility.h"

namespace flashbwd {

// The same pairs with queries and keys exchanged: query_blocks(transposed(v), ...) are key blocks.
FLASHBWD_HOST_DEVICE constexpr Visibility transposed(const Visibility& v) {
  return {v.seqlen_k, v.seqlen_q, 1 - v.hi, 1 - v.lo};
}

}  // namespace flashbwd
