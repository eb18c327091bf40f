// Shared code of the forward and the backward: assigns rows to threads, and compiles the loops for two instruction
// sets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "norms.h"
#include "numbers.h"

namespace flashbwd::cpu {

// A float32 sum is accurate over this many columns; the sums of such blocks are added in double.
constexpr int64_t kColumnBlock = 1024;

// The least number of elements per thread. With fewer, starting the thread takes longer than its work.
constexpr int64_t kLeastElements = 16384;

// The number of threads to use for (rows, columns).
inline int64_t threads_for(int64_t rows, int64_t columns, const Threads& threads) {
  const int64_t useful = rows * columns / kLeastElements;
  return std::max<int64_t>(std::min({threads.count, rows, useful}), 1);
}

// Divides the rows into equal ranges and calls work(range, first row, last row + 1) for each of them on one thread.
template <typename Work>
void for_each_range(int64_t rows, int64_t ranges, const Threads& threads, const Work& work) {
  if (ranges == 1) return work(int64_t{0}, int64_t{0}, rows);
  threads.run(ranges, [&](int64_t range) { work(range, rows * range / ranges, rows * (range + 1) / ranges); });
}

template <typename T>
const T* row(const void* data, int64_t index, int64_t stride) {
  return static_cast<const T*>(data) + index * stride;
}

template <typename T>
T* row(void* data, int64_t index, int64_t stride) {
  return static_cast<T*>(data) + index * stride;
}

// Calls Kernel::run(arguments...), an always_inline function, compiled for AVX2 if the CPU has it.
#if defined(__x86_64__)
template <typename Kernel, typename... Arguments>
__attribute__((target("avx2,fma"))) void run_with_avx2(const Arguments&... arguments) {
  Kernel::run(arguments...);
}

template <typename Kernel, typename... Arguments>
void run_vectorised(const Arguments&... arguments) {
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) return run_with_avx2<Kernel>(arguments...);
  Kernel::run(arguments...);
}
#else
template <typename Kernel, typename... Arguments>
void run_vectorised(const Arguments&... arguments) {
  Kernel::run(arguments...);
}
#endif

template <typename Use>
void with_type(DType dtype, const Use& use) {
  if (dtype == DType::kFloat16) return use(Float16{});
  if (dtype == DType::kBFloat16) return use(BFloat16{});
  use(float{});
}

// gamma or beta in float32: the tensor itself if it is float32 and needs no shift, else a copy.
class Parameter {
 public:
  // `absent`: its value without a tensor. `shift` is added to a tensor's values.
  Parameter(const void* tensor, int64_t columns, DType dtype, float absent, float shift) {
    if (tensor != nullptr && dtype == DType::kFloat32 && shift == 0.0f) {
      data_ = static_cast<const float*>(tensor);
      return;
    }
    copy_.resize(static_cast<size_t>(columns), absent);
    data_ = copy_.data();
    if (tensor == nullptr) return;
    with_type(dtype, [&](auto type) {
      const auto* values = static_cast<const decltype(type)*>(tensor);
      for (int64_t i = 0; i < columns; ++i) copy_[static_cast<size_t>(i)] = to_float(values[i]) + shift;
    });
  }
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  const float* data() const { return data_; }

 private:
  const float* data_;
  std::vector<float> copy_;
};

}  // namespace flashbwd::cpu
