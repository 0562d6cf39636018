// The n lowest ranks of a region, by radix histograms of those that are low.
#pragma once

#include "hisparse/device.cuh"

namespace hisparse::cuda {

inline constexpr int kBinBits = 8;
inline constexpr int kBins = 1 << kBinBits;
inline constexpr int kOwnBins = kBins / 32;  // a lane's, in a search

// Ranks are unsigned, 0 for empty slots. Distances count from the lowest rank of a slot in use, so that the gap between
// empty and other slots does not widen the range: 0 for empty slots, 1 and up for others.
__device__ __forceinline__ uint32_t rank_distance(uint32_t rank, uint32_t lowest) {
  return rank == 0 ? 0u : rank - lowest + 1u;
}

// Distance of slots that take no part.
inline constexpr uint32_t kNoCandidate = UINT32_MAX;

// One pass resolves the top 8 bits of the range of distances [low, low + width], width < 2^bits.
struct Digit {
  uint32_t low;
  uint32_t width;
  int shift;

  __device__ __forceinline__ static Digit of(uint32_t low, uint32_t width) {
    return {low, width, max(32 - __clz(width) - kBinBits, 0)};
  }
};

// Adds this thread's candidates inside the range to the shared histogram, all others to bins[kBins], which nobody
// reads: equal bins of a warp are one addition, and a condition would cost a branch each.
template <int S>
__device__ __forceinline__ void count_digit(const uint32_t (&distance)[S], const Digit& digit, int* bins) {
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const uint32_t above = distance[i] - digit.low;  // wraps to a large number below `low`
    atomicAdd(&bins[above <= digit.width ? above >> digit.shift : kBins], 1);
  }
}

struct Crossing {
  uint32_t value;  // of the digit; kBins if all that was counted is not enough
  int before;      // candidates below it
  int inside;      // candidates at it
};

// The digit's value that holds the `wanted`-th lowest candidate, to `crossing`, which one lane writes. For one warp.
__device__ __forceinline__ void find_digit(const int* bins, int wanted, Crossing* crossing) {
  const int lane = threadIdx.x & 31;
  int end[kOwnBins];  // of this lane's bins, summed up
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOwnBins; i += 4) {
    const int4 four = *reinterpret_cast<const int4*>(bins + lane * kOwnBins + i);
    end[i] = sum += four.x;
    end[i + 1] = sum += four.y;
    end[i + 2] = sum += four.z;
    end[i + 3] = sum += four.w;
  }
  const int total = inclusive_prefix(sum, lane);
  const int begin = total - sum;
  if (begin < wanted && wanted <= total) {
    int value = lane * kOwnBins, below = 0, up_to = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
      const bool is_below = begin + end[i] < wanted;
      value += is_below;
      below = max(below, is_below ? end[i] : 0);
      up_to = min(up_to, is_below ? INT32_MAX : end[i]);
    }
    *crossing = {static_cast<uint32_t>(value), begin + below, up_to - below};
  } else if (lane == 31 && total < wanted) {
    *crossing = {kBins, total, 0};
  }
}

// What is chosen: distances below `bound`, and the first `ties` in slot order of those equal to it.
struct Threshold {
  uint32_t bound;
  int ties;
};

// Resolves the threshold of the `wanted` lowest, 0 < wanted < candidates, from a first pass over `digit`, whose result
// `crossing` is. Further passes, rarely needed, reuse both and `bins`: into a bin of several distances, or beyond the
// first range, up to `highest()`. All threads call it alike, behind a barrier.
template <int kThreads, int S, typename Highest>
__device__ __forceinline__ Threshold find_threshold(const uint32_t (&distance)[S], int wanted, Digit digit,
                                                    Highest highest, int* bins, Crossing* crossing) {
  for (;;) {
    const Crossing found = *crossing;
    wanted -= found.before;
    uint32_t low = digit.low + (found.value << digit.shift);
    if (found.value < kBins) {
      if (wanted == found.inside) return {low + (1u << digit.shift), 0};
      if (digit.shift == 0) return {low, wanted};
      digit = Digit::of(low, (1u << digit.shift) - 1u);
    } else {
      low = digit.low + digit.width + 1u;
      digit = Digit::of(low, highest() - low);
    }
    __syncthreads();  // the bins have been read, and `crossing`
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    count_digit<S>(distance, digit, bins);
    __syncthreads();
    if (threadIdx.x < 32) find_digit(bins, wanted, crossing);
    __syncthreads();
  }
}

}  // namespace hisparse::cuda
