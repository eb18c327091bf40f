// Chooses the tile and the schedule of the LayerNorm backward. This is host code that needs no GPU.
//
// A row of x is a sequence of vectors of `elements` elements (16 bytes of the narrower of x and dz). A CTA processes
// `groups` rows at a time with `lanes` threads per row. A thread has the same `vectors` vectors of columns in every
// row, so dgamma and dbeta stay in its registers until the CTA's last row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../common/types.h"

namespace flashbwd::layer_norm {

// Threads per CTA with 128 registers each: up to 64 for dgamma and dbeta, the rest for a vector of x, dz and gamma.
constexpr int kMaxThreads = 512;
constexpr int kMinStages = 2;  // stages of the cp.async ring, including the one in use
constexpr int kMaxStages = 4;
constexpr int kMaxCluster = 16;
constexpr int kWarp = 32;
constexpr int kRowSumsThreads = 512;
// Minimum number of rows per CTA at a time, so that one group computes while another one waits for its exchange.
// Drawing a dropout mask doubles the instruction count, so it needs more groups. Gain on an H100: 2 to 8 %.
constexpr int kFewestGroups = 2;
constexpr int kFewestGroupsDrawing = 3;
// Limits of Throttle: the minimum number of rounds per worker for which it is used, and how far a worker may be ahead
// of the mean of all workers, in rounds and in bytes of x and dz per CTA. In most_ahead(), only the limit in rounds
// applies to some shapes. Effect on an H100: 1 to 4 %.
constexpr int64_t kFewestInStep = 32;
constexpr double kMostRoundsAhead = 2.0;
constexpr double kMostBytesAhead = 96 * 1024;
constexpr int kLargeCluster = 8;
// dgamma and dbeta are summed by columns, concurrently with dx, if x and dz take at most this fraction of L2.
constexpr double kColumnSumsShare = 0.4;
constexpr int kColumnLanes = 4;       // adjacent threads per row, one vector each: 64 bytes of the narrower of x and dz
constexpr int kColumnThreads = 128;   // minimum number of threads per CTA that sum columns
constexpr float kLeastGamma = 1e-5f;  // lower limit of |gamma| where xhat = (z - beta) / gamma
constexpr int kSlotStride = 16 * kMaxThreads;  // bytes between slots of a thread: a constant saves registers
// Alignment of the slots. cp.async copies that straddle shared memory sectors lose up to a tenth of the bandwidth.
constexpr int kSlotAlignment = 128;

constexpr int elements_of(int64_t x_bytes, int64_t dz_bytes) {
  return 16 / static_cast<int>(x_bytes < dz_bytes ? x_bytes : dz_bytes);
}

constexpr int kMostElements = 8;  // per vector
// Columns per block of the column sums (see sum_columns).
constexpr int columns_at_a_time(int elements) { return kColumnLanes * elements; }

// Maximum number of vectors per thread: 32 columns if x and dz are both 16-bit, 16 columns if either is fp32.
constexpr int max_vectors_of(int64_t x_bytes, int64_t dz_bytes) { return x_bytes == dz_bytes ? 4 : 2; }

struct BackwardTile {
  int elements = 0;           // per vector
  int lanes = 0;              // threads per row in a CTA: a power of two up to 32, else a multiple of 32
  int groups = 0;             // rows per CTA at a time
  int vectors = 0;            // per thread and row
  int ctas_per_row = 1;       // CTAs per row
  int cta_vectors = 0;        // vectors per row in one CTA
  int stages = 0;             // of the cp.async ring, including the one in use
  int planes = 0;             // 16-byte slots per thread and stage
  int residual_planes = 0;    // 16-byte slots per thread for dresidual
  int keep_bytes = 0;         // bytes per thread for a given dropout mask
  int keep_offset = 0;        // of the mask, in shared memory
  int parameters = 1;         // values per column in shared memory: 1 (gamma), or 2 (gamma and beta)
  int partials = 1;           // partial sums of a row in the exchange: one per warp that shares the row
  bool sums_columns = false;  // the CTA's threads after the tile's threads compute dgamma and dbeta by columns
  int columns_offset = 0;     // of their shared memory
  // The CTAs of a row exchange sums in a cluster. If there is no cluster but ctas_per_row > 1, row_sums_kernel runs.
  bool cluster = false;
  int stages_offset = 0;  // of the ring, in shared memory
  int64_t smem_bytes = 0;

  constexpr int threads() const { return lanes * groups; }
  constexpr bool found() const { return lanes != 0; }
};

struct BackwardShape {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t x_bytes = 2;  // per element
  int64_t dz_bytes = 2;
  bool from_output = false;        // x is the norm's output z
  bool residual = false;           // dresidual is added to dx
  bool keep = false;               // a dropout mask is given
  bool draws = false;              // a dropout mask is regenerated from seed and offset
  bool shifted = false;            // rows do not all start on a 16-byte boundary
  bool beside_columns = false;     // other CTAs of the same grid, with as many threads, sum columns
  int column_threads = 0;          // threads of each CTA that sum columns
  int most_cluster = kMaxCluster;  // largest cluster size to try
};

// Shared memory holds the exchange, then the parameters (gamma and beta in fp32), then mask and dresidual of one row,
// then the stages. The functions below return sizes in bytes.

// The stride between the parameters of adjacent lanes is an odd multiple of 16 bytes, which avoids bank conflicts.
constexpr int64_t parameter_stride(const BackwardTile& t) {
  return int64_t{16} * (t.parameters * t.vectors * t.elements / 4 | 1);
}
constexpr int64_t parameter_bytes(const BackwardTile& t) { return parameter_stride(t) * t.lanes; }
// Each group has two mbarriers, and the partial sums of two rows. The Philox keys and offset of a drawn dropout mask
// follow.
constexpr int kBarrierBytes = 16;
constexpr int kDrawnFromBytes = 96;
constexpr int64_t exchange_bytes(const BackwardTile& t) {
  return int64_t{kBarrierBytes} * t.groups + int64_t{16} * t.groups * t.partials + kDrawnFromBytes;
}
// sum_columns() needs partial dgamma and dbeta of one block of columns for each warp.
constexpr int64_t kColumnBytes = int64_t{kMaxThreads / kWarp} * 2 * columns_at_a_time(kMostElements) * 4;
// write_partial() stores dgamma and dbeta of all threads in the memory of the stages.
constexpr int64_t reduce_bytes(const BackwardTile& t) {
  return t.groups == 1 ? 0 : int64_t{8} * t.vectors * t.elements * t.threads();
}

// Between the parameters and the stages: one row of a given mask, then one row of dresidual.
constexpr int64_t ahead_bytes(const BackwardTile& t) {
  return int64_t{kMaxThreads} * t.keep_bytes + int64_t{kSlotStride} * t.residual_planes;
}

// Sets the number of stages and the offsets of all regions of shared memory.
inline void set_layout(BackwardTile* t, int stages) {
  t->stages = stages;
  const int64_t before = exchange_bytes(*t) + parameter_bytes(*t);
  t->keep_offset = static_cast<int>((before + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment);
  t->stages_offset = static_cast<int>(t->keep_offset + ahead_bytes(*t));
  t->smem_bytes = t->stages_offset + std::max(stages * int64_t{kSlotStride} * t->planes, reduce_bytes(*t));
  t->columns_offset = static_cast<int>(t->smem_bytes);
  if (t->sums_columns) t->smem_bytes += kColumnBytes;
}

inline int power_of_two_at_least(int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// The tile with `ctas_per_row` CTAs per row and up to `vectors` vectors per thread; found() is false if it does not
// fit.
inline BackwardTile tile_of(const BackwardShape& shape, int ctas_per_row, int vectors, const DeviceInfo& device) {
  BackwardTile t;
  t.elements = elements_of(shape.x_bytes, shape.dz_bytes);
  t.parameters = shape.from_output ? 2 : 1;
  const int64_t shift = shape.shifted ? t.elements - 1 : 0;
  const int64_t row_vectors = (shape.columns + shift + t.elements - 1) / t.elements;
  const int64_t cta_vectors = (row_vectors + ctas_per_row - 1) / ctas_per_row;
  const int most_threads = kMaxThreads - shape.column_threads;
  if (cta_vectors > int64_t{vectors} * most_threads) return {};
  t.ctas_per_row = ctas_per_row;
  t.cluster = ctas_per_row > 1 && ctas_per_row <= shape.most_cluster && device.cc_major >= 9;
  t.cta_vectors = static_cast<int>(cta_vectors);
  // A row of up to 32 vectors is spread over the lanes of a warp, one vector each, so that loads coalesce.
  const int64_t lanes = (cta_vectors + vectors - 1) / vectors;
  t.lanes =
      cta_vectors <= kWarp ? power_of_two_at_least(cta_vectors) : static_cast<int>((lanes + kWarp - 1) / kWarp * kWarp);
  if (ctas_per_row > 1) t.lanes = std::max(t.lanes, kWarp);
  t.sums_columns = shape.column_threads > 0;
  t.partials = (t.lanes + kWarp - 1) / kWarp * (t.cluster ? t.ctas_per_row : 1);
  t.vectors = (t.cta_vectors + t.lanes - 1) / t.lanes;
  const int64_t row_bytes = shape.x_bytes + shape.dz_bytes;
  t.planes = static_cast<int>(t.vectors * t.elements * row_bytes / 16);
  const int64_t most_vectors = max_vectors_of(shape.x_bytes, shape.dz_bytes);  // a constant offset in the kernel
  if (shape.residual) t.residual_planes = static_cast<int>(most_vectors * t.elements * shape.x_bytes / 16);
  if (shape.keep) t.keep_bytes = t.vectors * t.elements;
  // Give a CTA as many rows as its threads allow, but few enough that every SM has a row.
  const int step = std::max(1, kWarp / t.lanes);
  const int64_t workers = std::max(1, device.sm_count / (t.cluster ? ctas_per_row : 1));
  const int64_t wanted = (shape.rows + workers - 1) / workers;
  int64_t groups =
      ctas_per_row > 1 && !t.cluster ? 1 : std::min<int64_t>(most_threads / t.lanes, std::max<int64_t>(1, wanted));
  for (groups = (groups + step - 1) / step * step; groups >= step; groups -= step) {
    t.groups = static_cast<int>(groups);
    const int64_t rounds = (wanted + groups - 1) / groups;
    for (int stages = std::clamp<int>(rounds, kMinStages, kMaxStages); stages >= kMinStages; --stages) {
      set_layout(&t, stages);
      if (t.smem_bytes <= device.smem_per_block) return t;
    }
  }
  return {};
}

// The best tile with `ctas_per_row` CTAs per row: the one that holds most of x and dz at a time and, among those, the
// one with most threads. If other CTAs sum columns (beside_columns), the number of threads has priority.
inline BackwardTile tile_of(const BackwardShape& shape, int ctas_per_row, const DeviceInfo& device) {
  BackwardTile best;
  for (int vectors = max_vectors_of(shape.x_bytes, shape.dz_bytes); vectors >= 1; --vectors) {
    const BackwardTile tile = tile_of(shape, ctas_per_row, vectors, device);
    if (!tile.found()) continue;
    const int64_t held = int64_t{tile.groups} * tile.cta_vectors;
    const int64_t best_held = int64_t{best.groups} * best.cta_vectors;
    const bool longer = held > best_held, as_long = held == best_held;
    const bool fuller = tile.threads() > best.threads(), as_full = tile.threads() == best.threads();
    if (shape.beside_columns ? fuller || (as_full && longer) : longer || (as_long && fuller)) best = tile;
  }
  return best;
}

// The tile with the fewest CTAs per row that fits. Splits wide rows further, until a CTA has room for kFewestGroups (or
// kFewestGroupsDrawing) rows at a time, if the GPU has clusters and there is at least one row per SM.
inline BackwardTile choose_tile(const BackwardShape& shape, const DeviceInfo& device) {
  const int groups = shape.draws && shape.x_bytes + shape.dz_bytes == 4 ? kFewestGroupsDrawing : kFewestGroups;
  BackwardTile best;
  for (int ctas_per_row = 1; ctas_per_row <= 1 << 20; ctas_per_row *= 2) {
    const BackwardTile tile = tile_of(shape, ctas_per_row, device);
    if (tile.groups > best.groups) best = tile;
    if (!best.found()) continue;
    const bool may_split = device.cc_major >= 9 && ctas_per_row < shape.most_cluster && shape.rows >= device.sm_count;
    if (kMaxThreads / best.lanes >= groups || !may_split) break;
  }
  return best;
}

// The number of CTAs that sum dgamma and dbeta by columns while other CTAs compute dx: at most half of the SMs, and the
// fewest CTAs with the same maximum of blocks per CTA. Returns 0 if x and dz do not stay in L2 for a second read or
// there are more column blocks than SMs; then the row CTAs keep partial sums instead.
constexpr int column_ctas(const BackwardShape& shape, const DeviceInfo& device) {
  const double bytes = static_cast<double>(shape.rows) * static_cast<double>(shape.columns) *
                       static_cast<double>(shape.x_bytes + shape.dz_bytes);
  if (bytes > kColumnSumsShare * static_cast<double>(device.l2_bytes)) return 0;
  const int columns = columns_at_a_time(elements_of(shape.x_bytes, shape.dz_bytes));
  const int64_t blocks = (shape.columns + columns - 1) / columns;
  const int64_t most = device.sm_count / 2;
  if (blocks > device.sm_count || most == 0) return 0;
  const int64_t blocks_per_cta = (blocks + most - 1) / most;  // maximum over the CTAs
  return static_cast<int>((blocks + blocks_per_cta - 1) / blocks_per_cta);
}

// Iterations over the rows, with one CTA per SM.
constexpr int64_t rounds_of(const BackwardShape& shape, const BackwardTile& tile, int sm_count) {
  const int64_t at_a_time = int64_t{tile.groups} * sm_count;
  return (shape.rows + at_a_time - 1) / at_a_time;
}

// The tile for CTAs on all SMs in which at least kColumnThreads threads sum columns, if it at least halves the rounds
// of `beside`, which leaves `column_ctas` SMs to column CTAs. Else not found(): sharing an SM would be slower (1024
// rows of bf16: 19.0 instead of 17.0 us at 4096 columns; at 3072, where it halves the rounds, 12.9 instead of 15.6 us).
inline BackwardTile tile_with_columns(BackwardShape shape, const BackwardTile& beside, int column_ctas,
                                      const DeviceInfo& device) {
  shape.column_threads = kColumnThreads;
  const BackwardTile tile = choose_tile(shape, device);
  const bool halves =
      tile.found() && tile.ctas_per_row == 1 &&
      2 * rounds_of(shape, tile, device.sm_count) <= rounds_of(shape, beside, device.sm_count - column_ctas);
  return halves ? tile : BackwardTile{};
}

// A static persistent schedule, which assigns rows round-robin to workers, `groups` rows at a time. A worker is one
// CTA, or the CTAs that share a row.
struct RowSchedule {
  int workers = 1;  // a multiple of `period`
  // If the row stride is not a multiple of a vector, the offset of a row from a 16-byte boundary is periodic in the row
  // index. A worker processes only rows with one residue modulo this period, so its columns do not shift between rows.
  int period = 1;
  int phase_base = 0;  // residue r has phase (phase_base + r * phase_step) % elements
  int phase_step = 0;
  int rounds = 0;  // iterations per worker, of `groups` rows each
  int ahead = 0;   // rounds by which a worker may be ahead of the mean, times `workers`; 0: unlimited
};

// Rounds by which a worker may be ahead of the mean of all workers. The limit in bytes does not apply to the form from
// the output, to shifted rows in vectors of 8 elements, and to large clusters, where the mean covers few workers.
inline double most_ahead(const BackwardShape& shape, const BackwardTile& tile) {
  const bool shared = shape.shifted && tile.elements == kMostElements;
  if (shape.from_output || shared || tile.ctas_per_row >= kLargeCluster) return kMostRoundsAhead;
  const double bytes = static_cast<double>(tile.groups) * tile.cta_vectors * tile.elements *
                       static_cast<double>(shape.x_bytes + shape.dz_bytes);
  return std::min(kMostRoundsAhead, kMostBytesAhead / bytes);
}

// `concurrent`: the number of workers that are resident at the same time.
inline RowSchedule schedule_rows(const BackwardShape& shape, const BackwardTile& tile, int concurrent, int phase_base,
                                 int phase_step) {
  RowSchedule s;
  s.phase_base = phase_base;
  s.phase_step = phase_step;
  s.period = phase_step == 0 ? 1 : tile.elements / std::gcd(tile.elements, phase_step);
  const int64_t useful = (shape.rows + tile.groups - 1) / tile.groups;
  const int64_t workers = std::min<int64_t>(concurrent, std::max<int64_t>(1, useful));
  s.workers = static_cast<int>(std::max<int64_t>(s.period, workers / s.period * s.period));
  const int64_t round_rows = int64_t{s.workers} * tile.groups;
  const int64_t rounds = (shape.rows + round_rows - 1) / round_rows;
  s.rounds = static_cast<int>(rounds);
  const bool counted = rounds * s.workers < int64_t{1} << 31;  // Throttle counts in 32 bits
  if (rounds >= kFewestInStep && counted) s.ahead = static_cast<int>(most_ahead(shape, tile) * s.workers);
  return s;
}

}  // namespace flashbwd::layer_norm
