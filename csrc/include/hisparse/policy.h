// Integer arithmetic of the replacement policies, shared by the CPU and the CUDA kernels.
//
// LRFU weighs a reference made d steps ago by 2^(-d/16). A slot's key is the logarithm of the sum of its references'
// weights in units of 1/16 octave, relative to step 0, so that one step of age is one unit and nothing decays in
// memory. An evicted position keeps half of that key in the negative values of slot_of: -1 never held, -1 - g ghost g.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HISPARSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HISPARSE_HOST_DEVICE inline
#endif

namespace hisparse::policy {

inline constexpr int32_t kEmptyKey = INT32_MIN;
inline constexpr int32_t kBias = 128;        // keeps "never referenced" (0) out of every sum: kBias > kNumGains
inline constexpr int32_t kMaxAge = 1023;     // victims older than this rank alike
inline constexpr int32_t kMaxGhost = 32767;  // what the negative half of an int16 can hold
inline constexpr int32_t kNumGains = 89;

// kGain(d) = round(16 * log2(1 + 2^(-d / 16))): what adding a weight d units smaller adds to a logarithm.
HISPARSE_HOST_DEVICE int32_t gain(int32_t distance) {
  static constexpr uint8_t kGain[kNumGains] = {
      16, 16, 15, 15, 14, 14, 13, 13, 12, 12, 12, 11, 11, 10, 10, 10, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 6, 6, 6, 6,
      6,  5,  5,  5,  5,  5,  4,  4,  4,  4,  4,  4,  3,  3,  3,  3,  3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2,
      2,  2,  2,  1,  1,  1,  1,  1,  1,  1,  1,  1,  1,  1,  1,  1,  1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  return distance < kNumGains ? kGain[distance] : 0;
}

// LRU key of a slot hit (above) or loaded at step `clock`.
HISPARSE_HOST_DEVICE int32_t lru_key(int32_t clock, bool hit) { return 2 * clock + (hit ? 1 : 0); }

// LRFU key after one reference at step `clock`; `key` 0: never referenced before.
HISPARSE_HOST_DEVICE int32_t lrfu_touch(int32_t key, int32_t clock) {
  const int32_t now = clock + kBias;
  return key > now ? key + gain(key - now) : now + gain(now - key);
}

// How long ago, roughly, a slot was useful: 1 .. kMaxAge, larger goes first.
HISPARSE_HOST_DEVICE int32_t lrfu_age(int32_t key, int32_t clock) {
  const int32_t age = clock + 2 * kBias - key;
  return age < kMaxAge ? age : kMaxAge;
}

HISPARSE_HOST_DEVICE int16_t ghost_of_key(int32_t key) {
  const int32_t ghost = key >> 1;
  return static_cast<int16_t>(-1 - (ghost < kMaxGhost ? ghost : kMaxGhost));
}

HISPARSE_HOST_DEVICE int32_t key_of_ghost(int16_t slot) { return 2 * (-1 - static_cast<int32_t>(slot)); }

}  // namespace hisparse::policy
