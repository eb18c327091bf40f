// The stages of shared memory through which a warp streams keys and values, a few keys a stage.
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
        v_(static_cast<const Storage*>(p.v) + b * p.v_strides[0] + head_kv * p.v_strides[1]),
        k_bytes_(bytes_of_piece(p.head_dim)),
        v_bytes_(bytes_of_piece(p.head_dim_v)) {
    const int warp = threadIdx.x / 32;
    stages_ = shared_address(shared) + warp * kStages * kStageBytes;
    places_ = reinterpret_cast<Place*>(shared + kWarps * kStages * kStageBytes) + warp * kStages;
  }

  __device__ uint32 keys(int stage) const { return stages_ + stage * kStageBytes; }
  __device__ uint32 values(int stage) const { return keys(stage) + kStageBytes / 2; }

  // What wait() waited for.
  __device__ Place place(int stage) const { return places_[stage]; }

  // Begins to load the keys of a chunk, those before its end, if there are any to load. All lanes are done with the
  // stage.
  __device__ __forceinline__ void load(bool any, const Place& place, int stage) {
    if (any && lane_ == 0) places_[stage] = place;
    if (kWholeRows && any && place.first_key + kKeys <= place.end_key) {
      load_whole(k_ + place.first_key * p_.k_strides[2], p_.k_strides[2], k_bytes_, keys(stage));
      load_whole(v_ + place.first_key * p_.v_strides[2], p_.v_strides[2], v_bytes_, values(stage));
    } else if (any) {
#pragma unroll(kAligned && !kWholeRows ? kCopies : 1)
      for (int i = 0; i < kCopies; ++i) {
        const int row = (i * 32 + lane_) / Tile::kPieces;
        const int piece = (i * 32 + lane_) % Tile::kPieces;
        const bool inside = place.first_key + row < place.end_key;
        const long long key = inside ? place.first_key + row : 0;
        Tile::template load_piece<kAligned>(keys(stage), row, piece, k_ + key * p_.k_strides[2], p_.head_dim, inside);
        Tile::template load_piece<kAligned>(values(stage), row, piece, v_ + key * p_.v_strides[2], p_.head_dim_v,
                                            inside);
      }
    }
    copy_async_commit();
  }

  // Until the oldest of kStages - 1 loads has arrived for all lanes, which are done with the stage before.
  __device__ __forceinline__ void wait() {
    copy_async_wait<kStages - 2>();
    __syncwarp();
  }

  // Values that no row sees may hold anything, and 0 * NaN is NaN: bit i of `seen` keeps key i.
  __device__ void clear_unseen_values(int stage, uint32 seen) {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      if (seen >> key & 1u) continue;
      for (int piece = lane_; piece < Tile::kPieces; piece += 32)
        store_shared(values(stage) + Tile::at(key, piece), {0u, 0u, 0u, 0u});
    }
    __syncwarp();
  }

  // Before the shared memory is used for something else.
  __device__ void end() { copy_async_wait<0>(); }

 private:
  static constexpr int kCopies = kKeys * Tile::kPieces / 32;  // of a lane, for K or V of a stage
  // Whether a lane has the same piece of each row that it copies from: all chunks but a list's last go the short way.
  static constexpr bool kWholeRows = kAligned && Tile::kPieces <= 32;

  const DecodingParams& p_;
  const int lane_;
  const Storage* const k_;
  const Storage* const v_;
  const int k_bytes_, v_bytes_;  // of this lane's piece: 16, or 0 past the last
  uint32 stages_;
  Place* places_;

  __device__ int bytes_of_piece(int columns) const {
    return lane_ % Tile::kPieces * Tile::kPieceElements < columns ? 16 : 0;
  }

  // A chunk of K or V, all of whose keys exist. Where SharedTile::at() places a lane's pieces: one place for the lane,
  // with bits flipped and bytes added that are the same for all lanes.
  __device__ __forceinline__ void load_whole(const Storage* chunk, long long stride, int bytes, uint32 tile) {
    constexpr int kRowsAtOnce = 32 / Tile::kPieces;
    const int row = lane_ / Tile::kPieces;
    const Storage* from = chunk + row * stride + (bytes > 0 ? lane_ % Tile::kPieces * Tile::kPieceElements : 0);
    const uint32 to = tile + (lane_ ^ row) * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_async_16((to ^ i * kRowsAtOnce % 8 * 16) + i * 512, from, bytes);
      from += kRowsAtOnce * stride;
    }
  }
};

}  // namespace flashbwd

#endif
