// A thread's own slots of shared memory: cp.async writes one tensor's rows there, and gradients that cannot be stored
// with 16-byte stores are staged there.
#pragma once

#include "device.cuh"

namespace flashbwd::layer_norm {

// The slots of one tensor in a stage. A slot is given by its shared memory address.
template <typename T, int kElements>
struct Plane {
  static constexpr int kSlots = kElements * static_cast<int>(sizeof(T)) / 16;  // per vector
  static constexpr int kPerSlot = 16 / static_cast<int>(sizeof(T));

  // Copies a whole vector from an aligned address, asynchronously.
  static __device__ void fill(uint32_t slots, const T* source) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) copy_async_16(slots + h * kSlotStride, source + h * kPerSlot);
  }

  // Copies elements [skip, count) of a vector and zeroes the others. With `vector`, `source` is 16-byte aligned and the
  // copy includes the elements before `skip`, which clear_head() zeroes later.
  static __device__ void fill_elements(uint32_t slots, const T* source, int skip, int count, bool vector) {
#pragma unroll 1
    for (int h = 0; h < kSlots; ++h) {
      const uint32_t slot = slots + h * kSlotStride;
      if (vector) {
        const int bytes = (count - h * kPerSlot) * static_cast<int>(sizeof(T));
        copy_async_16(slot, source + h * kPerSlot, max(0, min(16, bytes)));
      } else {
#pragma unroll 1
        for (int e = 0; e < kPerSlot; ++e) {
          const int element = h * kPerSlot + e;
          const bool wanted = element >= skip && element < count;
          store_shared(slot + e * sizeof(T), wanted ? source[element] : from_float<T>(0.f));
        }
      }
    }
  }

  // Zeroes the first `count` elements of a vector, which belong to the previous row.
  static __device__ void clear_head(uint32_t slots, int count) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (e < count) store_shared(element_of(slots, e), from_float<T>(0.f));
    }
  }

  static __device__ void read(uint32_t slots, float (&values)[kElements]) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) unpack<T>(load_shared_16(slots + h * kSlotStride), &values[h * kPerSlot]);
  }

  // A vector converted to T.
  struct Packed {
    uint4 slots[kSlots];
  };

  static __device__ Packed packed(const float (&values)[kElements]) {
    Packed result;
#pragma unroll
    for (int h = 0; h < kSlots; ++h) result.slots[h] = pack<T>(&values[h * kPerSlot]);
    return result;
  }

  // Stores a whole vector to an aligned global address.
  static __device__ void store(T* target, const Packed& vector) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) store_streaming(target + h * kPerSlot, vector.slots[h]);
  }

  static __device__ void put(uint32_t slots, const Packed& vector) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) store_shared_16(slots + h * kSlotStride, vector.slots[h]);
  }

  // Stores elements [skip, count) of a vector from its slots to global memory.
  static __device__ void store_elements(uint32_t slots, T* target, int skip, int count) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (e >= skip && e < count) target[e] = load_shared<T>(element_of(slots, e));
    }
  }

  static __device__ uint32_t element_of(uint32_t slots, int e) {
    return slots + e / kPerSlot * kSlotStride + e % kPerSlot * static_cast<int>(sizeof(T));
  }
};

}  // namespace flashbwd::layer_norm
