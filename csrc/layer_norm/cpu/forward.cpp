// The forward. It reads each row for its mean, for its variance and for z. After the first read, the row is in the
// cache.
#include <cmath>
#include <vector>

#include "rows.h"

namespace flashbwd::cpu {
namespace {

template <typename X>
FLASHBWD_INLINE double sum_of(const X* x, int64_t columns) {
  double total = 0.0;
  for (int64_t first = 0; first < columns; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, columns);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; ++i) sum += to_float(x[i]);
    total += sum;
  }
  return total;
}

template <typename X>
FLASHBWD_INLINE double sum_of_squares(const X* x, float mean, int64_t columns) {
  double total = 0.0;
  for (int64_t first = 0; first < columns; first += kColumnBlock) {
    const int64_t last = std::min(first + kColumnBlock, columns);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; ++i) sum += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    total += sum;
  }
  return total;
}

template <typename X>
FLASHBWD_INLINE void write_row(const X* x, float mean, float rs, const float* factor, const float* beta, X* z,
                               int64_t columns) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) store((to_float(x[i]) - mean) * rs * factor[i] + beta[i], &z[i]);
}

template <typename X>
struct Rows {
  FLASHBWD_INLINE static void run(const LayerNormForwardParams& p, const float* factor, const float* beta,
                                  int64_t first, int64_t last) {
    const double count = static_cast<double>(p.columns);
    for (int64_t index = first; index < last; ++index) {
      const X* x = row<X>(p.x, index, p.x_row_stride);
      const bool centred = p.mu != nullptr;
      const float mean = centred ? static_cast<float>(sum_of(x, p.columns) / count) : 0.0f;
      const double variance = sum_of_squares(x, mean, p.columns) / count;
      const float rs = static_cast<float>(1.0 / std::sqrt(variance + p.eps));
      if (centred) p.mu[index] = mean;
      p.rs[index] = rs;
      X* z = row<X>(p.z, index, p.z_row_stride);
      write_row(x, mean, rs, factor, beta, z, p.columns);
    }
  }
};

}  // namespace

bool supports(DType x_dtype) { return x_dtype != DType::kFloat64; }

void layer_norm_forward(const LayerNormForwardParams& p, const Threads& threads) {
  const Parameter factor(p.gamma, p.columns, p.parameter_dtype, 1.0f, p.zero_centered_gamma ? 1.0f : 0.0f);
  const Parameter beta(p.beta, p.columns, p.parameter_dtype, 0.0f, 0.0f);
  for_each_range(p.rows, threads_for(p.rows, p.columns, threads), threads, [&](int64_t, int64_t first, int64_t last) {
    with_type(p.x_dtype,
              [&](auto x) { run_vectorised<Rows<decltype(x)>>(p, factor.data(), beta.data(), first, last); });
  });
}

}  // namespace flashbwd::cpu
