// The backward. For each row, a first loop over the columns computes the two means of the row and adds to the sums over
// rows. A second loop writes dx; x and dz are then in the cache.
#include <vector>

#include "rows.h"

namespace flashbwd::cpu {
namespace {

// Rows whose column sums are added up before they are added to the total, which limits the rounding error.
constexpr int64_t kRowBlock = 32;

// Sums over rows, one per column.
struct ColumnSums {
  float* dgamma;
  float* dbeta;
};

struct RowMeans {
  float dy, dy_xhat;
};

// Computes the two means of a row, and adds to the column sums.
template <typename X, typename Dz>
FLASHBWD_INLINE RowMeans reduce_row(const X* x, const Dz* dz, float mu, float rs, const float* factor, int64_t columns,
                                    ColumnSums sums) {
  double total_dy = 0.0, total_dy_xhat = 0.0;
  for (int64_t first = 0; first < columns; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, columns);
    float sum_dy = 0.0f, sum_dy_xhat = 0.0f;
#pragma omp simd reduction(+ : sum_dy, sum_dy_xhat)
    for (int64_t i = first; i < last; ++i) {
      const float dz_i = to_float(dz[i]), xhat = (to_float(x[i]) - mu) * rs, dy = dz_i * factor[i];
      sum_dy += dy;
      sum_dy_xhat += dy * xhat;
      sums.dgamma[i] += dz_i * xhat;
      sums.dbeta[i] += dz_i;
    }
    total_dy += sum_dy;
    total_dy_xhat += sum_dy_xhat;
  }
  const double count = static_cast<double>(columns);
  return {static_cast<float>(total_dy / count), static_cast<float>(total_dy_xhat / count)};
}

template <typename X, typename Dz, bool kResidual>
FLASHBWD_INLINE void write_row(const X* x, const Dz* dz, float mu, float rs, const float* factor, RowMeans mean,
                               const X* dresidual, X* dx, int64_t columns) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) {
    const float xhat = (to_float(x[i]) - mu) * rs;
    float value = rs * (to_float(dz[i]) * factor[i] - mean.dy - xhat * mean.dy_xhat);
    if constexpr (kResidual) value += to_float(dresidual[i]);
    store(value, &dx[i]);
  }
}

FLASHBWD_INLINE void add_and_clear(float* block, float* total, int64_t columns) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) {
    total[i] += block[i];
    block[i] = 0.0f;
  }
}

// Processes rows [first, last). `sums` is (4, N): two totals over rows, then the sums of the current block of rows.
// They are computed in every call, because a compiler may round dx in another way in a loop without them.
template <typename X, typename Dz>
struct Rows {
  FLASHBWD_INLINE static void run(const LayerNormBackwardParams& p, const float* factor, int64_t first, int64_t last,
                                  float* sums) {
    const int64_t n = p.columns;
    float* const block = sums + 2 * n;
    for (int64_t index = first; index < last; ++index) {
      const X* x = row<X>(p.x, index, p.x_row_stride);
      const Dz* dz = row<Dz>(p.dz, index, p.dz_row_stride);
      const float mu = p.centred ? p.mu[index] : 0.0f, rs = p.rs[index];
      RowMeans mean = reduce_row(x, dz, mu, rs, factor, n, {block, block + n});
      if (!p.centred) mean.dy = 0.0f;
      if (p.dx != nullptr) {
        X* dx = row<X>(p.dx, index, p.dx_row_stride);
        if (p.dresidual != nullptr) {
          const X* dresidual = row<X>(p.dresidual, index, p.dresidual_row_stride);
          write_row<X, Dz, true>(x, dz, mu, rs, factor, mean, dresidual, dx, n);
        } else {
          write_row<X, Dz, false>(x, dz, mu, rs, factor, mean, nullptr, dx, n);
        }
      }
      if ((index - first) % kRowBlock == kRowBlock - 1 || index + 1 == last) add_and_clear(block, sums, 2 * n);
    }
  }
};

void write_sums(const float* sums, int64_t columns, void* target, DType dtype) {
  if (target == nullptr) return;
  with_type(dtype, [&](auto type) {
    auto* values = static_cast<decltype(type)*>(target);
    for (int64_t i = 0; i < columns; ++i) store(sums[i], &values[i]);
  });
}

}  // namespace

void layer_norm_backward(const LayerNormBackwardParams& p, const Threads& threads) {
  const int64_t ranges = threads_for(p.rows, p.columns, threads);
  const Parameter factor(p.gamma, p.columns, p.gamma_dtype, 1.0f, p.zero_centered_gamma ? 1.0f : 0.0f);
  std::vector<std::vector<float>> sums(static_cast<size_t>(ranges));  // (4, N) each
  for_each_range(p.rows, ranges, threads, [&](int64_t range, int64_t first, int64_t last) {
    std::vector<float>& own_sums = sums[static_cast<size_t>(range)];
    own_sums.resize(static_cast<size_t>(4 * p.columns));
    with_type(p.x_dtype, [&](auto x) {
      with_type(p.dz_dtype, [&](auto dz) {
        run_vectorised<Rows<decltype(x), decltype(dz)>>(p, factor.data(), first, last, own_sums.data());
      });
    });
  });
  if (p.dgamma == nullptr && p.dbeta == nullptr) return;
  for (int64_t range = 1; range < ranges; ++range) {
    add_and_clear(sums[static_cast<size_t>(range)].data(), sums[0].data(), 2 * p.columns);
  }
  write_sums(sums[0].data(), p.columns, p.dgamma, p.gamma_dtype);
  write_sums(sums[0].data() + p.columns, p.columns, p.dbeta, p.gamma_dtype);
}

}  // namespace flashbwd::cpu
