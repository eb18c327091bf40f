// The order in which key blocks add to a dq tile. In deterministic calls each dq tile of a (batch, query head) has an
// ordered semaphore, which counts the adds: an add waits until the semaphore equals the number of adds before it. The
// functions below compute that number.
//
// A dynamic scheduler hands out work tiles in the order of tile_order.h, and each role of a CTA takes its work tiles in
// that order. So a work tile may wait only for work tiles handed out before it: of the tiles handed out and not
// finished, the first waits for no other, so it ends, and by induction all end, whatever the number of CTAs. The tests
// simulate this with empty work tiles.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "query_loop.h"
#include "visibility.h"

namespace flashbwd {

// Ascending order: key blocks of a head are handed out in ascending order and add in ascending order. Returns how many
// of the key blocks that see a query tile add to it before key block n, which is one of them.
FLASHBWD_HOST_DEVICE constexpr int32_t adds_before_ascending(const BlockRange& key_blocks, int32_t n) {
  return n - key_blocks.begin;
}

// Reverse order: key blocks of a head are handed out, and add, from the last to the first. Under a causal mask each
// query loop starts on its diagonal, so key blocks that run at the same time start at different dq tiles. In ascending
// order all of them would wait for key block 0.
FLASHBWD_HOST_DEVICE constexpr int32_t adds_before_descending(const BlockRange& key_blocks, int32_t n) {
  return key_blocks.end - 1 - n;
}

// ---------------------------------------------------------------------------------------------------------------------
// Waves
//
// A static scheduler deals work tile i to worker i % wave_size (a CTA, or a cluster) in a cooperative launch, so all
// workers run from the start. The work tiles with the same i / wave_size are a wave. Adds happen by wave, and within a
// wave in an order that each of the two functions below defines. docs/kernels/attention_sm90.md has the arguments for
// progress.

// The work tiles of one head that are in the same wave as the tile in question.
struct TilesInWave {
  int32_t before = 0;  // work tiles of the head in earlier waves
  int32_t rank = 0;    // of the tile in question among those of this wave
  int32_t size = 1;    // work tiles of the head in this wave
};

// Work tiles of the head lie at index + i * stride, for all i that stay in [first, end).
FLASHBWD_HOST_DEVICE constexpr TilesInWave tiles_in_wave(int32_t index, int32_t first, int32_t end, int32_t stride,
                                                         int32_t wave_size) {
  const int32_t wave = index / wave_size * wave_size;
  const int32_t rank = (index - static_cast<int32_t>(at_least(first, wave))) / stride;
  const int32_t after = (static_cast<int32_t>(at_most(end, int64_t{wave} + wave_size)) - 1 - index) / stride;
  return {(index - first) / stride - rank, rank, rank + 1 + after};
}

// Ring order, for full masks with a staggered start: rank r begins at the start numbered r % starts, and wraps around.
// The key blocks of a wave add to query tile m in the order in which their loops reach it; those with the same start
// add by rank. So an add of iteration i waits only for earlier waves, for adds of earlier iterations, and for adds of
// iteration i of lower ranks.
FLASHBWD_HOST_DEVICE constexpr int32_t adds_before_in_ring(const TilesInWave& wave, int32_t m, int32_t blocks_apart,
                                                           int32_t num_query_blocks) {
  const int32_t starts = staggered_starts(blocks_apart, num_query_blocks);
  const int32_t own = wave.rank % starts;
  const int32_t nearest = static_cast<int32_t>(at_most(m / blocks_apart, starts - 1));  // the last start up to m
  // How many key blocks of the wave begin at a start below `start`.
  const auto below = [&](int32_t start) {
    return wave.size / starts * start + static_cast<int32_t>(at_most(wave.size % starts, start));
  };
  // The loops that begin after the own start, up to the nearest one, reach m first.
  const int32_t earlier = below(nearest + 1) - below(own + 1) + (nearest < own ? wave.size : 0);
  return wave.before + earlier + wave.rank / starts;
}

// Mirrored pairs, which balance causal masks. With P pairs per head, pair p is key block num_key_blocks - P + p, from
// the last query block down, then key block P - 1 - p, from its diagonal up. Together they have as many query blocks as
// any other pair. In a head with an odd number of key blocks, pair 0 has no second tile.
//
// Returns how many tiles of pairs add to a dq tile before this one does: in a wave all first tiles come before all
// second tiles, each in ascending order of pairs. `seen` is the number of key blocks that the tile sees, which are the
// first ones of the head. With a dynamic scheduler all pairs of a head count as one wave, and only the first and the
// last add of a tile have a fixed position in the order; the last belongs to the pair handed out last.
FLASHBWD_HOST_DEVICE constexpr int32_t adds_before_in_pairs(const TilesInWave& wave, bool second, int32_t seen,
                                                            int32_t num_key_blocks) {
  // The dq tile sees the first tiles of pairs [0, end_first) and the second tiles of pairs [first_second, pairs).
  const int32_t pairs = (num_key_blocks + 1) / 2, pair = wave.before + wave.rank;
  const int32_t first_second = pairs - (seen < num_key_blocks / 2 ? seen : num_key_blocks / 2);
  if (!second) return pair + (wave.before > first_second ? wave.before - first_second : 0);
  const int32_t end_first = pairs - num_key_blocks + seen, last = wave.before + wave.size;
  const int32_t firsts = end_first < last ? end_first : last;
  return pair - first_second + (firsts > 0 ? firsts : 0);
}

}  // namespace flashbwd
