// The layout of the two fp32 values per query row that every kernel family reads: lse * log2(e), and delta =
// rowsum(dout * out) - dlse. The rows of each (sequence, head) are padded to a multiple of kRowPadding, so that one
// aligned copy loads a tile. Padding rows and rows without a visible key have lse = +inf (probability 0) and delta = 0.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../common/macros.h"

namespace flashbwd {

constexpr int64_t kRowPadding = 128;

// True if a row with this LSE gets no gradient, as if it saw no key: the LSE is infinite, or so low (from masks with
// the lowest finite value) that rounding makes exp(s - lse) wrong by more than a factor of e. NaN returns false.
FLASHBWD_HOST_DEVICE inline bool sees_nothing(float lse) {
  return lse == INFINITY || lse <= -16777216.f;  // -2^24
}

struct LseDelta {
  float* lse_log2 = nullptr;
  float* delta = nullptr;
  int64_t batch_stride = 0;  // 0 when packed
  int64_t head_stride = 0;

  FLASHBWD_HOST_DEVICE static constexpr int64_t padded(int64_t rows) {
    return (rows + kRowPadding - 1) / kRowPadding * kRowPadding;
  }

  // Rows of one array, over all heads and sequences.
  static constexpr int64_t rows(bool varlen, int64_t batch, int64_t heads, int64_t seqlen_q, int64_t total_q) {
    return varlen ? heads * padded(total_q + batch * kRowPadding) : batch * heads * padded(seqlen_q);
  }

  // `storage` has 2 * rows(...) floats.
  static LseDelta make(float* storage, bool varlen, int64_t batch, int64_t heads, int64_t seqlen_q, int64_t total_q) {
    LseDelta lse_delta;
    lse_delta.lse_log2 = storage;
    lse_delta.delta = storage + rows(varlen, batch, heads, seqlen_q, total_q);
    lse_delta.head_stride = varlen ? padded(total_q + batch * kRowPadding) : padded(seqlen_q);
    lse_delta.batch_stride = varlen ? 0 : heads * lse_delta.head_stride;
    return lse_delta;
  }

  // Index of row 0 of (batch, head). `begin_q` is the first packed row of the sequence, 0 when dense.
  FLASHBWD_HOST_DEVICE int64_t index(int64_t batch, int64_t head, int64_t begin_q) const {
    const int64_t sequence =
        batch_stride != 0 ? batch * batch_stride : (begin_q + batch * kRowPadding) / kRowPadding * kRowPadding;
    return sequence + head * head_stride;
  }
};

}  // namespace flashbwd
