// LayerNorm and RMSNorm backward: one pass over x and dz writes dx and fp32 partial sums of dgamma and dbeta.
//
// Persistent CTAs; `groups` rows per CTA at a time. cp.async prefetches rows into a ring of `stages` stages:
//   fetch row + stages - 1 -> wait for row -> row sums of dy and dy * xhat -> exchange -> dx, dgamma += , dbeta +=
// Each thread copies only its own columns into its own slots of shared memory and reads only those, so loads need no
// barrier. The only communication per row is the exchange of the two sums among the lanes of a warp, the warps of a
// group, and for wide rows the CTAs of a cluster.
#pragma once

#include "arguments.h"
#include "column_sums.cuh"
#include "dropout.cuh"
#include "exchange.cuh"
#include "parameters.cuh"
#include "partial.cuh"
#include "plane.cuh"
#include "throttle.cuh"

namespace flashbwd::layer_norm {

// The work of a CTA that computes dx. A worker is one CTA, or all CTAs that share a row.
template <Form kForm, typename TX, typename TDZ>
__device__ __forceinline__ void compute_rows(const BackwardArguments& a, char* smem) {
  constexpr int kElements = elements_of(sizeof(TX), sizeof(TDZ));
  constexpr int kVectors = max_vectors_of(sizeof(TX), sizeof(TDZ));
  using PlaneX = Plane<TX, kElements>;
  using PlaneDz = Plane<TDZ, kElements>;
  // A thread's slots in a stage: for each vector, x followed by dz.
  constexpr int kDzOffset = PlaneX::kSlots * kSlotStride;
  constexpr int kPairStride = (PlaneX::kSlots + PlaneDz::kSlots) * kSlotStride;

  const int lanes = a.tile.lanes;
  const int group = threadIdx.x / lanes;
  const int lane = threadIdx.x - group * lanes;
  const int worker = blockIdx.x / a.tile.chunks;
  const int rank = blockIdx.x - worker * a.tile.chunks;
  const int residue = worker % a.schedule.period;
  const int phase = (a.schedule.phase_base + residue * a.schedule.phase_step) % kElements;

  // This thread owns vectors lane, lane + lanes, ... of the CTA's chunk of the row; `mine` of them are inside the row.
  const int row_vectors = (a.columns + phase + kElements - 1) / kElements;
  const int chunk_start = rank * a.tile.chunk_vectors;
  const int inside = min(a.tile.chunk_vectors, row_vectors - chunk_start);
  const int mine = inside <= lane ? 0 : (inside - lane + lanes - 1) / lanes;
  const int column0 = (chunk_start + lane) * kElements - phase;  // first column of vector 0
  const int column_step = lanes * kElements;
  const int head = column0 < 0 ? phase : 0;  // elements of vector 0 that belong to the previous row
  const int tail = min(kElements, a.columns - (column0 + (mine - 1) * column_step));  // elements of the last vector
  const int whole = tail == kElements ? mine : mine - 1;                              // vectors that end inside the row
  const auto count_of = [&](int v) { return v < whole ? kElements : tail; };

  // This group's rows: row, row + row_step, ... Indices of at least a.rows are skipped.
  const int64_t row_step = static_cast<int64_t>(a.schedule.workers) * a.tile.groups;
  int64_t row =
      (static_cast<int64_t>(worker / a.schedule.period) * a.tile.groups + group) * a.schedule.period + residue;

  // Shared memory: exchange | gamma, beta | mask, dresidual of one row | stages of (planes, kMaxThreads) 16-byte slots
  const uint32_t exchange_s = shared_address(smem);
  const uint32_t gamma_s = exchange_s + exchange_bytes(a.tile);
  const uint32_t own_gamma = keep(gamma_s + lane * static_cast<uint32_t>(parameter_stride(a.tile)));
  const uint32_t own_slots = keep(exchange_s + a.tile.stages_offset + 16 * threadIdx.x);
  const int stage_bytes = kSlotStride * a.tile.planes;
  const int stages = a.tile.stages;
  // dresidual and a given mask are needed only at the end of an iteration, so they have a single stage of their own,
  // which the previous iteration prefetches.
  constexpr int kResidualBytes = kVectors * PlaneX::kSlots * kSlotStride;
  const auto residual_slots = [&](int v) { return own_slots - kResidualBytes + v * PlaneX::kSlots * kSlotStride; };
  const auto keep_slots = [&](int v) {
    return exchange_s + a.tile.keep_offset + (v * kMaxThreads + static_cast<int>(threadIdx.x)) * kElements;
  };
  const bool has_mask = kForm == Form::kDropout && a.dropout.keep != nullptr;
  const bool any_ahead = a.residual != nullptr || has_mask;
  RowExchange exchange(a.tile, exchange_s, group, kHasClusters && a.tile.cluster ? rank : 0);

  Throttle throttle(a, lane == 0, rank);

  const auto fetch = [&](int to_stage, int64_t fetch_row) {
    if (fetch_row < a.rows) {
      const uint32_t slots = own_slots + to_stage * stage_bytes;
      const TX* fetch_x = static_cast<const TX*>(a.x) + fetch_row * a.x_stride + column0;
      const TDZ* fetch_dz = static_cast<const TDZ*>(a.dz) + fetch_row * a.dz_stride + column0;
      // The 16 bytes around the first row's head and the last row's tail may exceed the tensor: load them by elements.
      const bool framed = fetch_row > 0 && fetch_row + 1 < a.rows;
      const int together = a.all_vectors && (framed || head == 0) ? whole : 0;
      const TX* next_x = fetch_x;
      const TDZ* next_dz = fetch_dz;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < together) {
          PlaneX::fill(slots + v * kPairStride, next_x);
          PlaneDz::fill(slots + v * kPairStride + kDzOffset, next_dz);
        }
        next_x = keep(next_x + column_step);
        next_dz = keep(next_dz + column_step);
      }
#pragma unroll 1
      for (int v = together; v < mine; ++v) {
        const int skip = v == 0 ? head : 0;
        const bool within = framed || (skip == 0 && v < whole);
        PlaneX::fill_part(slots + v * kPairStride, fetch_x + v * column_step, skip, count_of(v), a.vector_x && within);
        PlaneDz::fill_part(slots + v * kPairStride + kDzOffset, fetch_dz + v * column_step, skip, count_of(v),
                           a.vector_dz && within);
      }
    }
    commit_copies();
  };
  const auto whole_vector = [&](int v) { return v < whole && (v > 0 || head == 0); };
  // Prefetches dresidual and the given mask of a row.
  const auto fetch_ahead = [&](int64_t of_row) {
    if (of_row < a.rows) {
      const TX* residual = static_cast<const TX*>(a.residual) + of_row * a.residual_stride + column0;
      const uint8_t* kept = a.dropout.keep + of_row * a.dropout.keep_stride + column0;
      const bool all_vectors = (a.residual == nullptr || a.vector_residual) && (!has_mask || a.dropout.vector_keep);
      const bool framed = of_row > 0 && of_row + 1 < a.rows;
      const int together = all_vectors && (framed || head == 0) ? whole : 0;
      const TX* next_residual = residual;
      const uint8_t* next_keep = kept;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < together) {
          if (a.residual != nullptr) PlaneX::fill(residual_slots(v), next_residual);
          if (has_mask) copy_async<kElements>(keep_slots(v), next_keep);
        }
        next_residual = keep(next_residual + column_step);
        next_keep = keep(next_keep + column_step);
      }
#pragma unroll 1
      for (int v = together; v < mine; ++v) {
        const int skip = v == 0 ? head : 0;
        const bool within = framed || whole_vector(v);
        if (a.residual != nullptr) {
          PlaneX::fill_part(residual_slots(v), residual + v * column_step, skip, count_of(v),
                            a.vector_residual && within);
        }
        if (has_mask) {
          fill_mask<kElements>(keep_slots(v), kept + v * column_step, skip, count_of(v),
                               a.dropout.vector_keep && within);
        }
      }
    }
    commit_copies();
  };

  const bool all_stored =
      head == 0 && whole == mine && (a.dx == nullptr || a.vector_dx) && (a.branch == nullptr || a.vector_branch);
  // Flags of the epilogue in one register, which saves several instructions per vector. Bit v: store vector v of dx
  // with 16-byte stores; bit kBranch + v: the same for the branch gradient; then which tensors exist.
  constexpr int kBranch = 4;
  constexpr uint32_t kHasDx = 1u << 8, kHasBranch = 1u << 9, kHasResidual = 1u << 10, kHasMask = 1u << 11,
                     kRest = 1u << 12;
  const uint32_t whole_bits = ((1u << max(whole, 0)) - 1) & (head == 0 ? ~0u : ~1u);
  const uint32_t ends =
      keep((a.vector_dx ? whole_bits : 0) | (a.vector_branch ? whole_bits << kBranch : 0) |
           (a.dx != nullptr ? kHasDx : 0) | (a.branch != nullptr ? kHasBranch : 0) |
           (a.residual != nullptr ? kHasResidual : 0) | (has_mask ? kHasMask : 0) | (all_stored ? 0 : kRest));
  const int pending_groups =
      (any_ahead ? 2 : 1) * (stages - 1);  // cp.async groups committed after those of the current row

  // Statistics are loaded one iteration ahead.
  float next_mu = 0.f;
  float next_rs = 0.f;
  const auto load_statistics = [&](int64_t of_row) {
    if (of_row < a.rows) {
      if (a.mu != nullptr) next_mu = a.mu[of_row];
      next_rs = a.rs[of_row];
    }
  };
  load_statistics(row);

  fetch(0, row);
  if (any_ahead) fetch_ahead(row);
  const DrawnFrom drawn_from = {gamma_s - kDrawnFromBytes, a.dropout.keep_from};
  if (kForm == Form::kDropout && a.dropout.rng != nullptr) drawn_from.write(a.dropout.rng);
  if (a.gamma_dtype == DType::kFloat32) {
    stage_parameters<float, kElements>(a, chunk_start * kElements - phase, gamma_s);
  } else if (a.gamma_dtype == DType::kBFloat16) {
    stage_parameters<__nv_bfloat16, kElements>(a, chunk_start * kElements - phase, gamma_s);
  } else {
    stage_parameters<__half, kElements>(a, chunk_start * kElements - phase, gamma_s);
  }
  // These fetches come after the statistics and gamma, which the first row needs too.
#pragma unroll 1
  for (int s = 1; s < stages - 1; ++s) {
    fetch(s, row + s * row_step);
    if (any_ahead) fetch_ahead(a.rows);
  }
  // All threads wait for the staged parameters, and in a cluster also for the mbarriers of the other CTAs.
  if (kHasClusters && a.tile.cluster) {
    if (threadIdx.x == 0) exchange.init(a.tile.groups);
    cluster_barrier();
  } else {
    group_barrier(0, a.tile.threads());
  }

  // Reads parameter `which` of vector v: 0 is gamma, 1 is beta (Form::kOutput only).
  const auto read_parameter = [&](int which, int v, float (&values)[kElements]) {
    const uint32_t planes = own_gamma + which * a.tile.vectors * 4 * kElements + v * 4 * kElements;
#pragma unroll
    for (int q = 0; q < kElements / 4; ++q) unpack<float>(load_shared_16(planes + 16 * q), &values[4 * q]);
  };
  // Subtracts the offset from vector v, so that the result is proportional to xhat: x - mu, or z - beta for kOutput.
  constexpr bool kFromOutput = kForm == Form::kOutput;
  const auto centre = [&](int v, float mu, float (&x)[kElements]) {
    if constexpr (kFromOutput) {
      float beta[kElements];
      read_parameter(1, v, beta);
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] -= beta[e];
    } else {
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] -= mu;
    }
  };
  // Regenerates the dropout mask of this thread's elements of a row: bit mask_bit(v * kElements + e) is set if kept.
  const auto draw = [&](int64_t of_row, int vectors) {
    uint32_t kept = 0;
    if constexpr (kForm == Form::kDropout) {
      if (!a.dropout.drops) return ~0u;
      if (has_mask || vectors == 0) return kept;
      const uint64_t first = drawn_from.offset() + of_row * a.columns + column0;
      kept = drawn_from.mask<kElements>(first, column_step, vectors);
    }
    return kept;
  };
  const bool sums_here = a.row_sums == nullptr && (a.dx != nullptr || a.branch != nullptr);

  float dgamma[kVectors][kElements] = {};  // (kVectors, kElements): this thread's columns, summed over its rows
  float dbeta[kVectors][kElements] = {};
  int stage = 0;
#pragma unroll 1
  for (int left = a.schedule.rounds; left > 0; --left) {
    fetch(stage == 0 ? stages - 1 : stage - 1, row + (stages - 1) * row_step);  // into the stage of the previous row
    const int here = row < a.rows ? mine : 0;
    const uint32_t kept = draw(row, here);
    wait_copies(pending_groups);
    const uint32_t slots = own_slots + stage * stage_bytes;
    const float mu = next_mu;
    const float rs = next_rs;
    load_statistics(row + row_step);
    if (head > 0 && here > 0) {
      if (a.vector_x) PlaneX::clear_head(slots, head);
      if (a.vector_dz) PlaneDz::clear_head(slots + kDzOffset, head);
    }

    float2 sums = make_float2(0.f, 0.f);  // (sum of dy, sum of dy * xhat)
    if (sums_here) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < here) {
          float x[kElements], dz[kElements], gamma[kElements];
          PlaneX::read(slots + v * kPairStride, x);
          PlaneDz::read(slots + v * kPairStride + kDzOffset, dz);
          read_parameter(0, v, gamma);
          centre(v, mu, x);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const float dy = gamma[e] * dz[e];
            sums.x += dy;
            sums.y = fmaf(kFromOutput ? dz[e] * gamma_over_divisor(gamma[e]) : dy, x[e], sums.y);
          }
        }
      }
    }
    throttle.hold(a, a.schedule.rounds - left + 1);
    if (sums_here) {
      if (!kFromOutput) sums.y *= rs;
      sums = exchange.sum(a.tile, sums, a.schedule.rounds - left);
    } else if (a.row_sums != nullptr && row < a.rows) {
      sums = a.row_sums[row];
    }
    const float mean_dy = !a.centred ? 0.f : sums.x * a.inverse_columns * rs;  // both means are multiplied by rs
    const float mean_dy_xhat = sums.y * a.inverse_columns * rs;

    if (any_ahead) wait_copies(1);  // all but the fetch of this iteration
    TX* next_dx = static_cast<TX*>(a.dx) + row * a.dx_stride + column0;
    TDZ* next_branch = static_cast<TDZ*>(a.branch) + row * a.branch_stride + column0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < here) {
        float x[kElements], dz[kElements], gamma[kElements];
        PlaneX::read(slots + v * kPairStride, x);
        PlaneDz::read(slots + v * kPairStride + kDzOffset, dz);
        read_parameter(0, v, gamma);
        centre(v, mu, x);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float xhat = x[e] * (kFromOutput ? inverse_of_divisor(gamma[e]) : rs);
          dgamma[v][e] = fmaf(dz[e], xhat, dgamma[v][e]);
          dbeta[v][e] += dz[e];
          x[e] = fmaf(gamma[e] * dz[e], rs, -fmaf(xhat, mean_dy_xhat, mean_dy));
        }
        if (ends & kHasResidual) {  // dx += dresidual
          PlaneX::read(residual_slots(v), dz);
#pragma unroll
          for (int e = 0; e < kElements; ++e) x[e] += dz[e];
        }
        if (ends & kHasDx) {
          const auto packed = PlaneX::packed(x);
          if (ends & 1u << v) {
            PlaneX::store(next_dx, packed);
          } else {
            PlaneX::put(slots + v * kPairStride, packed);
          }
        }
        if constexpr (kForm == Form::kDropout) {
          if (ends & kHasBranch) {
            const uint32_t mask = ends & kHasMask ? given_mask<kElements>(__cvta_shared_to_generic(keep_slots(v)))
                                                  : kept >> v * kElements / 4;
#pragma unroll
            for (int e = 0; e < kElements; ++e) x[e] *= a.dropout.scale;
            auto packed = PlaneDz::packed(x);
#pragma unroll
            for (int h = 0; h < PlaneDz::kSlots; ++h) {
              packed.slots[h] = kept_or_zero<TDZ>(packed.slots[h], mask >> h * PlaneDz::kPerSlot / 4);
            }
            if (ends & 1u << (kBranch + v)) {
              PlaneDz::store(next_branch, packed);
            } else {
              PlaneDz::put(slots + v * kPairStride + kDzOffset, packed);
            }
          }
        }
      }
      next_dx = keep(next_dx + column_step);
      next_branch = keep(next_branch + column_step);
    }
    // Vectors without 16-byte stores: write them by elements from the slots of x and dz, where put() left them.
#pragma unroll 1
    for (int v = 0; v < here && ends & kRest; ++v) {
      const int skip = v == 0 ? head : 0;
      if (a.dx != nullptr && !(a.vector_dx && whole_vector(v))) {
        PlaneX::store_part(slots + v * kPairStride, next_dx + (v - kVectors) * column_step, skip, count_of(v));
      }
      if (kForm == Form::kDropout && a.branch != nullptr && !(a.vector_branch && whole_vector(v))) {
        PlaneDz::store_part(slots + v * kPairStride + kDzOffset, next_branch + (v - kVectors) * column_step, skip,
                            count_of(v));
      }
    }
    row += row_step;
    if (any_ahead) fetch_ahead(row);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  launch_dependents();
  if (a.partial != nullptr) {
    write_partial<kVectors, kElements>(a, reinterpret_cast<float*>(smem + a.tile.stages_offset), dgamma, dbeta);
  }
}

template <Form kForm, typename TX, typename TDZ>
__global__ void __launch_bounds__(kMaxThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(128) char smem[];
  const int row_ctas = a.schedule.workers * a.tile.chunks;
  // Threads after the tile's threads, or CTAs after the row CTAs, compute dgamma and dbeta by columns.
  if constexpr (kForm == Form::kPlain) {
    if (a.tile.sums_columns && threadIdx.x >= a.tile.threads()) {
      sum_columns<TX, TDZ>(a, reinterpret_cast<float*>(smem + a.tile.columns_offset), a.tile.threads(), 0);
      return;
    }
    if (!a.tile.sums_columns && blockIdx.x >= row_ctas) {
      sum_columns<TX, TDZ>(a, reinterpret_cast<float*>(smem), 0, row_ctas);
      return;
    }
  }
  if (blockIdx.x < row_ctas) compute_rows<kForm, TX, TDZ>(a, smem);
}

}  // namespace flashbwd::layer_norm
