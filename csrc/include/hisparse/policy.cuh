// Eviction keys of one step, for the resolver's threads. The arithmetic is policy.h's.
#pragma once

#include "hisparse/params.h"
#include "hisparse/policy.h"

namespace hisparse::cuda {

// kLrfu: else LRU.
template <bool kLrfu>
struct PolicyStep {
  int32_t clock;        // the region's clock in this step, from 1
  const uint8_t* gain;  // shared [kNumGains + 1], policy::gain and a last 0: threads read different entries at once

  __device__ __forceinline__ int32_t touch(int32_t history) const {
    const int32_t now = clock + policy::kBias;
    return max(history, now) + gain[min(abs(history - now), policy::kNumGains)];
  }
  // Key of a slot that this step reads.
  __device__ __forceinline__ int32_t hit(int32_t key) const {
    if constexpr (kLrfu) return touch(key);
    return policy::lru_key(clock, true);
  }
  // Key of a slot loaded by this step; `absent` is the negative slot_of of its position.
  __device__ __forceinline__ int32_t loaded(int16_t absent) const {
    if constexpr (kLrfu) return touch(policy::key_of_ghost(absent));
    return policy::lru_key(clock, false);
  }
  // slot_of of a position evicted with this key.
  __device__ __forceinline__ int16_t absent(int32_t key) const {
    if constexpr (kLrfu) return policy::ghost_of_key(key);
    return -1;
  }
  // What victims are ordered by, lowest first: 0 for empty slots, else from 1 up.
  __device__ __forceinline__ uint32_t rank(int32_t key) const {
    if constexpr (kLrfu) {  // policy::kMaxAge + 1 - policy::lrfu_age(key, clock)
      const int32_t oldest = clock + 2 * policy::kBias - policy::kMaxAge;
      return key == policy::kEmptyKey ? 0u : static_cast<uint32_t>(max(key, oldest) - oldest) + 1u;
    }
    return static_cast<uint32_t>(key) ^ 0x80000000u;
  }
};

}  // namespace hisparse::cuda
