// The schedule of a call: which CTA computes which work tile, in which order, and how the CTAs accumulate dq and the
// gradient of a shared bias. The plan chooses it once, from the problem and the device; the launcher encodes it.
// docs/kernels/attention_sm80.md, "Schedules", explains each choice. No CUDA here.
#pragma once

#include <cstdint>

#include "../../common/macros.h"
#include "config.h"

namespace flashbwd {
struct AttentionProblem;
struct DeviceInfo;
}  // namespace flashbwd

namespace flashbwd::sm80 {

// The last `count` work tiles of a call are split over `splits` CTAs each.
struct SplitTiles {
  int64_t count = 0;
  int32_t splits = 1;
  FLASHBWD_HOST_DEVICE int64_t ctas() const { return count * splits; }
};

struct Schedule {
  bool whole_heads = false;            // a CTA computes all key blocks of a KV head in order and accumulates dq itself
  bool first_stores = false;           // the first key block of a query tile stores dq, the others add to it
  bool ordered_dq = false;             // deterministic: key blocks add to dq in ascending order
  bool ordered_bias_gradient = false;  // heads that share a bias add to its gradient in a fixed order
  bool loads_ahead = false;            // shared memory has room for a second k and v, see loads_ahead in config.h

  // Work tiles and their order (index/tile_order.h)
  bool packed_work_tiles = false;  // work tiles follow cu_seqlens_k; otherwise every sequence has `key_blocks`
  int32_t key_blocks = 0;          // of the longest sequence, as query_blocks
  int32_t query_blocks = 0;
  SplitTiles split_tiles;
  int64_t unsplit_work_tiles = 0;  // these precede the split work tiles
  int32_t swizzle_heads = 1;       // KV heads per head swizzle group: their key blocks run in LPT order
  int32_t num_ctas = 0;            // grid size

  // A split work tile counts once per CTA.
  FLASHBWD_HOST_DEVICE int64_t num_work_tiles() const { return unsplit_work_tiles + split_tiles.ctas(); }
};

Schedule choose_schedule(const AttentionProblem& problem, const Tile& tile, const DeviceInfo& device);

// Number of key blocks over all KV heads.
int64_t count_work_tiles(const AttentionProblem& problem, const Tile& tile);

}  // namespace flashbwd::sm80
