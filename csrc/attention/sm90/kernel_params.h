// What the host passes to the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../params.h"
#include "../pre_post/bias_gradient.h"
#include "../pre_post/lse_delta.h"
#include "../pre_post/rows_ready.h"
#include "schedule.h"

namespace flashbwd::sm90 {

struct TensorMaps {
  CUtensorMap q, k, v, dout;   // (D, rows, heads, batch); boxes of 64 columns and one tile of rows
  CUtensorMap dq_accumulator;  // fp32 (D, rows, batch * heads), packed (D, heads * total_q, 1); boxes of 32 x 64 rows
  CUtensorMap dq;              // 16-bit, as q; boxes of 64 rows; only if the kernel writes dq
  CUtensorMap dk, dv;          // as k and v; boxes of 64 rows; only if KernelParams::tma_dkdv
  // (seqlen_k, seqlen_q, heads, batch); boxes of 64 keys and one tile of rows. Only for kernels with a bias. Heads and
  // batch are 1 where the bias is broadcast.
  CUtensorMap bias, bias_gradient;
};

// Where the kernel writes dk or dv: the caller's gradient, or fp32 partial sums of the GQA splits.
struct KeyGradient {
  HeadsView view;
  DType dtype = DType::kBFloat16;
  int32_t columns = 0;
  bool vectors = false;  // rows can be written 16 bytes at a time
};

struct DqParams {
  const float* accumulator = nullptr;
  int32_t row_stride = 0;       // floats
  bool starts_at_zero = false;  // the preprocess zeroes the accumulator, so the first add need not store
  // (batch * heads, query blocks, CTAs of a cluster), zero at the start (../index/dq_order.h). Null: adds happen in any
  // order, into zeros.
  int32_t* semaphores = nullptr;
  int32_t* finished = nullptr;  // (batch, heads_kv), zero at the start: see HeadsFinished
};

struct FeatureParams {
  BiasGradient bias_gradient;
  uint64_t bias_cache_hint = 0;
  float dropout_scale = 1.f;       // of kept probabilities
  uint32_t dropout_threshold = 0;  // kFlash: bytes up to this one are kept; else 32-bit words from this one on
  // Deterministic adds to a shared bias's gradient: adds so far, (planes, query blocks, groups of 16 keys), zero at the
  // start. Null: adds happen in any order.
  int32_t* bias_semaphores = nullptr;
};

struct KernelParams {
  TensorMaps maps;
  AttentionBackwardParams attention;
  Schedule schedule;
  int32_t* tiles_taken = nullptr;  // dynamic dispatch: the counter of work tiles, zero at the start
  LseDelta lse_delta;
  RowsReadyFlags preprocess;  // no words: all rows are written before the kernel starts
  DqParams dq;
  KeyGradient dk, dv;
  bool tma_dkdv = false;  // TMA stores dk and dv, except where a tile holds rows of another sequence
  // Rows past the logical end of a sequence hold other data, not the zeros that TMA loads past the end of a tensor.
  bool rows_may_be_poisoned = false;
  float gradient_scale = 1.f;  // of dq and dk, after the last product
  FeatureParams features;
};

// Launches the kernel of row `tile_index` of kTiles, whose head dimension is kHeadDim, on `stream`; returns null or a
// message. Defined in launch.cuh, which the files in instantiations/ compile for one head dimension and dtype each.
template <typename T, int kHeadDim, int kTileIndex = 0>
const char* launch(int tile_index, const KernelParams& params, void* stream);

}  // namespace flashbwd::sm90
