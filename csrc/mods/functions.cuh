// Device functions that generated modifications call. NVRTC compiles this file too, so it includes only
// headers of csrc/.
#pragma once

#include "scalars.cuh"

#ifdef __CUDACC__

namespace flashbwd {
// No kernel writes a captured tensor, so the compiler may read an element once for several uses.
template <typename T>
__device__ __forceinline__ T load_captured(const void* data, long long at) {
  return __ldg(static_cast<const T*>(data) + at);
}
template <>
__device__ __forceinline__ bool load_captured<bool>(const void* data, long long at) {
  return __ldg(static_cast<const unsigned char*>(data) + at) != 0;
}
__device__ __forceinline__ float load_half(const void* data, long long at) {
  return float_of_half(__ldg(static_cast<const unsigned short*>(data) + at));
}
__device__ __forceinline__ float load_bfloat16(const void* data, long long at) {
  return float_of_bfloat16(__ldg(static_cast<const unsigned short*>(data) + at));
}
__device__ __forceinline__ float round_half(float x) {
  return float_of_half(static_cast<unsigned short>(pack_16bit<false>(x, 0.f)));
}
__device__ __forceinline__ float round_bfloat16(float x) {
  return float_of_bfloat16(static_cast<unsigned short>(pack_16bit<true>(x, 0.f)));
}
// An index of a dimension with `size` elements, where -1 is the last one. An index beyond it becomes the last one: a
// modification is also called for hidden pairs, for which its tensors may have no element.
__device__ __forceinline__ int wrap(int i, int size) {
  const uint32 last = static_cast<uint32>(size - 1), index = static_cast<uint32>(i < 0 ? i + size : i);
  return static_cast<int>(index < last ? index : last);
}
__device__ __forceinline__ int wrap(long long i, int size) {
  return wrap(i > 0x7fffffff ? 0x7fffffff : i < -0x7fffffff ? -0x7fffffff : static_cast<int>(i), size);
}
// ---- arithmetic with PyTorch's semantics: integers wrap around, and a * b + c is not contracted to an FMA ----

template <typename T>
struct IsFloating {
  static constexpr bool value = false;
};
template <>
struct IsFloating<float> {
  static constexpr bool value = true;
};
template <>
struct IsFloating<double> {
  static constexpr bool value = true;
};
// The unsigned type for integer sums and products, since signed overflow is undefined behaviour in C++.
template <typename T>
struct Wrapping {
  using Type = unsigned int;
};
template <>
struct Wrapping<long long> {
  using Type = unsigned long long;
};
template <typename T>
__device__ __forceinline__ T plus(T a, T b) {
  if constexpr (IsFloating<T>::value) {
    return a + b;
  } else {
    using Type = typename Wrapping<T>::Type;
    return static_cast<T>(static_cast<Type>(a) + static_cast<Type>(b));
  }
}
template <typename T>
__device__ __forceinline__ T minus(T a, T b) {
  if constexpr (IsFloating<T>::value) {
    return a - b;
  } else {
    using Type = typename Wrapping<T>::Type;
    return static_cast<T>(static_cast<Type>(a) - static_cast<Type>(b));
  }
}
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
template <typename T>
__device__ __forceinline__ T times(T a, T b) {
  using Type = typename Wrapping<T>::Type;
  return static_cast<T>(static_cast<Type>(a) * static_cast<Type>(b));
}
// a + factor * b. Floats use one FMA, like PyTorch's add and sub kernels with `alpha`.
template <typename T>
__device__ __forceinline__ T plus_product(T a, T factor, T b) {
  if constexpr (IsFloating<T>::value) {
    return fma(factor, b, a);
  } else {
    return plus(a, times(factor, b));
  }
}
template <typename T>
__device__ __forceinline__ T negative(T a) {
  if constexpr (IsFloating<T>::value) {
    return -a;
  } else {
    return minus(static_cast<T>(0), a);
  }
}
template <typename T>
__device__ __forceinline__ T absolute(T a) {
  if constexpr (IsFloating<T>::value) {
    return fabs(a);
  } else {
    return a < static_cast<T>(0) ? negative(a) : a;
  }
}
template <typename T>
__device__ __forceinline__ bool sign_bit(T a) {
  if constexpr (IsFloating<T>::value) {
    return signbit(a);
  } else {
    return a < static_cast<T>(0);
  }
}
// Division by -1 overflows for the smallest integer, so the functions below treat it separately.
template <typename T>
__device__ __forceinline__ bool is_minus_one(T a) {
  return a < static_cast<T>(0) && a == static_cast<T>(-1);
}
// An integer divided by 0 gives 0. (PyTorch raises an error on the CPU, which a GPU kernel cannot do.)
template <typename T>
__device__ __forceinline__ T trunc_divide(T a, T b) {
  if constexpr (IsFloating<T>::value) {
    return trunc(a / b);
  } else {
    if (b == static_cast<T>(0)) return 0;
    return is_minus_one(b) ? negative(a) : static_cast<T>(a / b);
  }
}
template <typename T>
__device__ __forceinline__ T fmod_of(T a, T b) {
  if constexpr (IsFloating<T>::value) {
    return fmod(a, b);
  } else {
    return b == static_cast<T>(0) || is_minus_one(b) ? static_cast<T>(0) : static_cast<T>(a % b);
  }
}
template <typename T>
__device__ __forceinline__ T remainder_of(T a, T b) {
  const T r = fmod_of(a, b);
  return r != 0 && (r < 0) != (b < 0) ? plus(r, b) : r;
}
// For floats, computes (a - remainder) / b like PyTorch: floor(a / b) is wrong if a / b rounds up to an integer.
template <typename T>
__device__ __forceinline__ T floor_divide(T a, T b) {
  if constexpr (IsFloating<T>::value) {
    if (b == 0) return a / b;
    const T r = fmod(a, b);
    T q = (a - r) / b;
    if (r != 0 && (r < 0) != (b < 0)) q -= 1;
    if (q == 0) return copysign(static_cast<T>(0), a / b);
    const T whole = floor(q);
    return q - whole > static_cast<T>(0.5) ? whole + 1 : whole;
  } else {
    const T q = trunc_divide(a, b);
    const T r = fmod_of(a, b);
    return r != 0 && (r < 0) != (b < 0) ? minus(q, static_cast<T>(1)) : q;
  }
}
// An integer with a negative exponent gives 0, except for the bases 1 and -1.
template <typename T>
__device__ __forceinline__ T power(T a, T b) {
  if constexpr (IsFloating<T>::value) {
    return pow(a, b);
  } else {
    if (b < static_cast<T>(0)) {
      if (a == static_cast<T>(1)) return 1;
      return a == static_cast<T>(-1) ? static_cast<T>(b % 2 == 0 ? 1 : -1) : static_cast<T>(0);
    }
    T result = 1;
    for (; b > 0; b = static_cast<T>(b >> 1)) {
      if (b & 1) result = times(result, a);
      a = times(a, a);
    }
    return result;
  }
}
// A shift by a negative count or by at least the number of bits gives 0; shift_right gives -1 for a negative `a`.
template <typename T>
__device__ __forceinline__ T shift_left(T a, T by) {
  constexpr int kBits = 8 * sizeof(T);
  if (by < static_cast<T>(0) || by >= kBits) return 0;
  return static_cast<T>(static_cast<typename Wrapping<T>::Type>(a) << by);
}
template <typename T>
__device__ __forceinline__ T shift_right(T a, T by) {
  constexpr int kLast = 8 * sizeof(T) - 1;
  if (by < static_cast<T>(0) || by > kLast) return static_cast<T>((a < static_cast<T>(0) ? -1 : 0));
  return static_cast<T>(a >> by);
}
template <typename T>
__device__ __forceinline__ T maximum_of(T a, T b) {
  return a != a || a > b ? a : b;
}
template <typename T>
__device__ __forceinline__ T minimum_of(T a, T b) {
  return a != a || a < b ? a : b;
}

// ---- functions ----

template <typename T>
__device__ __forceinline__ T relu(T x) {
  return x <= static_cast<T>(0) ? static_cast<T>(0) : x;
}
template <typename T>
__device__ __forceinline__ T hardsigmoid(T x) {
  return minimum_of(maximum_of(x + 3, static_cast<T>(0)), static_cast<T>(6)) / 6;
}
template <typename T>
__device__ __forceinline__ T hardswish(T x) {
  return x * minimum_of(maximum_of(x + 3, static_cast<T>(0)), static_cast<T>(6)) / 6;
}
// Interpolates from the nearer end, like PyTorch.
template <typename T>
__device__ __forceinline__ T lerp(T a, T b, T weight) {
  return absolute(weight) < static_cast<T>(0.5) ? a + weight * (b - a) : b - (b - a) * (1 - weight);
}
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + exp(-x)); }
__device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }
// The argument reduction of sinf and cosf for large arguments is long, so it is not inlined into the score loop.
__device__ __noinline__ float far_sine(float x) { return sinf(x); }
__device__ __noinline__ float far_cosine(float x) { return cosf(x); }
// sin(x) or cos(x). With x = n * pi + r (sin) or (n + 1/2) * pi + r (cos), the result is +-sin(r), a polynomial with an
// error of at most 2.2 ulp for |x| <= 1e5. For larger |x|, sets *near to false, or calls sinf or cosf if near is null.
template <bool kCosine>
__device__ __forceinline__ float sine_or_cosine(float x, bool* near) {
  constexpr float kWhole = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low mantissa bits
  const float n_bits = kCosine ? fmaf(x, 0.318309886f, -0.5f) + kWhole : fmaf(x, 0.318309886f, kWhole);
  const float n = n_bits - kWhole + (kCosine ? 0.5f : 0.f);
  float r = fmaf(n, -3.14159203f, x);  // Cody-Waite reduction: pi in three parts
  r = fmaf(n, -6.27832947e-7f, r);
  r = fmaf(n, -1.078060506e-14f, r);
  const float r2 = r * r;
  float sine = fmaf(2.6056314e-6f, r2, -1.98095397e-4f);
  sine = fmaf(sine, r2, 8.33306555e-3f);
  sine = fmaf(sine, r2, -0.166666597f);
  sine = fmaf(sine * r2, r, r);
  const uint32 odd = __float_as_uint(n_bits) + (kCosine ? 1u : 0u);
  sine = __uint_as_float(__float_as_uint(sine) + (odd << 31));  // flips the sign for odd n
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
// C's fmax and fmin: if one argument is NaN, the result is the other one.
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
