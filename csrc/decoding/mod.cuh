// What the kernels ask a modification: NoMod, one of ordinary.cuh, or one compiled at run time.
#pragma once

#include "params.h"

#ifdef __CUDACC__

namespace flashbwd {

// What a modification has that needs no more.
struct AnyMod {
  static constexpr bool kTotal = false;  // whether it may be asked about rows and keys past the last
  // score_mod() may be quicker with a place for an answer: whether its result holds. Else it always does.
  static constexpr bool* near = nullptr;
  static constexpr bool kHasRanges = false;  // whether sees_all() tells of a row that it sees all keys of a range
  static constexpr bool kHasRow = false;
  struct Row {  // what it works out once for a row
    Row() = default;
    __device__ Row(const DecodingParams&, int, int, int) {}
  };
  // What is done to all scores of a chunk, before score_mod() is asked about each.
  template <int kRowTiles, int kKeyTiles>
  __device__ static void all_scores(const DecodingParams&, float (&)[kRowTiles][kKeyTiles][4]) {}
};

struct NoMod : AnyMod {
  static constexpr bool kHasScoreMod = false;
  static constexpr bool kHasMask = false;
  __device__ static float score_mod(const DecodingParams&, const Row&, float score, int, int, int, int,
                                    bool* = nullptr) {
    return score;
  }
  __device__ static bool mask_mod(const DecodingParams&, const Row&, int, int, int, int) { return true; }
};

}  // namespace flashbwd

#endif
