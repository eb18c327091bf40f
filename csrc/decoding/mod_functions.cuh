// What an emitted modification is written in terms of, beside the operators of C++. No header: NVRTC compiles this too.
#pragma once

#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {
template <typename T>
__device__ __forceinline__ T load_captured(const void* data, long long at) {
  return static_cast<const T*>(data)[at];
}
__device__ __forceinline__ float load_half(const void* data, long long at) {
  return float_of_half(static_cast<const unsigned short*>(data)[at]);
}
__device__ __forceinline__ float load_bfloat16(const void* data, long long at) {
  return float_of_bfloat16(static_cast<const unsigned short*>(data)[at]);
}
__device__ __forceinline__ float round_half(float x) {
  return float_of_half(static_cast<unsigned short>(pack_16bit<false>(x, 0.f)));
}
__device__ __forceinline__ float round_bfloat16(float x) {
  return float_of_bfloat16(static_cast<unsigned short>(pack_16bit<true>(x, 0.f)));
}
__device__ __forceinline__ long long wrap(long long i, int size) { return i < 0 ? i + size : i; }
template <typename T>
__device__ __forceinline__ T floor_divide(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return floor(a / b);
  } else {
    const T q = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
  }
}
template <typename T>
__device__ __forceinline__ T trunc_divide(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return trunc(a / b);
  } else {
    return a / b;
  }
}
template <typename T>
__device__ __forceinline__ T remainder_of(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    const T r = fmod(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
  } else {
    const T r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
  }
}
template <typename T>
__device__ __forceinline__ T fmod_of(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return fmod(a, b);
  } else {
    return a % b;
  }
}
template <typename T>
__device__ __forceinline__ T power(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return pow(a, b);
  } else {
    T r = 1;
    for (; b > 0; --b) r *= a;
    return r;
  }
}
template <typename T>
__device__ __forceinline__ T maximum_of(T a, T b) {
  return a != a || a > b ? a : b;
}
template <typename T>
__device__ __forceinline__ T minimum_of(T a, T b) {
  return a != a || a < b ? a : b;
}
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + exp(-x)); }
__device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }
// What the usual functions do for large arguments is long: it is called, not copied to where each score is worked on.
__device__ __noinline__ float far_sine(float x) { return sinf(x); }
__device__ __noinline__ float far_cosine(float x) { return cosf(x); }
// sin(x), or cos(x): with x = n * pi + r, or (n + 1/2) * pi + r, that is sin(r) with a sign, a polynomial. Within 2.2
// units in the last place. Where it does not serve, `near` becomes false; with none, the usual function is called.
template <bool kCosine>
__device__ __forceinline__ float sine_or_cosine(float x, bool* near) {
  constexpr float kWhole = 12582912.f;  // 1.5 * 2^23: a sum with it is whole, and its last bits count
  const float n_bits = kCosine ? fmaf(x, 0.318309886f, -0.5f) + kWhole : fmaf(x, 0.318309886f, kWhole);
  const float n = n_bits - kWhole + (kCosine ? 0.5f : 0.f);
  float r = fmaf(n, -3.14159203f, x);  // pi in three parts
  r = fmaf(n, -6.27832947e-7f, r);
  r = fmaf(n, -1.078060506e-14f, r);
  const float r2 = r * r;
  float sine = fmaf(2.6056314e-6f, r2, -1.98095397e-4f);
  sine = fmaf(sine, r2, 8.33306555e-3f);
  sine = fmaf(sine, r2, -0.166666597f);
  sine = fmaf(sine * r2, r, r);
  const uint32 odd = __float_as_uint(n_bits) + (kCosine ? 1u : 0u);
  sine = __uint_as_float(__float_as_uint(sine) + (odd << 31));  // turns the sign
  const bool far = fabsf(x) > 1e5f;
  if (near != nullptr) {
    *near &= !far;
  } else if (far) {
    sine = kCosine ? far_cosine(x) : far_sine(x);
  }
  return sine;
}
__device__ __forceinline__ float sine(float x, bool* near) { return sine_or_cosine<false>(x, near); }
__device__ __forceinline__ float cosine(float x, bool* near) { return sine_or_cosine<true>(x, near); }
__device__ __forceinline__ double sine(double x, bool*) { return sin(x); }
__device__ __forceinline__ double cosine(double x, bool*) { return cos(x); }
// fmax and fmin of C: of a number and NaN, the number.
template <typename T>
__device__ __forceinline__ T fmax_of(T a, T b) {
  return b != b || a > b ? a : b;
}
template <typename T>
__device__ __forceinline__ T fmin_of(T a, T b) {
  return b != b || a < b ? a : b;
}
template <typename T>
__device__ __forceinline__ T softplus(T x, T beta, T threshold) {
  return x * beta > threshold ? x : log1p(exp(x * beta)) / beta;
}
template <typename T>
__device__ __forceinline__ T elu(T x, T alpha, T scale, T input_scale) {
  return x > 0 ? x * scale : (exp(x * input_scale) - 1) * alpha * scale;
}
template <typename T>
__device__ __forceinline__ T gelu(T x) {
  return x * T(0.5) * (1 + erf(x * T(0.70710678118654752)));
}
template <typename T>
__device__ __forceinline__ T gelu_tanh(T x) {
  return T(0.5) * x * (1 + tanh_of(T(0.79788456080286536) * (x + T(0.044715) * x * x * x)));
}
template <typename T>
__device__ __forceinline__ T logaddexp(T a, T b) {
  const T larger = maximum_of(a, b);
  const T smaller = minimum_of(a, b);
  return larger == smaller ? larger + T(0.69314718055994531) : larger + log1p(exp(smaller - larger));
}
template <typename T>
__device__ __forceinline__ T xlogy(T a, T b) {
  return a == 0 && b == b ? T(0) : a * log(b);
}
}  // namespace flashbwd

#endif
