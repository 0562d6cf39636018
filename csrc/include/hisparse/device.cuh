// Small device helpers shared by the kernels: programmatic dependent launch, host-memory loads, warp and block scans.
#pragma once

#include "hisparse/params.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace hisparse::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// Waits until the kernels this launch depends on have completed and their writes are visible. Every kernel of this
// library calls it, and before it lets go its own dependents, so that a chain of dependent launches stays ordered
// transitively; before its first read, but for fetch.cuh, which reads what the kernel right before it only reads.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets a dependent launch become resident while this kernel still runs; it waits in `wait_for_dependencies`.
__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A 16-byte load of data that this kernel never writes and reads once.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Keeps a value in its register: without it the compiler may compute it again where it is used.
template <typename T>
__device__ __forceinline__ void keep(T& value) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(value));
}

// A load past the SM's own cache, for what another kernel may be writing meanwhile: a second look shows more than the
// first.
template <typename T>
__device__ __forceinline__ T load_current(const T* address) {
  return __ldcg(address);
}

// A batch row's record, in one load past that cache.
__device__ __forceinline__ BatchRow load_row(const BatchRow* row) {
  const int4 words = __ldcg(reinterpret_cast<const int4*>(row));
  return {words.x, words.y, words.z, words.w};
}

__device__ __forceinline__ unsigned lanes_below(int lane) { return (1u << lane) - 1u; }

// Exclusive prefix over the warp of a value in [0, kMax], and the warp's total. One ballot a bit instead of a shuffle
// tree: a count per lane has few bits.
template <int kMax>
__device__ __forceinline__ int small_prefix(int value, int lane, int& total) {
  int before = 0;
  total = 0;
#pragma unroll
  for (int bit = 0; (1 << bit) <= kMax; ++bit) {
    const unsigned votes = __ballot_sync(kAllLanes, (value >> bit) & 1);
    before += __popc(votes & lanes_below(lane)) << bit;
    total += __popc(votes) << bit;
  }
  return before;
}

// Inclusive prefix sum over the warp.
__device__ __forceinline__ int inclusive_prefix(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const int other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Quotient of a number in [0, 2^31) without a division or a branch: one multiplication by a rounded-up reciprocal.
struct Divider {
  uint32_t reciprocal;  // ceil(2^(31 + shift) / divisor)
  int32_t shift;        // ceil(log2(divisor))
  int32_t divisor;

  __host__ static Divider of(int32_t divisor) {
    int32_t bits = 0;
    while ((int64_t{1} << bits) < divisor) ++bits;
    const uint64_t power = uint64_t{1} << (31 + bits);
    return {static_cast<uint32_t>((power + divisor - 1) / divisor), bits, divisor};
  }
  __device__ __forceinline__ int32_t quotient(int32_t value) const {
    return static_cast<int32_t>(__umulhi(static_cast<uint32_t>(value) << 1, reciprocal) >> shift);
  }
  __device__ __forceinline__ int32_t remainder(int32_t value) const { return value - quotient(value) * divisor; }
};

}  // namespace hisparse::cuda
