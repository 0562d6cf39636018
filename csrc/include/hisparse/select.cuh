// The n lowest ranks of a region, by radix histograms over the ranks' actual range.
#pragma once

#include "hisparse/device.cuh"

namespace hisparse::cuda {

inline constexpr int kBins = 2048;
inline constexpr int kBinBits = 11;

// Ranks are unsigned, 0 for empty slots. Distances count from the lowest rank of a slot in use, so that the gap between
// empty and other slots does not widen the range: 0 for empty slots, 1 and up for others.
__device__ __forceinline__ uint32_t rank_distance(uint32_t rank, uint32_t lowest) {
  return rank == 0 ? 0u : rank - lowest + 1u;
}

// One pass resolves the top 11 bits of a range of distances [low, low + 2^bits). While the range is narrow a distance
// has up to 32 bins, one a lane, so that equal ranks do not serialise.
struct Digit {
  uint32_t low;
  int bits;
  int shift;  // distance - low >> shift: 11 bits
  uint32_t values;
  int spread;  // log2 of the bins a value has: 0, or a whole number of lanes' bins in find_digit

  __device__ __forceinline__ Digit(uint32_t low, int bits)
      : low(low),
        bits(bits),
        shift(max(bits - kBinBits, 0)),
        values(1u << min(bits, kBinBits)),
        spread(bits <= kBinBits - 3 ? min(kBinBits - bits, 5) : 0) {}
};

struct Crossing {
  uint32_t value;  // of the digit
  int before;      // candidates below it
  int inside;      // candidates at it
};

// Distance of slots that take no part.
inline constexpr uint32_t kNoCandidate = UINT32_MAX;

// Adds this thread's candidates inside the range to the shared histogram. kAll: they all are.
template <int S, bool kAll>
__device__ __forceinline__ void count_digit(const uint32_t (&distance)[S], const Digit& digit, int* bins) {
  const unsigned replica = threadIdx.x & ((1u << digit.spread) - 1u);
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const uint32_t above = distance[i] - digit.low;  // wraps to a large number below `low`
    const uint32_t bin = (above >> digit.shift) << digit.spread | replica;
    if (distance[i] != kNoCandidate && (kAll || above >> digit.shift < digit.values)) atomicAdd(&bins[bin], 1);
  }
}

// The warp's total of its share of the bins, for find_digit after the next barrier.
template <int kThreads>
__device__ __forceinline__ void sum_bins(const int* bins, int* warp_totals) {
  constexpr int kOwn = kBins / kThreads;
  int own = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own += bins[threadIdx.x * kOwn + i];
  own = __reduce_add_sync(kAllLanes, own);
  if ((threadIdx.x & 31) == 0) warp_totals[threadIdx.x >> 5] = own;
}

// The digit's value that holds the `wanted`-th lowest candidate. Every warp finds it on its own.
template <int kThreads>
__device__ __forceinline__ Crossing find_digit(const int* bins, const int* warp_totals, int wanted, int spread) {
  constexpr int kOwn = kBins / kThreads;
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31;
  const int share = lane < kWarps ? warp_totals[lane] : 0;
  const int share_end = inclusive_prefix(share, lane);
  const int owner = __ffs(__ballot_sync(kAllLanes, share_end >= wanted)) - 1;
  const int before_share = __shfl_sync(kAllLanes, share_end - share, owner);
  int bin[kOwn];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += bin[i] = bins[(owner * 32 + lane) * kOwn + i];
  const int end = before_share + inclusive_prefix(sum, lane);
  const int crossing = __ffs(__ballot_sync(kAllLanes, end >= wanted)) - 1;
  const int first_bin = (owner * 32 + crossing) * kOwn;
  if (spread == 0) {
    int before = __shfl_sync(kAllLanes, end - sum, crossing);
    int inside = 0, at = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int next = __shfl_sync(kAllLanes, bin[i], crossing);
      if (before + inside < wanted) {
        before += inside;
        inside = next;
        at = i;
      }
    }
    return {static_cast<uint32_t>(first_bin + at), before, inside};
  }
  const int group = (1 << spread) / kOwn;  // the bins of one value are those of `group` neighbouring lanes
  const int begin = crossing & ~(group - 1);
  const int before = __shfl_sync(kAllLanes, end - sum, begin);
  const int inside = __shfl_sync(kAllLanes, end, begin + group - 1) - before;
  return {static_cast<uint32_t>(first_bin) >> spread, before, inside};
}

// What is chosen: distances below `bound`, and the first `ties` in slot order of those equal to it.
struct Threshold {
  uint32_t bound;
  int ties;
};

// Resolves the threshold of the `wanted` lowest, 0 < wanted < candidates, from a first pass whose bins and totals are
// complete; further passes, needed for ranges wider than 11 bits only, reuse both. All threads call it
// alike.
template <int kThreads, int S>
__device__ __forceinline__ Threshold find_threshold(const uint32_t (&distance)[S], int wanted, Digit digit, int* bins,
                                                    int* warp_totals) {
  for (;;) {
    const Crossing crossing = find_digit<kThreads>(bins, warp_totals, wanted, digit.spread);
    wanted -= crossing.before;
    const uint32_t low = digit.low + (crossing.value << digit.shift);
    if (wanted == crossing.inside) return {low + (1u << digit.shift), 0};
    if (digit.shift == 0) return {low, wanted};
    digit = Digit(low, digit.shift);
    __syncthreads();  // the bins have been read
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    count_digit<S, false>(distance, digit, bins);
    __syncthreads();
    sum_bins<kThreads>(bins, warp_totals);
    __syncthreads();
  }
}

}  // namespace hisparse::cuda
