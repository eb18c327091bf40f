// How a LayerNorm backward is cut into CTAs: host arithmetic, no GPU.
//
// A row of x is a sequence of vectors of `elements` elements (16 bytes of the narrower of x and dz). A CTA holds
// `groups` rows at a time, `lanes` threads a row, each thread the same `vectors` columns of every row it meets, so
// that dgamma and dbeta stay in its registers from the CTA's first row to its last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../common/types.h"

namespace flashbwd::layer_norm {

constexpr int kMaxThreads =
    512;                       // 128 registers each: up to 64 for the sums, the rest for one vector of x, dz and gamma
constexpr int kMinStages = 2;  // rows in flight, the one in use included
constexpr int kMaxStages = 4;
constexpr int kMaxCluster = 16;
constexpr int kWarp = 32;
constexpr int kRowSumsThreads = 512;
// Rows a CTA holds at a time at least: while the threads of one wait for each other, those of the others go on. A mask
// costs as many instructions to draw as all the rest. Measured on an H100: 2 to 8 %.
constexpr int kFewestGroups = 2;
constexpr int kFewestGroupsDrawing = 3;
// See LockStep: from how many rounds a worker on, and how far ahead of the mean a worker may be, in rounds and in bytes
// of x and dz for each of its CTAs. Two rounds from the output, where eight workers share vectors of 16-bit rows, and
// in large clusters, whose mean is that of few workers. Measured on an H100: 1 to 4 % either way.
constexpr int64_t kFewestInStep = 32;
constexpr double kMostRoundsAhead = 2.0;
constexpr double kMostBytesAhead = 96 * 1024;
constexpr int kLargeCluster = 8;
// Columns are summed beside dx where x and dz take at most this share of L2.
constexpr double kColumnSumsShare = 0.4;
constexpr int kColumnLanes = 4;       // threads side by side: 64 bytes of a row, or two of them
constexpr int kColumnThreads = 128;   // of a CTA, at least
constexpr float kLeastGamma = 1e-5f;  // magnitude by which outputs are divided to give xhat
constexpr int kSlotStride =
    16 * kMaxThreads;  // bytes from one of a thread's slots to the next: a constant saves registers
// Of where slots begin: asynchronous copies that straddle sectors of shared memory cost up to a tenth of the bandwidth.
constexpr int kSlotAlignment = 128;

constexpr int elements_of(int64_t x_bytes, int64_t dz_bytes) {
  return 16 / static_cast<int>(x_bytes < dz_bytes ? x_bytes : dz_bytes);
}

constexpr int kMostElements = 8;  // of a vector
// Columns that a CTA sums at a time.
constexpr int columns_at_a_time(int elements) { return kColumnLanes * elements; }

// Vectors a thread: 32 columns where x and dz are 16-bit, 16 where one of them is fp32 and a stage is wider.
constexpr int max_vectors_of(int64_t x_bytes, int64_t dz_bytes) { return x_bytes == dz_bytes ? 4 : 2; }

struct BackwardTile {
  int elements = 0;           // of a vector
  int lanes = 0;              // threads a row and CTA: a power of two up to 32, else a multiple of 32
  int groups = 0;             // rows a CTA holds at a time
  int vectors = 0;            // a thread
  int chunks = 1;             // CTAs a row
  int chunk_vectors = 0;      // vectors of a row in one CTA
  int stages = 0;             // rows in flight, the one in use included
  int planes = 0;             // 16-byte slots a thread and stage
  int residual_planes = 0;    // of dresidual, of one row
  int keep_bytes = 0;         // of a given dropout mask, of one row and thread
  int keep_offset = 0;        // in shared memory
  int parameters = 1;         // values a column in shared memory: gamma, or gamma and beta
  int parts = 1;              // warps that share a row
  bool sums_columns = false;  // the CTA's threads behind the tile's sum columns
  int columns_offset = 0;     // of theirs in shared memory
  bool cluster = false;       // the CTAs of a row exchange their sums; otherwise a kernel before has summed
  int stages_offset = 0;      // in shared memory
  int64_t smem_bytes = 0;

  constexpr int threads() const { return lanes * groups; }
  constexpr bool found() const { return lanes != 0; }
};

struct BackwardShape {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t x_bytes = 2;  // of an element
  int64_t dz_bytes = 2;
  bool from_output = false;
  bool residual = false;           // dresidual is added
  bool keep = false;               // a dropout mask is given
  bool draws = false;              // it is drawn
  bool shifted = false;            // rows start off a vector's boundary
  bool beside_columns = false;     // CTAs of as many threads sum columns
  int column_threads = 0;          // of the CTA, that sum columns
  int most_cluster = kMaxCluster;  // CTAs
};

// Regions of shared memory, in bytes: what the warps of a row exchange; gamma and beta in fp32; where the groups add
// their sums; the stages.
// Of a lane's parameters, from one lane to the next: an odd number of 16 bytes, which spreads lanes over the banks.
constexpr int64_t parameter_stride(const BackwardTile& t) {
  return int64_t{16} * (t.parameters * t.vectors * t.elements / 4 | 1);
}
constexpr int64_t parameter_bytes(const BackwardTile& t) { return parameter_stride(t) * t.lanes; }
// By group, two mbarriers and two rows' sums; then what a dropout mask is drawn from.
constexpr int kBarrierBytes = 16;
constexpr int kDrawnFromBytes = 96;
constexpr int64_t exchange_bytes(const BackwardTile& t) {
  return int64_t{kBarrierBytes} * t.groups + int64_t{16} * t.groups * t.parts + kDrawnFromBytes;
}
// Of the warps that sum columns: dgamma and dbeta of as many as they sum at a time.
constexpr int64_t kColumnBytes = int64_t{kMaxThreads / kWarp} * 2 * columns_at_a_time(kMostElements) * 4;
// All vectors of dgamma and dbeta, where the stages were.
constexpr int64_t reduce_bytes(const BackwardTile& t) {
  return t.groups == 1 ? 0 : int64_t{8} * t.vectors * t.elements * t.threads();
}

// Between the parameters and the stages: the next row's part of a given mask, then of dresidual.
constexpr int64_t ahead_bytes(const BackwardTile& t) {
  return int64_t{kMaxThreads} * t.keep_bytes + int64_t{kSlotStride} * t.residual_planes;
}

inline void place(BackwardTile* t, int stages) {
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

// The tile for rows cut into `chunks` CTAs, `vectors` a thread; none (found() is false) where it does not fit.
inline BackwardTile tile_of(const BackwardShape& shape, int chunks, int vectors, const DeviceInfo& device) {
  BackwardTile t;
  t.elements = elements_of(shape.x_bytes, shape.dz_bytes);
  t.parameters = shape.from_output ? 2 : 1;
  const int64_t shift = shape.shifted ? t.elements - 1 : 0;
  const int64_t row_vectors = (shape.columns + shift + t.elements - 1) / t.elements;
  const int64_t chunk_vectors = (row_vectors + chunks - 1) / chunks;
  const int most_threads = kMaxThreads - shape.column_threads;
  if (chunk_vectors > int64_t{vectors} * most_threads) return {};
  t.chunks = chunks;
  t.cluster = chunks > 1 && chunks <= shape.most_cluster && device.cc_major >= 9;
  t.chunk_vectors = static_cast<int>(chunk_vectors);
  // A row of at most a warp is spread over its lanes; one thread with all of a short row would not coalesce.
  const int64_t lanes = (chunk_vectors + vectors - 1) / vectors;
  t.lanes = chunk_vectors <= kWarp ? power_of_two_at_least(chunk_vectors)
                                   : static_cast<int>((lanes + kWarp - 1) / kWarp * kWarp);
  if (chunks > 1) t.lanes = std::max(t.lanes, kWarp);
  t.sums_columns = shape.column_threads > 0;
  t.parts = (t.lanes + kWarp - 1) / kWarp * (t.cluster ? t.chunks : 1);
  t.vectors = (t.chunk_vectors + t.lanes - 1) / t.lanes;
  const int64_t row_bytes = shape.x_bytes + shape.dz_bytes;
  t.planes = static_cast<int>(t.vectors * t.elements * row_bytes / 16);
  const int64_t most_vectors = max_vectors_of(shape.x_bytes, shape.dz_bytes);  // a constant offset in the kernel
  if (shape.residual) t.residual_planes = static_cast<int>(most_vectors * t.elements * shape.x_bytes / 16);
  if (shape.keep) t.keep_bytes = t.vectors * t.elements;
  // As many rows a CTA as its threads allow, but no more than leave every SM a row.
  const int step = std::max(1, kWarp / t.lanes);
  const int64_t workers = std::max(1, device.sm_count / (t.cluster ? chunks : 1));
  const int64_t wanted = (shape.rows + workers - 1) / workers;
  int64_t groups =
      chunks > 1 && !t.cluster ? 1 : std::min<int64_t>(most_threads / t.lanes, std::max<int64_t>(1, wanted));
  for (groups = (groups + step - 1) / step * step; groups >= step; groups -= step) {
    t.groups = static_cast<int>(groups);
    const int64_t rounds = (wanted + groups - 1) / groups;
    for (int stages = std::clamp<int>(rounds, kMinStages, kMaxStages); stages >= kMinStages; --stages) {
      place(&t, stages);
      if (t.smem_bytes <= device.smem_per_block) return t;
    }
  }
  return {};
}

// The best way to share rows of `chunks` CTAs between threads: the one with most of x and dz in a CTA at a time, then
// the one with most threads; where others sum columns, the other way round.
inline BackwardTile tile_of(const BackwardShape& shape, int chunks, const DeviceInfo& device) {
  BackwardTile best;
  for (int vectors = max_vectors_of(shape.x_bytes, shape.dz_bytes); vectors >= 1; --vectors) {
    const BackwardTile tile = tile_of(shape, chunks, vectors, device);
    if (!tile.found()) continue;
    const int64_t held = int64_t{tile.groups} * tile.chunk_vectors;
    const int64_t best_held = int64_t{best.groups} * best.chunk_vectors;
    const bool longer = held > best_held, as_long = held == best_held;
    const bool fuller = tile.threads() > best.threads(), as_full = tile.threads() == best.threads();
    if (shape.beside_columns ? fuller || (as_full && longer) : longer || (as_long && fuller)) best = tile;
  }
  return best;
}

// The fewest CTAs a row that hold kFewestGroups rows at a time where a row is so wide that its threads would else be
// alone on an SM.
inline BackwardTile choose_tile(const BackwardShape& shape, const DeviceInfo& device) {
  const int groups = shape.draws && shape.x_bytes + shape.dz_bytes == 4 ? kFewestGroupsDrawing : kFewestGroups;
  BackwardTile best;
  for (int chunks = 1; chunks <= 1 << 20; chunks *= 2) {
    const BackwardTile tile = tile_of(shape, chunks, device);
    if (tile.groups > best.groups) best = tile;
    if (!best.found()) continue;
    const bool may_split = device.cc_major >= 9 && chunks < shape.most_cluster && shape.rows >= device.sm_count;
    if (kMaxThreads / best.lanes >= groups || !may_split) break;
  }
  return best;
}

// How many CTAs sum dgamma and dbeta by columns beside those that compute dx, rather than that these keep partial sums:
// of so few rows that x and dz stay in L2 until they have been read twice, and no more columns than the SMs could take
// at a time. 0 for more. No more CTAs than end together: the others compute dx.
constexpr int column_ctas(const BackwardShape& shape, const DeviceInfo& device) {
  const double bytes = static_cast<double>(shape.rows) * static_cast<double>(shape.columns) *
                       static_cast<double>(shape.x_bytes + shape.dz_bytes);
  if (bytes > kColumnSumsShare * static_cast<double>(device.l2_bytes)) return 0;
  const int columns = columns_at_a_time(elements_of(shape.x_bytes, shape.dz_bytes));
  const int64_t blocks = (shape.columns + columns - 1) / columns;
  const int64_t most = device.sm_count / 2;
  if (blocks > device.sm_count || most == 0) return 0;
  const int64_t turns = (blocks + most - 1) / most;  // of the CTA with most blocks
  return static_cast<int>((blocks + turns - 1) / turns);
}

// Rows that a CTA's groups meet one after the other, with a CTA an SM.
constexpr int64_t rounds_of(const BackwardShape& shape, const BackwardTile& tile, int sm_count) {
  const int64_t at_a_time = int64_t{tile.groups} * sm_count;
  return (shape.rows + at_a_time - 1) / at_a_time;
}

// The tile of CTAs of which kColumnThreads or more threads sum columns, on all SMs, where that halves the rounds of
// `beside`, whose CTAs leave `column_ctas` SMs to others; else none. Where it does not, sharing an SM costs more than
// it gives (1024 rows of 4096 columns of bf16: 19.0 us for 17.0; of 3072, 12.9 for 15.6).
inline BackwardTile tile_with_columns(BackwardShape shape, const BackwardTile& beside, int column_ctas,
                                      const DeviceInfo& device) {
  shape.column_threads = kColumnThreads;
  const BackwardTile tile = choose_tile(shape, device);
  const bool halves =
      tile.found() && tile.chunks == 1 &&
      2 * rounds_of(shape, tile, device.sm_count) <= rounds_of(shape, beside, device.sm_count - column_ctas);
  return halves ? tile : BackwardTile{};
}

// How rows are dealt out to workers (a CTA, or the CTAs of one row): in turn, `groups` at a time.
//
// Rows of odd length start at changing offsets from a vector's boundary, but with a period: a worker takes the rows of
// one residue only, so its columns never shift.
struct RowSchedule {
  int workers = 1;  // a multiple of `period`
  int period = 1;
  int phase_base = 0;  // of residue r: (phase_base + r * phase_step) % elements
  int phase_step = 0;
  int rounds = 0;  // of `groups` rows, a worker
  int ahead = 0;   // rounds by which a worker may be ahead of the mean, times workers; 0: any number
};

// Rounds by which a worker may be ahead of the mean of all.
inline double most_ahead(const BackwardShape& shape, const BackwardTile& tile) {
  const bool shared = shape.shifted && tile.elements == kMostElements;
  if (shape.from_output || shared || tile.chunks >= kLargeCluster) return kMostRoundsAhead;
  const double bytes = static_cast<double>(tile.groups) * tile.chunk_vectors * tile.elements *
                       static_cast<double>(shape.x_bytes + shape.dz_bytes);
  return std::min(kMostRoundsAhead, kMostBytesAhead / bytes);
}

// `concurrent`: workers that run at once.
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
  const bool counted = rounds * s.workers < int64_t{1} << 31;  // in 32 bits
  if (rounds >= kFewestInStep && counted) s.ahead = static_cast<int>(most_ahead(shape, tile) * s.workers);
  return s;
}

}  // namespace flashbwd::layer_norm
