// LayerNorm and RMSNorm backward: one pass over x and dz writes dx and leaves fp32 partial sums of dgamma and dbeta.
//
// Every thread copies its own columns of the rows to come into its own slots of shared memory (cp.async, `stages` rows
// deep) and reads nobody else's: loads need no barrier. A row is read from there twice, for its sums and for dx. It
// costs one exchange of two sums, among the lanes of a warp, the warps of a group, and the CTAs of a cluster where rows
// are wide.
#pragma once

#include "arguments.h"
#include "dropout.cuh"
#include "exchange.cuh"
#include "lock_step.cuh"
#include "parameters.cuh"
#include "partial.cuh"
#include "plane.cuh"

namespace flashbwd::layer_norm {

template <Form kForm, typename TX, typename TDZ>
__global__ void __launch_bounds__(kMaxThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments a) {
  constexpr int kElements = elements_of(sizeof(TX), sizeof(TDZ));
  constexpr int kVectors = max_vectors_of(sizeof(TX), sizeof(TDZ));
  using PlaneX = Plane<TX, kElements>;
  using PlaneDz = Plane<TDZ, kElements>;
  // A thread's slots of a stage: x and dz of each vector side by side.
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
  const int whole_dx = a.vector_dx ? whole : 0;
  const auto count_of = [&](int v) { return v < whole ? kElements : tail; };

  // Its rows: from `row` on, every row_step rows. Rows from a.rows on are none.
  const int64_t row_step = static_cast<int64_t>(a.schedule.workers) * a.tile.groups;
  int64_t row =
      (static_cast<int64_t>(worker / a.schedule.period) * a.tile.groups + group) * a.schedule.period + residue;

  // Shared memory: mbarriers, exchanged sums | gamma | stages (planes, kMaxThreads) of 16 bytes.
  const uint32_t exchange_s = shared_address(smem);
  const uint32_t gamma_s = exchange_s + exchange_bytes(a.tile);
  const uint32_t own_gamma = keep(gamma_s + lane * static_cast<uint32_t>(parameter_stride(a.tile)));
  const uint32_t own_slots = keep(exchange_s + a.tile.stages_offset + 16 * threadIdx.x);
  const int stage_bytes = kSlotStride * a.tile.planes;
  const int stages = a.tile.stages;
  RowExchange exchange(a.tile, exchange_s, group, kHasClusters && a.tile.cluster ? rank : 0);

  constexpr bool kInStep = kForm != Form::kDropout;  // its registers are needed to draw the mask
  LockStep lock_step(a, lane == 0, rank);

  const auto residual_of = [&](int64_t of_row) {
    return static_cast<const TX*>(a.residual) + of_row * a.residual_stride + column0;
  };

  int64_t fetch_row = row;
  const auto fetch = [&](int to_stage) {
    if (fetch_row < a.rows) {
      const uint32_t slots = own_slots + to_stage * stage_bytes;
      const TX* fetch_x = static_cast<const TX*>(a.x) + fetch_row * a.x_stride + column0;
      const TDZ* fetch_dz = static_cast<const TDZ*>(a.dz) + fetch_row * a.dz_stride + column0;
      // Of the first row's head and the last row's tail, 16 bytes are not all the tensor's: those come by elements.
      const bool framed = fetch_row > 0 && fetch_row + 1 < a.rows;
      const int together = a.all_vectors && (framed || head == 0) ? whole : 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < together) {
          PlaneX::fill(slots + v * kPairStride, fetch_x + v * column_step);
          PlaneDz::fill(slots + v * kPairStride + kDzOffset, fetch_dz + v * column_step);
        }
      }
#pragma unroll 1
      for (int v = together; v < mine; ++v) {
        const int skip = v == 0 ? head : 0;
        const bool within = framed || (skip == 0 && v < whole);
        PlaneX::fill_part(slots + v * kPairStride, fetch_x + v * column_step, skip, count_of(v), a.vector_x && within);
        PlaneDz::fill_part(slots + v * kPairStride + kDzOffset, fetch_dz + v * column_step, skip, count_of(v),
                           a.vector_dz && within);
      }
      if (a.residual != nullptr) {  // needed at the end of the row's turn only: until then it waits in L2
        const TX* residual = residual_of(fetch_row);
#pragma unroll 1
        for (int v = 0; v < mine; ++v) prefetch(residual + v * column_step + (v == 0 ? head : 0));
      }
    }
    commit_copies();
    fetch_row += row_step;
  };

#pragma unroll 1
  for (int s = 0; s < stages - 1; ++s) fetch(s);
  // Statistics are loaded a row ahead.
  float next_mu = 0.f;
  float next_rs = 0.f;
  const auto load_statistics = [&](int64_t of_row) {
    if (of_row < a.rows) {
      if (a.mu != nullptr) next_mu = a.mu[of_row];
      next_rs = a.rs[of_row];
    }
  };
  load_statistics(row);

  if (a.gamma_dtype == DType::kFloat32) {
    stage_parameters<float, kElements>(a, chunk_start * kElements - phase, gamma_s);
  } else if (a.gamma_dtype == DType::kBFloat16) {
    stage_parameters<__nv_bfloat16, kElements>(a, chunk_start * kElements - phase, gamma_s);
  } else {
    stage_parameters<__half, kElements>(a, chunk_start * kElements - phase, gamma_s);
  }
  if (threadIdx.x == 0) store_shared(exchange_s + kToldOffset, 0.f);
  // All wait for gamma; where CTAs share rows, for the mbarriers of the other CTAs too.
  if (kHasClusters && a.tile.cluster) {
    if (threadIdx.x == 0) exchange.init();
    cluster_barrier();
  } else {
    __syncthreads();
  }

  // Parameter `which` of vector v: gamma, and in Form::kOutput beta.
  const auto read_parameter = [&](int which, int v, float (&values)[kElements]) {
    const uint32_t planes = own_gamma + which * a.tile.vectors * 4 * kElements + v * 4 * kElements;
#pragma unroll
    for (int q = 0; q < kElements / 4; ++q) unpack<float>(load_shared_16(planes + 16 * q), &values[4 * q]);
  };
  // What stands in for x, vector v, less the mean: (x - mu), or xhat itself from the output.
  constexpr bool kGivesXhat = kForm == Form::kOutput;
  const auto centre = [&](int v, float mu, const float (&gamma)[kElements], float (&x)[kElements]) {
    if constexpr (kGivesXhat) {
      float beta[kElements];
      read_parameter(1, v, beta);
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] = xhat_of_output(x[e], gamma[e], beta[e]);
    } else {
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] -= mu;
    }
  };
  const bool sums_here = a.row_sums == nullptr && (a.dx != nullptr || a.branch != nullptr);

  float dgamma[kVectors][kElements] = {};  // (kVectors, kElements): this thread's columns, over its rows
  float dbeta[kVectors][kElements] = {};
  int stage = 0;
#pragma unroll 1
  for (int left = a.schedule.rounds; left > 0; --left) {
    fetch(stage == 0 ? stages - 1 : stage - 1);  // where the row before was
    const int here = row < a.rows ? mine : 0;
    uint32_t kept = 0;  // bit v * kElements + e
    if constexpr (kForm == Form::kDropout) {
      if (!a.dropout.drops) kept = ~0u;
      for (int v = 0; a.dropout.drops && v < here; ++v) {
        const int column = column0 + v * column_step;
        const uint32_t bits = a.dropout.keep != nullptr
                                  ? given_bits<kElements>(a.dropout.keep + row * a.dropout.keep_stride + column,
                                                          v == 0 ? head : 0, count_of(v), a.dropout.vector_keep)
                                  : drawn_bits<kElements>(a.dropout.rng[0], a.dropout.rng[1] + row * a.columns + column,
                                                          a.dropout.keep_from);
        kept |= bits << v * kElements;
      }
    }
    wait_copies(stages - 1);
    const uint32_t slots = own_slots + stage * stage_bytes;
    const float mu = next_mu;
    const float rs = next_rs;
    load_statistics(row + row_step);
    const int begun = kInStep ? lock_step.begin(a) : 0;
    if (head > 0 && here > 0) {
      if (a.vector_x) PlaneX::clear_head(slots, head);
      if (a.vector_dz) PlaneDz::clear_head(slots + kDzOffset, head);
    }

    float2 sums = make_float2(0.f, 0.f);  // of dy and of dy * xhat
    if (sums_here) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < here) {
          float x[kElements], dz[kElements], gamma[kElements];
          PlaneX::read(slots + v * kPairStride, x);
          PlaneDz::read(slots + v * kPairStride + kDzOffset, dz);
          read_parameter(0, v, gamma);
          centre(v, mu, gamma, x);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const float dy = gamma[e] * dz[e];
            sums.x += dy;
            sums.y = fmaf(dy, x[e], sums.y);
          }
        }
      }
    }
    if (kInStep) lock_step.hold(a, exchange_s + kToldOffset, begun);
    if (sums_here) {
      if (!kGivesXhat) sums.y *= rs;
      sums = exchange.sum(a.tile, sums);
    } else if (a.row_sums != nullptr && row < a.rows) {
      sums = a.row_sums[row];
    }
    const float mean_dy = !a.centred ? 0.f : sums.x * a.inverse_columns * rs;  // both times rs
    const float mean_dy_xhat = sums.y * a.inverse_columns * rs;

    TX* dx = static_cast<TX*>(a.dx) + row * a.dx_stride + column0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < here) {
        const int skip = v == 0 ? head : 0;
        uint4 past[PlaneX::kSlots];  // what reaches dx past the norm
        if (a.residual != nullptr && a.vector_residual && skip == 0 && v < whole) {
          PlaneX::load(residual_of(row) + v * column_step, past);
        }
        float x[kElements], dz[kElements], gamma[kElements];
        PlaneX::read(slots + v * kPairStride, x);
        PlaneDz::read(slots + v * kPairStride + kDzOffset, dz);
        read_parameter(0, v, gamma);
        centre(v, mu, gamma, x);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float xhat = kGivesXhat ? x[e] : x[e] * rs;
          dgamma[v][e] = fmaf(dz[e], xhat, dgamma[v][e]);
          dbeta[v][e] += dz[e];
          x[e] = fmaf(gamma[e] * dz[e], rs, -fmaf(xhat, mean_dy_xhat, mean_dy));
        }
        if (a.residual != nullptr) {
          if (a.vector_residual && skip == 0 && v < whole) {
#pragma unroll
            for (int h = 0; h < PlaneX::kSlots; ++h) unpack<TX>(past[h], &dz[h * PlaneX::kPerSlot]);
          } else {
            const TX* residual = residual_of(row) + v * column_step;
            PlaneX::fill_part(slots + v * kPairStride, residual, skip, count_of(v), false);
            PlaneX::read(slots + v * kPairStride, dz);
          }
#pragma unroll
          for (int e = 0; e < kElements; ++e) x[e] += dz[e];
        }
        if (a.dx != nullptr) {
          if (v < whole_dx && skip == 0) {
            PlaneX::store(dx + v * column_step, x);
          } else {
            PlaneX::store_part(slots + v * kPairStride, dx + v * column_step, skip, count_of(v), x);
          }
        }
        if constexpr (kForm == Form::kDropout) {
          if (a.branch == nullptr) continue;
          TDZ* branch = static_cast<TDZ*>(a.branch) + row * a.branch_stride + column0 + v * column_step;
#pragma unroll
          for (int e = 0; e < kElements; ++e) x[e] = kept >> (v * kElements + e) & 1 ? x[e] * a.dropout.scale : 0.f;
          if (a.vector_branch && skip == 0 && v < whole) {
            PlaneDz::store(branch, x);
          } else {
            PlaneDz::store_part(slots + v * kPairStride + kDzOffset, branch, skip, count_of(v), x);
          }
        }
      }
    }
    row += row_step;
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  launch_dependents();
  if (a.partial != nullptr) {
    write_partial<kVectors, kElements>(a, reinterpret_cast<float*>(smem + a.tile.stages_offset), dgamma, dbeta);
  }
}

}  // namespace flashbwd::layer_norm
