// The interface between the forward kernel and a modification (score_mod and mask_mod). A modification is NoMod, a
// built-in one (built_in.cuh), or user code compiled at run time.
#pragma once

#include "params.h"

#ifdef __CUDACC__

namespace flashbwd {

// Defaults for the optional members of a modification.
struct AnyMod {
  static constexpr bool kTotal = false;  // true: score_mod() and mask_mod() accept rows and keys past the end
  // score_mod() has a parameter of this name; other generated code uses this null pointer. If it is not null, sine()
  // and cosine() use an approximation for small arguments, and set *near to false if an argument is too large for it.
  static constexpr bool* near = nullptr;
  static constexpr bool kHasRanges = false;  // true: sees_all(row, first, last) is true if the row sees these keys
  static constexpr bool kHasRow = false;     // true: Row is not empty
  struct Row {                               // state computed once per query row
    Row() = default;
    __device__ Row(const DecodingParams&, int, int, int) {}
  };
  // Modifies all scores of a key tile, before score_mod() is called for each score.
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
