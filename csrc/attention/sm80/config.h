// The tile table of the sm_80 attention kernel, by element size, head dimension and shared memory. Host code includes
// this file: no CUDA here.
#pragma once

#include <cstdint>

#include "../built_head_dims.h"

namespace flashbwd::sm80 {

// Most tiles keep whole rows of q, k, v and dout in shared memory, and dk and dv in registers. Large tiles support all
// head dimensions: they process blocks of columns and keep dk and dv in global memory between query tiles.
struct Tile {
  int32_t element_bytes;
  int32_t head_dim;  // columns in shared memory, padded with zeros. Large: only selects the tile in partial builds
  int32_t block_m;   // queries
  int32_t block_n;   // keys
  int32_t warps_n;   // warps along the keys of s, dk and dv
  int32_t warps_s;   // warps that share 16 or 32 keys; they split the queries of s and the columns of dk and dv
  int32_t warps_q;   // warps along the queries of dq; the remaining factor of warps() splits its columns
  int32_t stages;    // stages of q and dout; large: stages of operands, see stage_bytes
  bool large = false;

  constexpr int32_t warps() const { return warps_n * warps_s; }
  constexpr int32_t threads() const { return warps() * 32; }
  constexpr int32_t row_bytes() const { return head_dim * element_bytes; }
  constexpr int32_t score_bytes() const { return block_m * block_n * element_bytes; }

  // Large: the size of one stage. For s and dp, a stage holds 128 bytes of each row of keys and queries. For dv, dk and
  // dq, it holds gradient_columns() columns of block_n rows of dout, q or k.
  constexpr int32_t gradient_columns() const { return 64 * warps_s; }  // 64 per warp
  constexpr int32_t stage_bytes() const {
    const int32_t scores = (block_m + block_n) * 128, rows = block_n * gradient_columns() * element_bytes;
    return scores > rows ? scores : rows;
  }

  // Holds k, v, the stages of q, dout, lse and delta, then ds, and p if warps exchange it. Large: the operand stages,
  // lse, delta, ds and p.
  constexpr int32_t shared_bytes() const {
    if (large) return stages * stage_bytes() + 2 * block_m * 4 + 2 * score_bytes();
    return 2 * block_n * row_bytes() + stages * (2 * block_m * row_bytes() + 2 * block_m * 4) +
           score_bytes() * (warps_s > 1 ? 2 : 1);
  }
};

// The variant of a kernel: the features it supports, or how it schedules plain attention.
enum class Variant : int32_t {
  kPlain,
  kLoadsAhead,   // plain attention; see has_loads_ahead
  kWholeHeads,   // plain attention; a CTA processes all key blocks of a head, see has_whole_heads
  kBias,         // only a bias that 16-byte vectors load; its gradient is stored as vectors or added in fp32
  kAllFeatures,  // bias, key mask, ALiBi, softcap, dropout
  kSharedBias,   // as kBias, but heads that share a bias add to its gradient, in a fixed order or in any order
  kFirstStores,  // plain attention; the first key block of a query tile stores dq, see has_first_stores
  kBlockMask,    // query loops and bits of a block mask; softcap, ALiBi
  kGenerated,    // a block mask with a score_mod that is compiled at run time, see generated_kernel.cuh
};

// The comments give the accumulator registers per thread, dk and dv + s and dp, and the shared memory. For each element
// size and head dimension the rows are in order of preference; tile_for returns the first that fits the device.
constexpr Tile kTiles[] = {
    {2, 32, 128, 128, 4, 2, 4, 2},  // 32 + 128 registers, 114 KB
    {2, 32, 64, 128, 8, 1, 4, 2},   // 32 + 64 registers, 49 KB
    {2, 64, 128, 128, 4, 2, 4, 2},  // 64 + 128 registers, 162 KB
    {2, 64, 64, 128, 8, 1, 2, 2},   // 64 + 64 registers, 81 KB
    {2, 96, 64, 128, 4, 2, 4, 2},   // 96 + 64 registers, 131 KB
    {2, 128, 64, 128, 4, 2, 2, 2},  // 128 + 64 registers, 161 KB
    {2, 128, 64, 64, 4, 1, 2, 1},   // 128 + 64 registers, 73 KB
    {2, 160, 128, 64, 4, 2, 4, 1},  // 80 + 64 registers, 153 KB
    {2, 192, 128, 64, 2, 4, 4, 1},  // 96 + 64 registers, 177 KB
    {2, 256, 128, 64, 2, 4, 4, 1},  // 128 + 64 registers, 225 KB
    {2, 256, 64, 64, 2, 4, 2, 1},   // 128 + 32 registers, 145 KB
    {2, 256, 32, 32, 2, 2, 1, 1},   // 128 + 16 registers, 68 KB
    {4, 64, 64, 128, 4, 2, 4, 1},   // 64 + 64 registers, 161 KB
    {4, 64, 64, 64, 4, 2, 4, 1},    // 32 + 32 registers, 97 KB
    {4, 128, 64, 64, 4, 2, 4, 1},   // 64 + 32 registers, 161 KB
    {4, 128, 32, 32, 2, 2, 1, 1},   // 64 + 16 registers, 72 KB
    {4, 256, 32, 64, 4, 2, 2, 1},   // 128 + 16 registers, 208 KB
    {4, 256, 32, 32, 2, 2, 1, 1},   // 128 + 16 registers, 136 KB
    // Large: registers for s and dp; for the old and new values of dv or dk; for dq.
    {2, 512, 256, 64, 2, 4, 4, 2, true},  // 128, 128, 64 registers, 146 KB
    {2, 512, 128, 64, 2, 2, 2, 2, true},  // 128, 128, 64 registers, 81 KB
    {4, 512, 64, 64, 4, 2, 4, 2, true},   // 32, 64, 16 registers, 97 KB
};
constexpr int kNumTiles = sizeof(kTiles) / sizeof(kTiles[0]);

// Tiles that have a kBias kernel.
constexpr bool has_bias_kernel(const Tile& tile) { return tile.element_bytes == 2 && tile.head_dim <= 128; }

// Tiles that have a kWholeHeads kernel. whole_heads in schedule.cpp decides when it is used.
constexpr bool has_whole_heads(const Tile& tile) {
  return tile.element_bytes == 2 && tile.head_dim <= 128 && tile.stages > 1 && tile.warps_s > 1;
}

// Tiles that have a kSharedBias kernel.
constexpr bool has_shared_bias_kernel(const Tile& tile) { return has_whole_heads(tile); }

// Whether the kBias kernel can add to a shared gradient in any order. At head dimension 64, the kernel of the large
// tile has no register left for this, and kSharedBias is used.
constexpr bool bias_kernel_adds(const Tile& tile) { return !has_shared_bias_kernel(tile) || tile.head_dim != 64; }

// Tiles that have a kLoadsAhead kernel. It loads the first tiles of the next work tile during the last iteration of the
// current one, which needs shared memory for a second k and v. Up to head dimension 64, kWholeHeads kernels do so too.
constexpr bool has_loads_ahead(const Tile& tile) { return has_whole_heads(tile); }
constexpr bool loads_ahead(const Tile& tile, Variant variant) {
  return variant == Variant::kLoadsAhead || (variant == Variant::kWholeHeads && tile.head_dim <= 64);
}
constexpr int32_t keys_bytes(const Tile& tile) { return 2 * tile.block_n * tile.row_bytes(); }

// Tiles that have a kFirstStores kernel. first_stores in schedule.cpp decides when it is used.
constexpr bool has_first_stores(const Tile& tile) {
  return tile.element_bytes == 2 && tile.head_dim == 256 && tile.block_m == 128;
}

// Whether a warp keeps its rows of k and v in registers as operands of s and dp.
constexpr bool keeps_rows(const Tile& tile, Variant variant) {
  const bool plain = variant == Variant::kPlain || variant == Variant::kLoadsAhead || variant == Variant::kWholeHeads;
  return tile.element_bytes == 2 && tile.head_dim == 32 && tile.block_m == 128 && plain;
}

// Whether a kernel with one stage loads the first q, dout and v of the next work tile during the last iteration of the
// current one, each as soon as its buffer is free.
constexpr bool refills(const Tile& tile, Variant variant) {
  return tile.stages == 1 && tile.element_bytes == 2 &&
         (variant == Variant::kPlain || variant == Variant::kFirstStores);
}

// Tiles that have kBlockMask and kGenerated kernels. Other head dimensions take the next larger tile. No tile
// has more than 128 queries or keys, so a block of 128 is never loaded because of its neighbour.
constexpr bool has_block_mask_kernel(const Tile& tile) {
  return !tile.large && tile.head_dim != 32 && tile.head_dim != 96 && tile.head_dim != 160;
}

// Shared memory beyond Tile::shared_bytes(): scheduler state, barriers, and the alignment of tiles to 1024 bytes.
constexpr int32_t kAlignmentBytes = 1024;

// Dynamic shared memory of a kGenerated kernel.
constexpr int32_t generated_shared_bytes(const Tile& tile) { return tile.shared_bytes() + kAlignmentBytes; }

// Returns a row of kTiles, or -1 if none fits. `block_mask`: it has a kBlockMask kernel.
constexpr int tile_for(int64_t element_bytes, int64_t head_dim, int64_t head_dim_v, int64_t shared_bytes,
                       bool block_mask = false) {
  const int64_t wider = head_dim > head_dim_v ? head_dim : head_dim_v;
  for (int i = 0; i < kNumTiles; ++i) {
    const Tile& tile = kTiles[i];
    if (tile.element_bytes == element_bytes && (tile.large || wider <= tile.head_dim) &&
        tile.shared_bytes() + kAlignmentBytes <= shared_bytes && is_built(tile.head_dim) &&
        (!block_mask || has_block_mask_kernel(tile))) {
      return i;
    }
  }
  return -1;
}

}  // namespace flashbwd::sm80
