// LayerNorm and RMSNorm forward. Reads x once if a row fits in registers. Optionally normalises h = residual +
// dropout(x) instead of x, and writes h too.
#pragma once

#include "dropout.cuh"
#include "exchange.cuh"

namespace flashbwd::layer_norm {

constexpr int kForwardThreads = 512;
constexpr int kForwardBytes = 64;  // bytes of a row per thread in registers; the rest of the row is read again

// Vectors per thread in registers.
constexpr int forward_vectors(int elements, int64_t held_bytes, bool add) {
  return elements > 1 ? kForwardBytes / static_cast<int>(elements * held_bytes) : (add ? 4 : 16);
}

struct ForwardArguments {
  BackwardTile tile;  // only lanes, groups and partials are set
  int64_t rows = 0;
  int columns = 0;
  float inverse_columns = 0.f;
  float eps = 0.f;
  bool centred = false;  // LayerNorm
  bool zero_centered = false;
  DType parameter_dtype = DType::kFloat32;
  const void* x = nullptr;
  int64_t x_stride = 0;
  const void* residual = nullptr;  // of h's dtype
  int64_t residual_stride = 0;
  Dropout dropout;
  void* h = nullptr;
  int64_t h_stride = 0;
  void* z = nullptr;
  int64_t z_stride = 0;
  const void* gamma = nullptr;
  const void* beta = nullptr;
  // Used if kShifted: row r starts (phase_base + r * phase_step) % kElements elements after a 16-byte boundary, gamma
  // and beta start gamma_phase and beta_phase of their elements after one.
  int phase_base = 0, phase_step = 0, gamma_phase = 0, beta_phase = 0;
  float* mu = nullptr;  // (rows,)
  float* rs = nullptr;
};

// kElements adjacent elements in registers, in their memory format: a multiple of 16 bytes, or a single element.
template <typename T, int kElements>
struct Vector {
  static constexpr int kSlots = kElements * static_cast<int>(sizeof(T)) / 16;
  static constexpr int kPerSlot = 16 / static_cast<int>(sizeof(T));
  uint4 slots[kSlots];

  __device__ void load(const T* source) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) slots[i] = *reinterpret_cast<const uint4*>(source + i * kPerSlot);
  }
  // Loads elements [first, last) and zeroes the others.
  __device__ void load_elements(const T* source, int first, int last) {
    float values[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) values[e] = e >= first && e < last ? to_float(source[e]) : 0.f;
    write(values);
  }
  __device__ void store_elements(T* target, int first, int last) const {
    float values[kElements];
    read(values);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (e >= first && e < last) target[e] = from_float<T>(values[e]);
    }
  }
  __device__ void store(T* target) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) *reinterpret_cast<uint4*>(target + i * kPerSlot) = slots[i];
  }
  __device__ void read(float (&values)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) unpack<T>(slots[i], &values[i * kPerSlot]);
  }
  __device__ void write(const float (&values)[kElements]) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) slots[i] = pack<T>(&values[i * kPerSlot]);
  }
};

template <typename T>
struct Vector<T, 1> {
  T value;

  __device__ void load(const T* source) { value = *source; }
  __device__ void store(T* target) const { *target = value; }
  __device__ void read(float (&values)[1]) const { values[0] = to_float(value); }
  __device__ void write(const float (&values)[1]) { value = from_float<T>(values[0]); }
};

// Loads kElements elements of gamma or beta, starting at `column`, from an aligned address.
template <typename T, int kElements>
__device__ void load_parameters(const void* data, DType dtype, int column, float (&values)[kElements]) {
  if (dtype == DType::kFloat32) {
    Vector<float, kElements> vector;
    vector.load(static_cast<const float*>(data) + column);
    vector.read(values);
  } else {
    Vector<T, kElements> vector;
    vector.load(static_cast<const T*>(data) + column);
    vector.read(values);
  }
}

// Like load_parameters(), for an address `skew` elements after a 16-byte boundary. Loads the enclosing 16-byte words
// and shifts them, or loads the elements one by one if those words exceed gamma or beta.
template <typename T, int kElements>
__device__ void load_skewed(const T* data, int column, int columns, int skew, float (&values)[kElements]) {
  constexpr int kPerSlot = 16 / static_cast<int>(sizeof(T));
  constexpr int kWords = kElements * static_cast<int>(sizeof(T)) / 4;
  const int first = column - skew;
  if (first < 0 || first + kElements + kPerSlot > columns) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const bool inside = column + e >= 0 && column + e < columns;
      values[e] = inside ? to_float(data[column + e]) : 0.f;
    }
    return;
  }
  uint32_t words[kWords + 4];
#pragma unroll
  for (int i = 0; i < kWords + 4; i += 4) {
    const uint4 raw = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(data + first) + i);
    words[i] = raw.x, words[i + 1] = raw.y, words[i + 2] = raw.z, words[i + 3] = raw.w;
  }
  const int bytes = skew * static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords + 2; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < kWords + 1; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bytes & 2 ? 16 : 0);
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    unpack<T>(make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]), &values[i / 4 * kPerSlot]);
  }
}

template <typename T, int kElements>
__device__ void load_skewed(const void* data, DType dtype, int column, int columns, int phase,
                            float (&values)[kElements]) {
  if (dtype == DType::kFloat32) {
    load_skewed<float, kElements>(static_cast<const float*>(data), column, columns, (phase + column) & 3, values);
  } else {
    constexpr int kMask = 16 / static_cast<int>(sizeof(T)) - 1;
    load_skewed<T, kElements>(static_cast<const T*>(data), column, columns, (phase + column) & kMask, values);
  }
}

// One thread's share of a row. This thread owns vectors lane, lane + lanes, ... of the row. It keeps the first kVectors
// of them in registers (`held`) and reads the others again in each pass. Template parameters as in forward_kernel.
template <typename T, typename TH, bool kAdd, int kElements, bool kShifted>
class ForwardRow {
 public:
  using Held = Vector<TH, kElements>;
  using Values = float[kElements];
  static constexpr int kVectors = forward_vectors(kElements, sizeof(TH), kAdd);

  __device__ __forceinline__ ForwardRow(const ForwardArguments& arguments, char* exchange_smem, char* drawn_from_smem)
      : a(arguments),
        lanes(a.tile.lanes),
        group(threadIdx.x / lanes),
        lane(threadIdx.x - group * lanes),
        row(static_cast<int64_t>(blockIdx.x) * a.tile.groups + group),
        exchange(a.tile, shared_address(exchange_smem), group, 0),
        phase(kShifted ? static_cast<int>((a.phase_base + row * a.phase_step) % kElements) : 0),
        vectors(row < a.rows ? (a.columns + phase + kElements - 1) / kElements : 0),
        x(static_cast<const T*>(a.x) + row * a.x_stride),
        h(static_cast<TH*>(a.h) + row * a.h_stride),
        summand(kAdd ? static_cast<const TH*>(a.residual) + row * a.residual_stride : reinterpret_cast<const TH*>(x)),
        drawn_from{shared_address(drawn_from_smem), a.dropout.keep_from} {}

  __device__ __forceinline__ void run() {
    if (kAdd && a.dropout.drops && a.dropout.keep == nullptr) {
      drawn_from.write(a.dropout.rng);
      __syncthreads();  // all threads have written the Philox keys; all threads read them
    }
    Held held[kVectors];
    load_row(held);
    float mean = 0.f;
    if (a.centred) {
      float2 sum = make_float2(0.f, 0.f);
      for_each(held, [&](int, const Values& values) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) sum.x += values[e];
      });
      mean = exchange.sum(a.tile, sum, 0).x * a.inverse_columns;
    }
    float2 squares = make_float2(0.f, 0.f);
    for_each(held, [&](int column, const Values& values) {
      const int first = first_of(column), last = last_of(column);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (e >= first && e < last) squares.x += (values[e] - mean) * (values[e] - mean);
      }
    });
    const float rs = rsqrtf(exchange.sum(a.tile, squares, 1).x * a.inverse_columns + a.eps);
    if (row >= a.rows) return;
    if (lane == 0) {
      if (a.centred) a.mu[row] = mean;
      a.rs[row] = rs;
    }
    T* z = static_cast<T*>(a.z) + row * a.z_stride;
    for_each(held, [&](int column, const Values& values) { normalise(z, column, values, mean, rs); });
  }

 private:
  const ForwardArguments& a;
  const int lanes, group, lane;
  const int64_t row;
  const RowExchange exchange;
  const int phase;    // elements of vector 0 that are before the row
  const int vectors;  // of the row
  const T* const x;   // (columns,), as are h and summand
  TH* const h;
  const TH* const summand;  // the residual, or x if there is none
  const DrawnFrom drawn_from;

  __device__ __forceinline__ int column_of(int vector) const { return vector * kElements - phase; }
  // Elements [first_of, last_of) of a vector are inside the row: all of them, except in the first and the last vector.
  __device__ __forceinline__ int first_of(int column) const { return kShifted ? max(0, -column) : 0; }
  __device__ __forceinline__ int last_of(int column) const {
    return kShifted ? min(kElements, a.columns - column) : kElements;
  }
  // kShifted: the rows have the same alignment, but rows, gamma or beta do not start or end at a 16-byte boundary.
  // Vectors are then aligned to those boundaries, and the first and the last vector of a row are partly outside it.
  __device__ __forceinline__ bool is_whole(int column) const {
    return !kShifted || (column >= 0 && column + kElements <= a.columns);
  }
  template <typename U>
  __device__ __forceinline__ void load(Vector<U, kElements>& vector, const U* row_data, int column) const {
    if (is_whole(column)) {
      vector.load(row_data + column);
    } else if constexpr (kShifted) {
      vector.load_elements(row_data + column, first_of(column), last_of(column));
    }
  }
  template <typename U>
  __device__ __forceinline__ void store(const Vector<U, kElements>& vector, U* row_data, int column) const {
    if (is_whole(column)) {
      vector.store(row_data + column);
    } else if constexpr (kShifted) {
      vector.store_elements(row_data + column, first_of(column), last_of(column));
    }
  }

  // Computes and stores one vector of h. `held` is the residual on entry and h on exit.
  __device__ __forceinline__ void add(int vector, const Vector<T, kElements>& branch, Held& held) const {
    const int column = column_of(vector);
    float values[kElements], sum[kElements];
    branch.read(values);
    held.read(sum);
    uint32_t kept = ~0u;
    if (a.dropout.drops) {
      const uint8_t* keep = a.dropout.keep + row * a.dropout.keep_stride + column;
      kept = a.dropout.keep != nullptr
                 ? (kElements > 1 && a.dropout.vector_keep && is_whole(column)
                        ? given_mask<kElements>(keep)
                        : given_mask<kElements>(keep, first_of(column), last_of(column)))
                 : drawn_from.mask<kElements>(drawn_from.offset() + row * a.columns + column, 0, 1);
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      sum[e] += kept_or_zero(values[e] * a.dropout.scale, kept << (7 - e / 4), e % 4);
    }
    held.write(sum);
    store(held, h, column);
  }

  // Loads the first kVectors vectors of x or, if kAdd, computes all vectors of h.
  __device__ __forceinline__ void load_row(Held (&held)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + v * lanes < vectors) load(held[v], summand, column_of(lane + v * lanes));
    }
    if constexpr (kAdd) {
      Vector<T, kElements> branch[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (lane + v * lanes < vectors) load(branch[v], x, column_of(lane + v * lanes));
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (lane + v * lanes < vectors) add(lane + v * lanes, branch[v], held[v]);
      }
      for (int i = lane + kVectors * lanes; i < vectors; i += lanes) {
        Held more;
        load(more, summand, column_of(i));
        load(branch[0], x, column_of(i));
        add(i, branch[0], more);
      }
    }
  }

  // Calls use(column, values) for each vector of the row that this thread owns.
  template <typename Use>
  __device__ __forceinline__ void for_each(const Held (&held)[kVectors], const Use& use) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + v * lanes < vectors) {
        float values[kElements];
        held[v].read(values);
        use(column_of(lane + v * lanes), values);
      }
    }
    const TH* const again_from = kAdd ? h : summand;
    for (int i = lane + kVectors * lanes; i < vectors; i += lanes) {
      float values[kElements];
      Held again;
      load(again, again_from, column_of(i));
      again.read(values);
      use(column_of(i), values);
    }
  }

  // Writes one vector of z.
  __device__ __forceinline__ void normalise(T* z, int column, const Values& values, float mean, float rs) const {
    float gamma[kElements], beta[kElements], out[kElements];
    if constexpr (kShifted) {
      if (a.gamma != nullptr) load_skewed<T>(a.gamma, a.parameter_dtype, column, a.columns, a.gamma_phase, gamma);
      if (a.beta != nullptr) load_skewed<T>(a.beta, a.parameter_dtype, column, a.columns, a.beta_phase, beta);
    } else {
      if (a.gamma != nullptr) load_parameters<T>(a.gamma, a.parameter_dtype, column, gamma);
      if (a.beta != nullptr) load_parameters<T>(a.beta, a.parameter_dtype, column, beta);
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      out[e] = (values[e] - mean) * rs;
      if (a.gamma != nullptr) out[e] *= gamma[e] + (a.zero_centered ? 1.f : 0.f);
      if (a.beta != nullptr) out[e] += beta[e];
    }
    Vector<T, kElements> result;
    result.write(out);
    store(result, z, column);
  }
};

// T: dtype of x, z and, unless they are fp32, of gamma and beta. TH: dtype of residual and h if kAdd, else T.
// kElements: elements per 16-byte access of T, or 1 if the rows of the tensors have different alignment.
template <typename T, typename TH, bool kAdd, int kElements, bool kShifted>
__global__ void __launch_bounds__(kForwardThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments a) {
  __shared__ __align__(16) char exchange_smem[(kBarrierBytes + 2 * sizeof(float2)) * kForwardThreads / kWarp];
  __shared__ __align__(16) char drawn_from_smem[kDrawnFromBytes];
  ForwardRow<T, TH, kAdd, kElements, kShifted>(a, exchange_smem, drawn_from_smem).run();
}

}  // namespace flashbwd::layer_norm
