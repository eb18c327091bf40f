// LayerNorm and RMSNorm backward: one pass over x and dz writes dx and leaves fp32 partial sums of dgamma and dbeta.
//
// Every thread copies its own columns of the rows to come into its own slots of shared memory (cp.async, `stages` rows
// deep) and reads nobody else's: loads need no barrier. A row is read from there twice, for its sums and for dx. It
// costs one exchange of two sums, among the lanes of a warp, the warps of a group, and the CTAs of a cluster where rows
// are wide.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "arguments.h"
#include "exchange.cuh"

namespace flashbwd::layer_norm {

// One tensor's part of a stage: fills and reads a thread's own slots.
template <typename T, int kElements>
struct Plane {
  static constexpr int kSlots = kElements * static_cast<int>(sizeof(T)) / 16;  // a vector
  static constexpr int kPerSlot = 16 / static_cast<int>(sizeof(T));

  // Fetches a whole vector from an aligned address. Slots are given by their address in the shared window.
  static __device__ void fill(uint32_t slots, const T* source) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) copy_async_16(slots + h * kSlotStride, source + h * kPerSlot);
  }

  // Fetches a vector of which elements `skip` to `count` are wanted; the others become zeros. With `vector` the
  // address is that of 16 bytes, and elements before the row come along (see clear_head).
  static __device__ void fill_part(uint32_t slots, const T* source, int skip, int count, bool vector) {
#pragma unroll 1
    for (int h = 0; h < kSlots; ++h) {
      const uint32_t slot = slots + h * kSlotStride;
      if (vector) {
        const int bytes = (count - h * kPerSlot) * static_cast<int>(sizeof(T));
        copy_async_16(slot, source + h * kPerSlot, max(0, min(16, bytes)));
      } else {
#pragma unroll 1
        for (int e = 0; e < kPerSlot; ++e) {
          const int element = h * kPerSlot + e;
          const bool wanted = element >= skip && element < count;
          store_shared(slot + e * sizeof(T), wanted ? source[element] : from_float<T>(0.f));
        }
      }
    }
  }

  // Clears the elements that belong to the row before.
  static __device__ void clear_head(uint32_t slots, int count) {
#pragma unroll 1
    for (int e = 0; e < count; ++e) store_shared(element_of(slots, e), from_float<T>(0.f));
  }

  static __device__ void read(uint32_t slots, float (&values)[kElements]) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) unpack<T>(load_shared_16(slots + h * kSlotStride), &values[h * kPerSlot]);
  }

  // Writes a whole vector to an aligned address.
  static __device__ void store(T* target, const float (&values)[kElements]) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) store_streaming(target + h * kPerSlot, pack<T>(&values[h * kPerSlot]));
  }

  // Writes elements `skip` to `count`, by way of the slots that x came in.
  static __device__ void store_part(uint32_t slots, T* target, int skip, int count, const float (&values)[kElements]) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) store_shared_16(slots + h * kSlotStride, pack<T>(&values[h * kPerSlot]));
#pragma unroll 1
    for (int e = skip; e < count; ++e) target[e] = load_shared<T>(element_of(slots, e));
  }

  static __device__ uint32_t element_of(uint32_t slots, int e) {
    return slots + e / kPerSlot * kSlotStride + e % kPerSlot * static_cast<int>(sizeof(T));
  }
};

// gamma of a CTA's columns in fp32, 1 where there is none and 0 outside the row: (vectors, kElements / 4, lanes) of
// four columns each. All threads of the CTA take part.
template <typename T, int kElements>
__device__ void stage_gamma(const BackwardArguments& a, int first_column, uint32_t gamma_s) {
  constexpr int kQuads = kElements / 4;  // of a vector
  const T* gamma = static_cast<const T*>(a.gamma);
#pragma unroll 2
  for (int i = threadIdx.x; i < a.tile.vectors * kQuads * a.tile.lanes; i += blockDim.x) {
    const int plane = i / a.tile.lanes;
    const int vector = plane / kQuads * a.tile.lanes + i % a.tile.lanes;
    const int column = first_column + vector * kElements + plane % kQuads * 4;
    float quad[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool inside = column + e >= 0 && column + e < a.columns;
      quad[e] = !inside ? 0.f : (gamma == nullptr ? 1.f : to_float(gamma[column + e]) + (a.zero_centered ? 1.f : 0.f));
    }
    store_shared_16(gamma_s + 16 * i, pack<float>(quad));
  }
}

// Sums over the groups of the CTA, in the order of the groups, into the worker's row of a.partial. It works out anew
// where it is, from registers read again: what it needs would otherwise be kept through the loop over the rows.
template <int kVectors, int kElements>
__device__ void write_partial(const BackwardArguments& a, char* smem, const float (&dgamma)[kVectors][kElements],
                              const float (&dbeta)[kVectors][kElements]) {
  const int thread = read_thread_index();
  const int block = read_block_index();
  const int lanes = a.tile.lanes;
  const int worker = block / a.tile.chunks;
  const int chunk_start = (block - worker * a.tile.chunks) * a.tile.chunk_vectors;
  const int residue = worker % a.schedule.period;
  const int first_column =
      chunk_start * kElements - (a.schedule.phase_base + residue * a.schedule.phase_step) % kElements;
  const int stride = reduce_stride(lanes);
  const int group_floats = a.tile.vectors * kElements * stride;
  // reduce_s (groups, vectors, kElements, stride), where the stages were.
  float* reduce_s = reinterpret_cast<float*>(smem + exchange_bytes(a.tile) + gamma_bytes(a.tile));
  float* mine = reduce_s + thread / lanes * group_floats + thread % lanes;
  float* partial = a.partial + static_cast<int64_t>(worker) * 2 * a.columns;
  wait_copies(0);
  for (int which = 0; which < 2; ++which) {
    __syncthreads();  // all have left the stages, or the sums before
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < a.tile.vectors) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          mine[(v * kElements + e) * stride] = which == 0 ? dgamma[v][e] : dbeta[v][e];
        }
      }
    }
    __syncthreads();  // all have written
    for (int i = thread; i < a.tile.vectors * kElements * lanes; i += blockDim.x) {
      const int vector = i / kElements;
      const int column = first_column + i;
      if (vector >= a.tile.chunk_vectors || column < 0 || column >= a.columns) continue;
      const float* source = reduce_s + (vector / lanes * kElements + i % kElements) * stride + vector % lanes;
      double sum = 0.;  // over up to 256 rows of threads; a worker's sum is rounded once
#pragma unroll 4
      for (int g = 0; g < a.tile.groups; ++g) sum += source[g * group_floats];
      partial[which * a.columns + column] = static_cast<float>(sum);
    }
  }
}

template <typename TX, typename TDZ>
__global__ void __launch_bounds__(kMaxThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments a) {
  constexpr int kElements = elements_of(sizeof(TX), sizeof(TDZ));
  constexpr int kVectors = max_vectors_of(sizeof(TX), sizeof(TDZ));
  using PlaneX = Plane<TX, kElements>;
  using PlaneDz = Plane<TDZ, kElements>;
  // A thread's slots of a stage: x and dz of each vector side by side, then dresidual of each.
  constexpr int kDzOffset = PlaneX::kSlots * kSlotStride;
  constexpr int kPairStride = (PlaneX::kSlots + PlaneDz::kSlots) * kSlotStride;
  extern __shared__ __align__(128) char smem[];

  const int lanes = a.tile.lanes;
  const int group = threadIdx.x / lanes;
  const int lane = threadIdx.x - group * lanes;
  const int worker = blockIdx.x / a.tile.chunks;
  const int rank = blockIdx.x - worker * a.tile.chunks;
  const int residue = worker % a.schedule.period;
  const int phase = (a.schedule.phase_base + residue * a.schedule.phase_step) % kElements;

  // This thread's vectors: lane, lane + lanes, ... of the chunk. Those inside the row number `mine`.
  const int row_vectors = (a.columns + phase + kElements - 1) / kElements;
  const int chunk_start = rank * a.tile.chunk_vectors;
  const int inside = min(a.tile.chunk_vectors, row_vectors - chunk_start);
  const int mine = inside <= lane ? 0 : (inside - lane + lanes - 1) / lanes;
  const int column0 = (chunk_start + lane) * kElements - phase;  // of vector 0; the next is lanes * kElements on
  const int column_step = lanes * kElements;
  const int head = column0 < 0 ? phase : 0;  // elements of vector 0 that belong to the row before
  const int tail = min(kElements, a.columns - (column0 + (mine - 1) * column_step));  // elements of the last vector
  const int whole = tail == kElements ? mine : mine - 1;                              // vectors that end within the row
  const auto count_of = [&](int v) { return v < whole ? kElements : tail; };

  // Its rows: `first`, then every a.row_step rows.
  const auto row_of = [&](int g) {
    return (static_cast<int64_t>(worker / a.schedule.period) * a.tile.groups + g) * a.schedule.period + residue;
  };
  const auto rows_of = [&](int g) {
    return static_cast<int>(max(int64_t{0}, (a.rows - row_of(g) + a.row_step - 1) / a.row_step));
  };
  const int64_t first = row_of(group);
  const int rows = rows_of(group);
  // Several rows a warp: it stays whole as long as its first group has a row.
  const int warp_rows = lanes < kWarp ? rows_of((threadIdx.x & ~(kWarp - 1)) / lanes) : rows;

  // Shared memory: mbarriers, exchanged sums | gamma | stages (planes, kMaxThreads) of 16 bytes.
  const uint32_t exchange_s = shared_address(smem);
  const uint32_t gamma_s = exchange_s + exchange_bytes(a.tile);
  const uint32_t own_gamma = keep(gamma_s + 16 * lane);
  const uint32_t own_slots = keep(gamma_s + gamma_bytes(a.tile) + 16 * threadIdx.x);
  const int stage_bytes = kSlotStride * a.tile.planes;
  const int residual_offset = a.tile.vectors * kPairStride;
  const int stages = a.tile.stages;
  RowExchange exchange(a.tile, exchange_s, group, kHasClusters && a.tile.cluster ? rank : 0);

  // The next row to fetch, number `fetched` of this thread's, at its vector 0.
  int fetched = 0;
  const TX* fetch_x = static_cast<const TX*>(a.x) + first * a.x_stride + column0;
  const TDZ* fetch_dz = static_cast<const TDZ*>(a.dz) + first * a.dz_stride + column0;
  const auto fetch = [&](int to_stage) {
    if (fetched < rows) {
      const uint32_t slots = own_slots + to_stage * stage_bytes;
      const uint32_t residual_slots = slots + residual_offset;
      const TX* fetch_residual = nullptr;
      if (a.residual != nullptr) {
        fetch_residual =
            static_cast<const TX*>(a.residual) + (first + fetched * a.row_step) * a.residual_stride + column0;
      }
      // Of the first row's head and the last row's tail, 16 bytes are not all the tensor's: those come by elements.
      const int64_t row = first + fetched * a.row_step;
      const bool framed = row > 0 && row + 1 < a.rows;
      const int together = a.all_vectors && (framed || head == 0) ? whole : 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < together) {
          PlaneX::fill(slots + v * kPairStride, fetch_x + v * column_step);
          PlaneDz::fill(slots + v * kPairStride + kDzOffset, fetch_dz + v * column_step);
          if (a.residual != nullptr) {
            PlaneX::fill(residual_slots + v * PlaneX::kSlots * kSlotStride, fetch_residual + v * column_step);
          }
        }
      }
#pragma unroll 1
      for (int v = together; v < mine; ++v) {
        const int skip = v == 0 ? head : 0;
        const bool within = framed || (skip == 0 && v < whole);
        PlaneX::fill_part(slots + v * kPairStride, fetch_x + v * column_step, skip, count_of(v), a.vector_x && within);
        PlaneDz::fill_part(slots + v * kPairStride + kDzOffset, fetch_dz + v * column_step, skip, count_of(v),
                           a.vector_dz && within);
        if (a.residual != nullptr) {
          PlaneX::fill_part(residual_slots + v * PlaneX::kSlots * kSlotStride, fetch_residual + v * column_step, skip,
                            count_of(v), a.vector_residual && within);
        }
      }
    }
    commit_copies();
    ++fetched;
    fetch_x += a.x_step;
    fetch_dz += a.dz_step;
  };

#pragma unroll 1
  for (int s = 0; s < stages - 1; ++s) fetch(s);
  // Statistics are loaded a row ahead.
  float next_mu = 0.f;
  float next_rs = 0.f;
  if (rows > 0) {
    if (a.mu != nullptr) next_mu = a.mu[first];
    next_rs = a.rs[first];
  }

  if (a.gamma_dtype == DType::kFloat32) {
    stage_gamma<float, kElements>(a, chunk_start * kElements - phase, gamma_s);
  } else if (a.gamma_dtype == DType::kBFloat16) {
    stage_gamma<__nv_bfloat16, kElements>(a, chunk_start * kElements - phase, gamma_s);
  } else {
    stage_gamma<__half, kElements>(a, chunk_start * kElements - phase, gamma_s);
  }
  // All wait for gamma; where CTAs share rows, for the mbarriers of the other CTAs too.
  if (kHasClusters && a.tile.cluster) {
    if (threadIdx.x < 2) init_barrier(exchange.barriers + 8 * threadIdx.x, 1);
    cluster_barrier();
  } else {
    __syncthreads();
  }

  const auto read_gamma = [&](int v, float (&gamma)[kElements]) {
#pragma unroll
    for (int q = 0; q < kElements / 4; ++q) {
      unpack<float>(load_shared_16(own_gamma + 16 * (v * (kElements / 4) + q) * lanes), &gamma[4 * q]);
    }
  };

  float dgamma[kVectors][kElements] = {};  // (kVectors, kElements): this thread's columns, over its rows
  float dbeta[kVectors][kElements] = {};
  int stage = 0;
  const uint64_t start = global_time();
#pragma unroll 1
  for (int i = 0; i < warp_rows; ++i) {
    if (a.pace > 0) wait_until(start + (static_cast<uint64_t>(i) * a.pace >> 4));
    fetch(stage == 0 ? stages - 1 : stage - 1);  // where the row before was
    wait_copies(stages - 1);
    const uint32_t slots = own_slots + stage * stage_bytes;
    const int here = i < rows ? mine : 0;
    const int64_t row = first + i * a.row_step;
    const float mu = next_mu;
    const float rs = next_rs;
    if (i + 1 < rows) {
      if (a.mu != nullptr) next_mu = a.mu[row + a.row_step];
      next_rs = a.rs[row + a.row_step];
    }
    if (head > 0 && here > 0) {
      if (a.vector_x) PlaneX::clear_head(slots, head);
      if (a.vector_dz) PlaneDz::clear_head(slots + kDzOffset, head);
    }

    float2 sums = make_float2(0.f, 0.f);  // of dy and of dy * xhat
    if (a.row_sums != nullptr) {
      if (i < rows) sums = a.row_sums[row];
    } else if (a.dx != nullptr) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < here) {
          float x[kElements], dz[kElements], gamma[kElements];
          PlaneX::read(slots + v * kPairStride, x);
          PlaneDz::read(slots + v * kPairStride + kDzOffset, dz);
          read_gamma(v, gamma);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const float dy = gamma[e] * dz[e];
            sums.x += dy;
            sums.y += dy * (x[e] - mu);
          }
        }
      }
      sums.y *= rs;
      sums = exchange.sum(a.tile, sums);
    }
    const float mean_dy = a.mu == nullptr ? 0.f : sums.x * a.inverse_columns;
    const float mean_dy_xhat = sums.y * a.inverse_columns;

    TX* dx = static_cast<TX*>(a.dx) + row * a.dx_stride + column0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < here) {
        float x[kElements], dz[kElements], gamma[kElements];
        PlaneX::read(slots + v * kPairStride, x);
        PlaneDz::read(slots + v * kPairStride + kDzOffset, dz);
        read_gamma(v, gamma);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float xhat = (x[e] - mu) * rs;
          dgamma[v][e] += dz[e] * xhat;
          dbeta[v][e] += dz[e];
          x[e] = ((gamma[e] * dz[e] - mean_dy) - xhat * mean_dy_xhat) * rs;
        }
        if (a.dx != nullptr) {
          if (a.residual != nullptr) {
            PlaneX::read(slots + residual_offset + v * PlaneX::kSlots * kSlotStride, dz);
#pragma unroll
            for (int e = 0; e < kElements; ++e) x[e] += dz[e];
          }
          const int skip = v == 0 ? head : 0;
          if (a.vector_dx && skip == 0 && v < whole) {
            PlaneX::store(dx + v * column_step, x);
          } else {
            PlaneX::store_part(slots + v * kPairStride, dx + v * column_step, skip, count_of(v), x);
          }
        }
      }
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  launch_dependents();
  if (a.partial != nullptr) write_partial<kVectors, kElements>(a, smem, dgamma, dbeta);
}

}  // namespace flashbwd::layer_norm
