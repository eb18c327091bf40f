// A warp's own cp.async ring in shared memory: each stage holds K and V of one chunk of keys.
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
    places_ = reinterpret_cast<Place*>(shared + kWarps * kStages * kStageBytes) + warp * kStages;
  }

  __device__ uint32 keys(int stage) const { return stages_ + stage * kStageBytes; }
  __device__ uint32 values(int stage) const { return keys(stage) + kStageBytes / 2; }

  // The keys in a stage; valid after wait().
  __device__ Place place(int stage) const { return places_[stage]; }

  // Starts to load the keys of a chunk up to place.end_key; with `any` false, only commits an empty cp.async group. All
  // lanes must have finished reading the stage.
  __device__ __forceinline__ void load(bool any, const Place& place, int stage) {
    if (any && lane_ == 0) places_[stage] = place;
    if (kWholeRows && any && place.first_key + kKeys <= place.end_key) {
      const long long k_stride = p_.k_strides[2], v_stride = p_.v_strides[2];
      Tile::template load_rows<32, kKeys>(keys(stage), lane_, k_ + place.first_key * k_stride, k_stride, p_.head_dim);
      Tile::template load_rows<32, kKeys>(values(stage), lane_, v_ + place.first_key * v_stride, v_stride,
                                          p_.head_dim_v);
    } else if (any) {
#pragma unroll(kAligned && !kWholeRows ? kCopies : 1)
      for (int i = 0; i < kCopies; ++i) {
        const int row = (i * 32 + lane_) / Tile::kVectors;
        const int piece = (i * 32 + lane_) % Tile::kVectors;
        const bool inside = place.first_key + row < place.end_key;
        const long long key = inside ? place.first_key + row : 0;
        Tile::template load_piece<kAligned>(keys(stage), row, piece, k_ + key * p_.k_strides[2], p_.head_dim, inside);
        Tile::template load_piece<kAligned>(values(stage), row, piece, v_ + key * p_.v_strides[2], p_.head_dim_v,
                                            inside);
      }
    }
    copy_async_commit();
  }

  // Waits until the oldest of the kStages - 1 outstanding loads has arrived for all lanes. The __syncwarp() also
  // ensures that all lanes have finished reading the previous stage, which the next load() overwrites.
  __device__ __forceinline__ void wait() {
    copy_async_wait<kStages - 2>();
    __syncwarp();
  }

  // Zeroes the values of keys that no row sees: they may be NaN or Inf, and 0 * NaN is NaN. Keeps key i if bit i of
  // `seen` is set.
  __device__ void clear_unseen_values(int stage, uint32 seen) {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      if (seen >> key & 1u) continue;
      for (int piece = lane_; piece < Tile::kVectors; piece += 32)
        store_shared(values(stage) + Tile::at(key, piece), {0u, 0u, 0u, 0u});
    }
    __syncwarp();
  }

  // Waits for this lane's copies, before the shared memory is reused.
  __device__ void end() { copy_async_wait<0>(); }

 private:
  static constexpr int kCopies = kKeys * Tile::kVectors / 32;  // copies per lane for K (or V) of a stage
  // Chunks without keys past the end use the cheaper load_rows().
  static constexpr bool kWholeRows = kAligned && Tile::kVectors <= 32;

  const DecodingParams& p_;
  const int lane_;
  const Storage* const k_;
  const Storage* const v_;
  uint32 stages_;
  Place* places_;
};

}  // namespace flashbwd

#endif
