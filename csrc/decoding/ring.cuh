// The cp.async ring of one warp in shared memory. Each stage holds K and V of one key tile, (2, kKeys, kD).
#pragma once

#include "block_lists.cuh"
#include "elements.cuh"

#ifdef __CUDACC__

namespace flashbwd {

template <int kD, int kWarps, class T, bool kAligned>
class Ring {
 public:
  using Storage = typename T::Storage;
  using Tile = SharedTile<T, kD>;
  static constexpr int kKeys = keys_of(kBytes<T>);
  static constexpr int kStages = stages_of(kD);
  static constexpr int kStageBytes = stage_bytes(kD);

  __device__ Ring(const DecodingParams& p, unsigned char* shared, int b, int head_kv)
      : p_(p),
        lane_(threadIdx.x % 32),
        k_(static_cast<const Storage*>(p.k) + b * p.k_strides[0] + head_kv * p.k_strides[1]),
        v_(static_cast<const Storage*>(p.v) + b * p.v_strides[0] + head_kv * p.v_strides[1]) {
    const int warp = threadIdx.x / 32;
    stages_ = shared_address(shared) + warp * kStages * kStageBytes;
    key_tiles_ = reinterpret_cast<KeyTile*>(shared + kWarps * kStages * kStageBytes) + warp * kStages;
  }

  __device__ uint32 keys(int stage) const { return stages_ + stage * kStageBytes; }
  __device__ uint32 values(int stage) const { return keys(stage) + kStageBytes / 2; }

  // The key tile in a stage; valid after wait().
  __device__ KeyTile key_tile(int stage) const { return key_tiles_[stage]; }

  // Starts to load the keys of a tile up to tile.end_key. If `any` is false, this only commits an empty cp.async group.
  // All lanes must have finished reading the stage.
  __device__ __forceinline__ void load(bool any, const KeyTile& tile, int stage) {
    if (any && lane_ == 0) key_tiles_[stage] = tile;
    if (kWholeRows && any && tile.first_key + kKeys <= tile.end_key) {
      const long long k_stride = p_.k_strides[2], v_stride = p_.v_strides[2];
      Tile::template load_rows<32, kKeys>(keys(stage), lane_, k_ + tile.first_key * k_stride, k_stride, p_.head_dim);
      Tile::template load_rows<32, kKeys>(values(stage), lane_, v_ + tile.first_key * v_stride, v_stride,
                                          p_.head_dim_v);
    } else if (any) {
#pragma unroll(kAligned && !kWholeRows ? kCopies : 1)
      for (int i = 0; i < kCopies; ++i) {
        const int row = (i * 32 + lane_) / Tile::kVectors;
        const int vector = (i * 32 + lane_) % Tile::kVectors;
        const bool inside = tile.first_key + row < tile.end_key;
        const long long key = inside ? tile.first_key + row : 0;
        Tile::template load_vector<kAligned>(keys(stage), row, vector, k_ + key * p_.k_strides[2], p_.head_dim, inside);
        Tile::template load_vector<kAligned>(values(stage), row, vector, v_ + key * p_.v_strides[2], p_.head_dim_v,
                                             inside);
      }
    }
    copy_async_commit();
  }

  // Waits until the oldest of the kStages - 1 outstanding loads has arrived. All lanes of the warp arrive and wait at
  // the __syncwarp(), so all copies are visible and the next load() may overwrite the stage that was read before.
  __device__ __forceinline__ void wait() {
    copy_async_wait<kStages - 2>();
    __syncwarp();
  }

  // Zeroes V of the keys that are masked out for all rows, since V may be NaN or Inf there and 0 * NaN is NaN. Keeps
  // key i if bit i of `visible_keys` is set.
  __device__ void clear_hidden_values(int stage, uint32 visible_keys) {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      if (visible_keys >> key & 1u) continue;
      for (int vector = lane_; vector < Tile::kVectors; vector += 32)
        store_shared(values(stage) + Tile::at(key, vector), {0u, 0u, 0u, 0u});
    }
    __syncwarp();  // all lanes have written their zeros; any lane may read them
  }

  // Waits for this lane's copies, before the shared memory is reused.
  __device__ void end() { copy_async_wait<0>(); }

 private:
  static constexpr int kCopies = kKeys * Tile::kVectors / 32;  // copies per lane for K (or V) of a stage
  // Key tiles without keys past the end use load_rows(), which takes fewer instructions.
  static constexpr bool kWholeRows = kAligned && Tile::kVectors <= 32;

  const DecodingParams& p_;
  const int lane_;
  const Storage* const k_;
  const Storage* const v_;
  uint32 stages_;
  KeyTile* key_tiles_;
};

}  // namespace flashbwd

#endif
