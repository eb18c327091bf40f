// The loop over the rows in the LayerNorm backward kernel: computes dx, and this thread's sums of dgamma and dbeta.
//
// cp.async prefetches rows into a ring of `stages` stages:
//   fetch row + stages - 1 -> wait for row -> row sums of dy and dy * xhat -> exchange -> dx, dgamma += , dbeta +=
// Each thread copies only its own columns into its own slots of shared memory and reads only those, so loads need no
// barrier. The only communication per row is the exchange of the two sums among the lanes of a warp, the warps of a
// group, and for wide rows the CTAs of a cluster.
#pragma once

#include "arguments.h"
#include "dropout.cuh"
#include "exchange.cuh"
#include "parameters.cuh"
#include "partial.cuh"
#include "plane.cuh"
#include "throttle.cuh"

namespace flashbwd::layer_norm {

// The role of a CTA that computes dx. A worker is one CTA, or all CTAs that share a row. The object has no arrays as
// members, because nvcc would then keep fewer addresses in registers.
template <Form kForm, typename TX, typename TDZ>
class BackwardRows {
  static constexpr int kElements = elements_of(sizeof(TX), sizeof(TDZ));
  static constexpr int kVectors = max_vectors_of(sizeof(TX), sizeof(TDZ));
  using PlaneX = Plane<TX, kElements>;
  using PlaneDz = Plane<TDZ, kElements>;
  using Vector = float[kElements];
  using ColumnSums = float[kVectors][kElements];
  // A thread's slots in a stage: for each vector, x followed by dz.
  static constexpr int kDzOffset = PlaneX::kSlots * kSlotStride;
  static constexpr int kPairStride = (PlaneX::kSlots + PlaneDz::kSlots) * kSlotStride;
  static constexpr int kResidualBytes = kVectors * PlaneX::kSlots * kSlotStride;
  static constexpr bool kFromOutput = kForm == Form::kOutput;
  // Flags of the epilogue in one register, which saves several instructions per vector. Bit v: store vector v of dx
  // with 16-byte stores; bit kBranch + v: the same for the branch gradient; then which tensors exist.
  static constexpr int kBranch = 4;
  static constexpr uint32_t kHasDx = 1u << 8, kHasBranch = 1u << 9, kHasResidual = 1u << 10, kHasMask = 1u << 11;
  static constexpr uint32_t kHasPartialStores = 1u << 12;  // some vectors are stored by elements

 public:
  __device__ __forceinline__ BackwardRows(const BackwardArguments& arguments, char* smem)
      : a(arguments),
        lanes(a.tile.lanes),
        group(threadIdx.x / lanes),
        lane(threadIdx.x - group * lanes),
        worker(blockIdx.x / a.tile.ctas_per_row),
        rank(blockIdx.x - worker * a.tile.ctas_per_row),
        residue(worker % a.schedule.period),
        phase((a.schedule.phase_base + residue * a.schedule.phase_step) % kElements),
        row_vectors((a.columns + phase + kElements - 1) / kElements),
        first_vector(rank * a.tile.cta_vectors),
        inside(min(a.tile.cta_vectors, row_vectors - first_vector)),
        owned(inside <= lane ? 0 : (inside - lane + lanes - 1) / lanes),
        column0((first_vector + lane) * kElements - phase),
        column_step(lanes * kElements),
        head(column0 < 0 ? phase : 0),
        tail(min(kElements, a.columns - (column0 + (owned - 1) * column_step))),
        whole(tail == kElements ? owned : owned - 1),
        row_step(static_cast<int64_t>(a.schedule.workers) * a.tile.groups),
        row((static_cast<int64_t>(worker / a.schedule.period) * a.tile.groups + group) * a.schedule.period + residue),
        exchange_s(shared_address(smem)),
        gamma_s(exchange_s + exchange_bytes(a.tile)),
        own_gamma(keep(gamma_s + lane * static_cast<uint32_t>(parameter_stride(a.tile)))),
        own_slots(keep(exchange_s + a.tile.stages_offset + 16 * threadIdx.x)),
        stage_bytes(kSlotStride * a.tile.planes),
        stages(a.tile.stages),
        has_mask(kForm == Form::kDropout && a.dropout.keep != nullptr),
        has_epilogue_inputs(a.residual != nullptr || has_mask),
        exchange(a.tile, exchange_s, group, kHasClusters && a.tile.cluster ? rank : 0),
        throttle(a, lane == 0, rank),
        flags(epilogue_flags()),
        drawn_from{gamma_s - kDrawnFromBytes, a.dropout.keep_from} {}

  __device__ __forceinline__ void run(char* smem) {
    load_statistics(row);
    fetch(0, row);
    if (has_epilogue_inputs) fetch_epilogue_inputs(row);
    start_parameters();
    // These fetches come after the statistics and gamma, which the first row needs too.
#pragma unroll 1
    for (int s = 1; s < stages - 1; ++s) {
      fetch(s, row + s * row_step);
      if (has_epilogue_inputs) fetch_epilogue_inputs(a.rows);  // an empty group: each stage counts two groups
    }
    // All threads wait for the staged parameters, and in a cluster also for the mbarriers of the other CTAs.
    if (kHasClusters && a.tile.cluster) {
      if (threadIdx.x == 0) exchange.init(a.tile.groups);
      cluster_barrier();
    } else {
      group_barrier(0, a.tile.threads());
    }

    // cp.async groups committed after those of the current row
    const int pending_groups = (has_epilogue_inputs ? 2 : 1) * (stages - 1);
    const bool sums_here = a.row_sums == nullptr && (a.dx != nullptr || a.branch != nullptr);
    ColumnSums dgamma = {}, dbeta = {};  // (kVectors, kElements): this thread's columns, summed over its rows
    int stage = 0;
#pragma unroll 1
    for (int left = a.schedule.rounds; left > 0; --left) {
      fetch(stage == 0 ? stages - 1 : stage - 1, row + (stages - 1) * row_step);  // into the previous row's stage
      const int here = row < a.rows ? owned : 0;
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

      float2 sums = make_float2(0.f, 0.f);
      if (sums_here) sums = sum_row(slots, here, mu);
      throttle.hold(a, a.schedule.rounds - left + 1);
      if (sums_here) {
        if (!kFromOutput) sums.y *= rs;
        sums = exchange.sum(a.tile, sums, a.schedule.rounds - left);
      } else if (a.row_sums != nullptr && row < a.rows) {
        sums = a.row_sums[row];
      }
      const float mean_dy = !a.centred ? 0.f : sums.x * a.inverse_columns * rs;  // both means are multiplied by rs
      const float mean_dy_xhat = sums.y * a.inverse_columns * rs;
      if (has_epilogue_inputs) wait_copies(1);  // all but the fetch of this iteration
      finish_row(slots, here, kept, mu, rs, mean_dy, mean_dy_xhat, dgamma, dbeta);
      row += row_step;
      if (has_epilogue_inputs) fetch_epilogue_inputs(row);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    allow_next_launch();
    if (a.partial != nullptr) {
      write_partial<kVectors, kElements>(a, reinterpret_cast<float*>(smem + a.tile.stages_offset), dgamma, dbeta);
    }
  }

 private:
  const BackwardArguments& a;
  const int lanes, group, lane, worker, rank, residue, phase;
  // This thread owns vectors lane, lane + lanes, ... of the CTA's vectors of the row; `owned` of them are in the row.
  const int row_vectors, first_vector, inside, owned;
  const int column0;  // first column of vector 0
  const int column_step;
  const int head;   // elements of vector 0 that belong to the previous row
  const int tail;   // elements of the last vector
  const int whole;  // vectors that end inside the row
  // This group's rows: row, row + row_step, ... Indices of at least a.rows are skipped.
  const int64_t row_step;
  int64_t row;
  // Shared memory: exchange | gamma, beta | mask, dresidual of one row | stages of (planes, kMaxThreads) 16-byte slots
  const uint32_t exchange_s, gamma_s, own_gamma, own_slots;
  const int stage_bytes, stages;
  // dresidual and a given mask are needed only at the end of an iteration, so they have a single stage of their own,
  // which the previous iteration prefetches.
  const bool has_mask, has_epilogue_inputs;
  RowExchange exchange;
  Throttle throttle;
  const uint32_t flags;
  const DrawnFrom drawn_from;
  float next_mu = 0.f, next_rs = 0.f;  // statistics are loaded one iteration ahead

  __device__ __forceinline__ int count_of(int v) const { return v < whole ? kElements : tail; }
  __device__ __forceinline__ bool is_whole(int v) const { return v < whole && (v > 0 || head == 0); }
  __device__ __forceinline__ uint32_t residual_slots(int v) const {
    return own_slots - kResidualBytes + v * PlaneX::kSlots * kSlotStride;
  }
  __device__ __forceinline__ uint32_t keep_slots(int v) const {
    return exchange_s + a.tile.keep_offset + (v * kMaxThreads + static_cast<int>(threadIdx.x)) * kElements;
  }

  __device__ __forceinline__ uint32_t epilogue_flags() const {
    const bool all_stored =
        head == 0 && whole == owned && (a.dx == nullptr || a.vector_dx) && (a.branch == nullptr || a.vector_branch);
    const uint32_t whole_bits = ((1u << max(whole, 0)) - 1) & (head == 0 ? ~0u : ~1u);
    return keep((a.vector_dx ? whole_bits : 0) | (a.vector_branch ? whole_bits << kBranch : 0) |
                (a.dx != nullptr ? kHasDx : 0) | (a.branch != nullptr ? kHasBranch : 0) |
                (a.residual != nullptr ? kHasResidual : 0) | (has_mask ? kHasMask : 0) |
                (all_stored ? 0 : kHasPartialStores));
  }

  __device__ __forceinline__ void load_statistics(int64_t of_row) {
    if (of_row < a.rows) {
      if (a.mu != nullptr) next_mu = a.mu[of_row];
      next_rs = a.rs[of_row];
    }
  }

  // Writes the Philox keys and starts to stage gamma and beta. The caller synchronizes the threads.
  __device__ __forceinline__ void start_parameters() const {
    if (kForm == Form::kDropout && a.dropout.rng != nullptr) drawn_from.write(a.dropout.rng);
    if (a.gamma_dtype == DType::kFloat32) {
      stage_parameters<float, kElements>(a, first_vector * kElements - phase, gamma_s);
    } else if (a.gamma_dtype == DType::kBFloat16) {
      stage_parameters<__nv_bfloat16, kElements>(a, first_vector * kElements - phase, gamma_s);
    } else {
      stage_parameters<__half, kElements>(a, first_vector * kElements - phase, gamma_s);
    }
  }

  // Starts to copy x and dz of a row to a stage.
  __device__ __forceinline__ void fetch(int to_stage, int64_t fetch_row) const {
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
      for (int v = together; v < owned; ++v) {
        const int skip = v == 0 ? head : 0;
        const bool within = framed || (skip == 0 && v < whole);
        PlaneX::fill_elements(slots + v * kPairStride, fetch_x + v * column_step, skip, count_of(v),
                              a.vector_x && within);
        PlaneDz::fill_elements(slots + v * kPairStride + kDzOffset, fetch_dz + v * column_step, skip, count_of(v),
                               a.vector_dz && within);
      }
    }
    commit_copies();
  }

  // Starts to copy dresidual and the given mask of a row.
  __device__ __forceinline__ void fetch_epilogue_inputs(int64_t of_row) const {
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
      for (int v = together; v < owned; ++v) {
        const int skip = v == 0 ? head : 0;
        const bool within = framed || is_whole(v);
        if (a.residual != nullptr) {
          PlaneX::fill_elements(residual_slots(v), residual + v * column_step, skip, count_of(v),
                                a.vector_residual && within);
        }
        if (has_mask) {
          fill_mask<kElements>(keep_slots(v), kept + v * column_step, skip, count_of(v),
                               a.dropout.vector_keep && within);
        }
      }
    }
    commit_copies();
  }

  // Reads parameter `which` of vector v: 0 is gamma, 1 is beta (Form::kOutput only).
  __device__ __forceinline__ void read_parameter(int which, int v, Vector& values) const {
    const uint32_t planes = own_gamma + which * a.tile.vectors * 4 * kElements + v * 4 * kElements;
#pragma unroll
    for (int q = 0; q < kElements / 4; ++q) unpack<float>(load_shared_16(planes + 16 * q), &values[4 * q]);
  }

  // Reads vector v of a stage. Subtracts the offset from x, so that it is proportional to xhat: x - mu, or z - beta for
  // Form::kOutput.
  __device__ __forceinline__ void read_vector(uint32_t slots, int v, float mu, Vector& x, Vector& dz,
                                              Vector& gamma) const {
    PlaneX::read(slots + v * kPairStride, x);
    PlaneDz::read(slots + v * kPairStride + kDzOffset, dz);
    read_parameter(0, v, gamma);
    if constexpr (kFromOutput) {
      float beta[kElements];
      read_parameter(1, v, beta);
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] -= beta[e];
    } else {
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] -= mu;
    }
  }

  // Regenerates the dropout mask of this thread's elements of a row: bit mask_bit(v * kElements + e) is set if kept.
  __device__ __forceinline__ uint32_t draw(int64_t of_row, int vectors) const {
    uint32_t kept = 0;
    if constexpr (kForm == Form::kDropout) {
      if (!a.dropout.drops) return ~0u;
      if (has_mask || vectors == 0) return kept;
      const uint64_t first = drawn_from.offset() + of_row * a.columns + column0;
      kept = drawn_from.mask<kElements>(first, column_step, vectors);
    }
    return kept;
  }

  // Returns this thread's (sum of dy, sum of dy * xhat). The second sum still lacks the factor rs unless kFromOutput.
  __device__ __forceinline__ float2 sum_row(uint32_t slots, int here, float mu) const {
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < here) {
        float x[kElements], dz[kElements], gamma[kElements];
        read_vector(slots, v, mu, x, dz, gamma);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float dy = gamma[e] * dz[e];
          sums.x += dy;
          sums.y = fmaf(kFromOutput ? dz[e] * gamma_over_divisor(gamma[e]) : dy, x[e], sums.y);
        }
      }
    }
    return sums;
  }

  // Adds the row to dgamma and dbeta, and writes its dx and branch gradient.
  __device__ __forceinline__ void finish_row(uint32_t slots, int here, uint32_t kept, float mu, float rs, float mean_dy,
                                             float mean_dy_xhat, ColumnSums& dgamma, ColumnSums& dbeta) const {
    TX* next_dx = static_cast<TX*>(a.dx) + row * a.dx_stride + column0;
    TDZ* next_branch = static_cast<TDZ*>(a.branch) + row * a.branch_stride + column0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < here) {
        float x[kElements], dz[kElements], gamma[kElements];
        read_vector(slots, v, mu, x, dz, gamma);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float xhat = x[e] * (kFromOutput ? inverse_of_divisor(gamma[e]) : rs);
          dgamma[v][e] = fmaf(dz[e], xhat, dgamma[v][e]);
          dbeta[v][e] += dz[e];
          x[e] = fmaf(gamma[e] * dz[e], rs, -fmaf(xhat, mean_dy_xhat, mean_dy));
        }
        if (flags & kHasResidual) {  // dx += dresidual
          PlaneX::read(residual_slots(v), dz);
#pragma unroll
          for (int e = 0; e < kElements; ++e) x[e] += dz[e];
        }
        if (flags & kHasDx) {
          const auto packed = PlaneX::packed(x);
          if (flags & 1u << v) {
            PlaneX::store(next_dx, packed);
          } else {
            PlaneX::put(slots + v * kPairStride, packed);
          }
        }
        if constexpr (kForm == Form::kDropout) {
          if (flags & kHasBranch) finish_branch(x, v, slots, kept, next_branch);
        }
      }
      next_dx = keep(next_dx + column_step);
      next_branch = keep(next_branch + column_step);
    }
    // Vectors without 16-byte stores: write them by elements from the slots of x and dz, where put() left them.
#pragma unroll 1
    for (int v = 0; v < here && flags & kHasPartialStores; ++v) {
      const int skip = v == 0 ? head : 0;
      if (a.dx != nullptr && !(a.vector_dx && is_whole(v))) {
        PlaneX::store_elements(slots + v * kPairStride, next_dx + (v - kVectors) * column_step, skip, count_of(v));
      }
      if (kForm == Form::kDropout && a.branch != nullptr && !(a.vector_branch && is_whole(v))) {
        PlaneDz::store_elements(slots + v * kPairStride + kDzOffset, next_branch + (v - kVectors) * column_step, skip,
                                count_of(v));
      }
    }
  }

  // Writes vector v of the branch gradient: dx of the kept elements, scaled. `dx` is overwritten.
  __device__ __forceinline__ void finish_branch(Vector& dx, int v, uint32_t slots, uint32_t kept, TDZ* branch) const {
    const uint32_t mask =
        flags & kHasMask ? given_mask<kElements>(__cvta_shared_to_generic(keep_slots(v))) : kept >> v * kElements / 4;
#pragma unroll
    for (int e = 0; e < kElements; ++e) dx[e] *= a.dropout.scale;
    auto packed = PlaneDz::packed(dx);
#pragma unroll
    for (int h = 0; h < PlaneDz::kSlots; ++h) {
      packed.slots[h] = kept_or_zero<TDZ>(packed.slots[h], mask >> h * PlaneDz::kPerSlot / 4);
    }
    if (flags & 1u << (kBranch + v)) {
      PlaneDz::store(branch, packed);
    } else {
      PlaneDz::put(slots + v * kPairStride + kDzOffset, packed);
    }
  }
};

}  // namespace flashbwd::layer_norm
