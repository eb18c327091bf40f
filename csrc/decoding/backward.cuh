// The backward of split-KV attention, for few query rows and many keys. A CTA handles one KV head and one split of its
// keys. It works on one key tile at a time (shared memory has room for the next one) and loops over the query rows that
// attend to it, 16 rows per iteration: the rows of all heads of the group, and of all batches if they share K and V.
//
//   each warp owns 16 keys of the tile (if the tile has fewer than 64 keys, warps share keys and divide the columns):
//     S^T = K Q^T -> scale, score_mod, mask -> P^T = exp(S^T - lse)
//     dP^T = V dO^T -> dS^T = P^T (dP^T - delta), then the derivative of score_mod
//     dV += P^T dO, dK += dS^T Q                            accumulated in registers over all rows
//   then all warps exchange dS through shared memory, and each computes a quarter of the columns of
//     dQ += dS K                                            accumulated in the CTA's own slot of the workspace
//
// No two CTAs add to the same address, and each CTA adds in a fixed order, so dq, dk and dv are deterministic. Only the
// gradients of captured tensors are added atomically by many threads. sum_slots.cuh sums the slots of dQ in order.
#pragma once

#include "backward_rows.cuh"
#include "elements.cuh"
#include "merge.cuh"

#ifdef __CUDACC__

namespace flashbwd {

template <int kD, class T, bool kAligned, class Mod>
class Backward {
  using Storage = typename T::Storage;
  using Tile = SharedTile<T, kD>;
  static constexpr int kRows = kBackwardRows;
  static constexpr int kKeys = backward_keys(kD, kBytes<T>);
  static constexpr int kThreads = kBackwardWarps * 32;
  static constexpr int kColumns = kKeys * kD / (kBackwardWarps * 16);  // columns of dK and dV per warp
  static constexpr int kDsStride = kKeys + 4;  // row stride of dS; the padding avoids bank conflicts
  static constexpr int kRowSteps = kRows / kStep<T>;
  static constexpr int kTileBytes = kKeys * kD * kBytes<T>;
  static constexpr int kRowsBytes = kRows * kD * kBytes<T>;

 public:
  __device__ Backward(const DecodingBackwardParams& params, unsigned char* shared)
      : p(params),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        b_kv(blockIdx.x / p.heads_kv),
        head_kv(blockIdx.x % p.heads_kv),
        all_rows(p.group * p.seqlen_q * (p.batch / p.batch_kv)),
        shared_keys(shared_address(shared)),
        shared_q(shared_keys + 4 * kTileBytes),
        shared_dout(shared_q + kRowsBytes),
        dS(reinterpret_cast<float*>(shared + 4 * kTileBytes + 2 * kRowsBytes)),
        lse_of_row(dS + kRows * kDsStride),
        delta_of_row(lse_of_row + kRows),
        rows_of_tile(reinterpret_cast<Row*>(delta_of_row + kRows)),
        seen_key(reinterpret_cast<int*>(rows_of_tile + kRows)) {}

  __device__ void run() {
    clear_slot();
    const int tiles = (p.seqlen_k + kKeys - 1) / kKeys;
    const int begin = static_cast<int>(static_cast<long long>(tiles) * blockIdx.y / p.splits);
    const int end = static_cast<int>(static_cast<long long>(tiles) * (blockIdx.y + 1) / p.splits);
    // With a single row tile, prefetch the next key tile while computing this one. With more row tiles, their
    // iterations hide the latency. The prologue iteration (tile == begin - 1) only starts the first load.
    const bool ahead = all_rows <= kRows;
    listed = false;
    for (int tile = begin - (ahead ? 1 : 0); tile < end; ++tile) {
      set_tile(tile);
      keys_loaded = false;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tdK[n][i] = tdV[n][i] = 0.f;
      }
      for (first_row = 0; first_row < all_rows; first_row += kRows) {
        if (load(tile, end, ahead)) add_rows();
      }
      if (tile >= begin) store_keys();
    }
  }

 private:
  const DecodingBackwardParams& p;
  const int lane, warp, b_kv, head_kv;
  const int all_rows;
  const uint32 shared_keys;            // (2, 2, kKeys, kD): K and V of two tiles
  const uint32 shared_q, shared_dout;  // (kRows, kD)
  float* const dS;                     // (kRows, kKeys), multiplied by the softmax scale; row stride kDsStride
  float* const lse_of_row;             // (kRows,), in log2 units
  float* const delta_of_row;           // (kRows,)
  Row* const rows_of_tile;             // (kRows,)
  int* const seen_key;                 // (kKeys,)
  uint32 shared_k, shared_v;           // (kKeys, kD), the current key tile
  int first_key, first_row = 0;
  int rows_loaded = -1;  // first_row of the rows in shared_q and shared_dout
  bool keys_loaded;
  bool listed;                                       // true if a row sees the key tile that load() last checked
  float tdK[kColumns / 8][4], tdV[kColumns / 8][4];  // (16 keys, kColumns)

  __device__ Row row_at(int row) const { return Row(p, b_kv, head_kv, row); }
  __device__ int slot_columns() const { return (p.head_dim + 1) / 2 * 2; }
  __device__ float* slot_of(const Row& row) const {
    const long long rows = static_cast<long long>(p.batch) * p.heads * p.seqlen_q;
    return p.dq_slots + (blockIdx.y * rows + row.index(p)) * slot_columns();
  }

  __device__ void clear_slot() {
    const int columns = slot_columns();
    for (int i = threadIdx.x; i < all_rows * columns; i += kThreads) slot_of(row_at(i / columns))[i % columns] = 0.f;
    __syncthreads();  // all threads have cleared; add_dq() of any thread adds
  }

  __device__ uint32 keys_at(int tile) const { return shared_keys + tile % 2 * 2 * kTileBytes; }
  __device__ void set_tile(int tile) {
    first_key = tile * kKeys;
    shared_k = keys_at(tile);
    shared_v = shared_k + kTileBytes;
  }

  // True if the mask has a non-empty block for any row of the row tile and any key of key tile `tile`.
  __device__ bool any_visible(int tile) {
    if constexpr (!Mod::kHasMask) return true;
    const int first_key = tile * kKeys;
    const int last_key = min(first_key + kKeys, p.seqlen_k) - 1;
    const int blocks = last_key / p.kv_block - first_key / p.kv_block + 1;
    bool any = false;
    for (int i = threadIdx.x; i < kRows * blocks; i += kThreads) {
      const Row row = row_at(first_row + i / blocks);
      if (row.inside) any |= row.state(p, max(first_key, (first_key / p.kv_block + i % blocks) * p.kv_block)) != 0;
    }
    return __syncthreads_or(any);
  }

  __device__ void load_keys(int tile) {
    const Storage* k = static_cast<const Storage*>(p.k) + b_kv * p.k_strides[0] + head_kv * p.k_strides[1];
    const Storage* v = static_cast<const Storage*>(p.v) + b_kv * p.v_strides[0] + head_kv * p.v_strides[1];
    const uint32 to_k = keys_at(tile), to_v = to_k + kTileBytes;
    if (kAligned && kD <= 128 && (tile + 1) * kKeys <= p.seqlen_k) {  // kD = 256 lacks the registers for load_rows
      const long long first = static_cast<long long>(tile) * kKeys;
      Tile::template load_rows<kThreads, kKeys>(to_k, threadIdx.x, k + first * p.k_strides[2], p.k_strides[2],
                                                p.head_dim);
      Tile::template load_rows<kThreads, kKeys>(to_v, threadIdx.x, v + first * p.v_strides[2], p.v_strides[2],
                                                p.head_dim_v);
      return;
    }
    for (int i = threadIdx.x; i < kKeys * Tile::kVectors; i += kThreads) {
      const int row = i / Tile::kVectors, vector = i % Tile::kVectors;
      const bool inside = tile * kKeys + row < p.seqlen_k;
      const long long key = inside ? tile * kKeys + row : 0;
      Tile::template load_vector<kAligned>(to_k, row, vector, k + key * p.k_strides[2], p.head_dim, inside);
      Tile::template load_vector<kAligned>(to_v, row, vector, v + key * p.v_strides[2], p.head_dim_v, inside);
    }
  }

  __device__ void load_rows() {
    for (int i = threadIdx.x; i < kRows * Tile::kVectors; i += kThreads) {
      const int vector = i % Tile::kVectors;
      const Row row = row_at(first_row + i / Tile::kVectors);
      const Storage* q = static_cast<const Storage*>(p.q) + row.offset(p.q_strides);
      const Storage* dout = static_cast<const Storage*>(p.dout) + row.offset(p.dout_strides);
      Tile::template load_vector<kAligned>(shared_q, i / Tile::kVectors, vector, q, p.head_dim, row.inside);
      Tile::template load_vector<kAligned>(shared_dout, i / Tile::kVectors, vector, dout, p.head_dim_v, row.inside);
    }
    load_statistics();
    rows_loaded = first_row;
  }

  // Loads the key tile and the rows for add_rows(). Returns false if no row of the row tile sees the key tile. If
  // `ahead` is true, waits for the key tile that the previous call started to load, and starts to load the next one.
  __device__ bool load(int tile, int end, bool ahead) {
    const int wanted = ahead ? tile + 1 : tile;
    const bool any = wanted < end && any_visible(wanted);
    const bool ready = ahead ? listed : any;
    listed = any;
    if (any && (ahead || !keys_loaded)) load_keys(wanted);
    if (any && rows_loaded != first_row) load_rows();
    keys_loaded |= any;
    copy_async_commit();
    if (ahead) {
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    return ready;
  }

  // Loads lse and computes delta = rowsum(dout * out) - dlse. `out` is the unrounded float32 output: if one key holds
  // nearly all of a row's weight, dP - delta cancels, and an out rounded to 16 bits would lose most of its digits.
  __device__ void load_statistics() {
    for (int i = warp; i < kRows; i += kBackwardWarps) {
      const Row row = row_at(first_row + i);
      float delta = 0.f;
      for (int column = lane; column < p.head_dim_v; column += 32) {
        delta += load_element<T>(p.dout, row.offset(p.dout_strides) + column) *
                 load_element<Float>(p.out, row.offset(p.out_strides) + column);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
      if (lane == 0) {
        const float lse = p.lse[row.index(p)];
        // A row without keys gets lse = +inf, so that exp2(s - lse) is 0.
        lse_of_row[i] = row.inside && lse != -FLASHBWD_INFINITY ? lse * kLog2e : FLASHBWD_INFINITY;
        rows_of_tile[i] = row;
        delta_of_row[i] = delta - (p.dlse != nullptr ? p.dlse[row.index(p)] : 0.f);
      }
    }
  }

  // Adds the contributions of the current row tile to dK and dV, and those of the key tile to dQ. This thread has
  // waited for its own cp.async copies.
  __device__ void add_rows() {
    __syncthreads();  // the copies of all threads have arrived; all threads read them
    const int key_group = warp % (kKeys / 16);
    const int first_column = warp / (kKeys / 16) * kColumns;
    // If several warps share these keys, only the owner writes dS and adds gradients of captured tensors.
    const bool owner = first_column == 0;

    float tS[kRows / 8][4], tdP[kRows / 8][4];  // S^T and dP^T (16 keys, kRows)
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) tS[i / 4][i % 4] = tdP[i / 4][i % 4] = 0.f;
#pragma unroll 4
    for (int step = 0; step < Tile::kSteps; ++step) {
      uint32 a[4], b[4];
      Tile::load_a(a, shared_k, key_group * 16, step);
      Tile::load_b(b, shared_q, 0, step);
      multiply<T>(tS[0], a, b[0], b[1]);
      multiply<T>(tS[1], a, b[2], b[3]);
      Tile::load_a(a, shared_v, key_group * 16, step);
      Tile::load_b(b, shared_dout, 0, step);
      multiply<T>(tdP[0], a, b[0], b[1]);
      multiply<T>(tdP[1], a, b[2], b[3]);
    }

    bool seen[2] = {false, false};
    differentiate(tS, tdP, seen, key_group, owner);
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
      SplitA<T> tP, tdS;
      split_a<T>(tP, tS + step * (kStep<T> / 8));
      split_a<T>(tdS, tdP + step * (kStep<T> / 8));
#pragma unroll
      for (int pair = 0; pair < kColumns / 16; ++pair) {
        uint32 b[4];
        Tile::load_b_rows(b, shared_dout, step * kStep<T>, first_column / 16 + pair);
        multiply<T>(tdV[2 * pair], tP, b[0], b[1]);
        multiply<T>(tdV[2 * pair + 1], tP, b[2], b[3]);
        Tile::load_b_rows(b, shared_q, step * kStep<T>, first_column / 16 + pair);
        multiply<T>(tdK[2 * pair], tdS, b[0], b[1]);
        multiply<T>(tdK[2 * pair + 1], tdS, b[2], b[3]);
      }
    }
    if constexpr (Mod::kHasMask) clear_unseen(seen, key_group, owner);
    __syncthreads();  // all warps have written dS; all warps read it
    add_dq();
    __syncthreads();  // all warps have read dS, Q and dO; the next iteration overwrites them
  }

  // Replaces S^T by P^T and dP^T by dS^T (16 keys, kRows), and writes dS to shared memory. Sets seen[half] if any row
  // of this lane sees its key of that half.
  __device__ __forceinline__ void differentiate(float (&tS)[kRows / 8][4], float (&tdP)[kRows / 8][4], bool (&seen)[2],
                                                int key_group, bool owner) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const int local_row = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int local_key = key_group * 16 + i % 4 / 2 * 8 + lane / 4;
      const int key = first_key + local_key;
      const Row row = rows_of_tile[local_row];
      float &s = tS[i / 4][i % 4], &ds = tdP[i / 4][i % 4];
      bool visible = row.inside && key < p.seqlen_k;
      if constexpr (Mod::kHasMask) {
        if (visible) {
          const int state = row.state(p, key);
          visible = state == 2 || (state == 1 && Mod::mask_mod(p, {}, row.b, row.head, row.query, key));
        }
      }
      float probability = 0.f, gradient = 0.f;
      if constexpr (!Mod::kHasScoreMod && !Mod::kHasMask) {  // branch-free, so that the compiler interleaves elements
        probability = visible ? exp2_approx(s * p.scale * kLog2e - lse_of_row[local_row]) : 0.f;
        gradient = visible ? probability * (ds - delta_of_row[local_row]) : 0.f;
      } else if (visible) {
        const float raw = s * p.scale;
        float score = raw;
        if constexpr (Mod::kHasScoreMod) score = Mod::score_mod(p, {}, raw, row.b, row.head, row.query, key);
        probability = exp2_approx(score * kLog2e - lse_of_row[local_row]);
        gradient = probability * (ds - delta_of_row[local_row]);
        if constexpr (Mod::kHasScoreMod)
          gradient = Mod::score_gradient(p, raw, row.b, row.head, row.query, key, gradient, owner);
      }
      seen[i % 4 / 2] |= visible;
      s = probability;
      ds = gradient * p.scale;
      if (owner) dS[local_row * kDsStride + local_key] = ds;
    }
  }

  // Zeroes K of the keys that no row of this row tile sees, since K may be NaN or Inf there and 0 * NaN is NaN in dS K.
  // load() then loads the key tile again for the next rows.
  __device__ void clear_unseen(const bool (&seen)[2], int key_group, bool owner) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 lanes = __ballot_sync(0xffffffffu, seen[half]) >> (lane / 4 * 4) & 15u;
      if (owner && lane % 4 == 0) seen_key[key_group * 16 + half * 8 + lane / 4] = lanes != 0;
    }
    __syncthreads();  // all warps have read K and written seen_key; all threads read seen_key and overwrite K
    bool cleared = false;
    for (int i = threadIdx.x; i < kKeys * Tile::kVectors; i += kThreads) {
      if (seen_key[i / Tile::kVectors]) continue;
      store_shared(shared_k + Tile::at(i / Tile::kVectors, i % Tile::kVectors), {0u, 0u, 0u, 0u});
      cleared = true;
    }
    if (__syncthreads_or(cleared)) keys_loaded = false;
  }

  // dQ (kRows, kD / 4 columns of this warp) += dS K
  __device__ void add_dq() {
    constexpr int kPairs = kD / 16 / kBackwardWarps;
    float tdQ[2 * kPairs][4];
#pragma unroll
    for (int i = 0; i < 8 * kPairs; ++i) tdQ[i / 4][i % 4] = 0.f;
#pragma unroll 2
    for (int step = 0; step < kKeys / kStep<T>; ++step) {
      float tdS[kStep<T> / 8][4];  // (16, kStep keys) in MMA tiles of (16, 8)
#pragma unroll
      for (int i = 0; i < kStep<T> / 4; ++i) {
        const float* from = dS + (i % 2 * 8 + lane / 4) * kDsStride + step * kStep<T> + i / 2 * 8 + lane % 4 * 2;
        tdS[i / 2][i % 2 * 2] = from[0];
        tdS[i / 2][i % 2 * 2 + 1] = from[1];
      }
      SplitA<T> a;
      split_a<T>(a, tdS);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32 b[4];
        Tile::load_b_rows(b, shared_k, step * kStep<T>, warp * kPairs + pair);
        multiply<T>(tdQ[2 * pair], a, b[0], b[1]);
        multiply<T>(tdQ[2 * pair + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = rows_of_tile[half * 8 + lane / 4];
      if (!row.inside) continue;
      float* const to = slot_of(row);
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
        const int column = warp * kPairs * 16 + n * 8 + lane % 4 * 2;
        if (column >= p.head_dim) continue;
        atomicAdd(to + column, tdQ[n][half * 2]);  // only this thread adds to this address, so dq is deterministic
        atomicAdd(to + column + 1, tdQ[n][half * 2 + 1]);
      }
    }
  }

  __device__ void store_keys() {
    const int key_group = warp % (kKeys / 16);
    const int first_column = warp / (kKeys / 16) * kColumns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + key_group * 16 + half * 8 + lane / 4;
      if (key >= p.seqlen_k) continue;
      Storage* const dk =
          static_cast<Storage*>(p.dk) + b_kv * p.dk_strides[0] + head_kv * p.dk_strides[1] + key * p.dk_strides[2];
      Storage* const dv =
          static_cast<Storage*>(p.dv) + b_kv * p.dv_strides[0] + head_kv * p.dv_strides[1] + key * p.dv_strides[2];
      if (p.head_dim == kD && p.head_dim_v == kD) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int pair = (first_column + n * 8) / 2 + lane % 4;
          store_pair<T>(dk, pair, kD, tdK[n][half * 2], tdK[n][half * 2 + 1]);
          store_pair<T>(dv, pair, kD, tdV[n][half * 2], tdV[n][half * 2 + 1]);
        }
        continue;
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int pair = (first_column + n * 8) / 2 + lane % 4;
        if (pair * 2 < p.head_dim) store_pair<T>(dk, pair, p.head_dim, tdK[n][half * 2], tdK[n][half * 2 + 1]);
        if (pair * 2 < p.head_dim_v) store_pair<T>(dv, pair, p.head_dim_v, tdV[n][half * 2], tdV[n][half * 2 + 1]);
      }
    }
  }
};

}  // namespace flashbwd

#endif
