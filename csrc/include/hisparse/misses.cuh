// A batch row's misses: listed in selection order, repeats told apart where there may be any.
#pragma once

#include "hisparse/device.cuh"

#include <cstdint>

namespace hisparse::cuda {

// The misses of a batch row in selection order, with repeats: `list` holds their positions or, if wide, where they are
// in the selection. Open addressing over them; an entry of `table` holds the smallest place in the list of one
// position.
template <typename Layout>
struct Misses {
  using Entry = typename Layout::Entry;
  Entry* list;
  Entry* table;
  uint32_t size;
  const int32_t* selection;

  __device__ __forceinline__ int32_t position(uint32_t place) const {
    if constexpr (Layout::kWide) return selection[list[place]];
    return static_cast<int32_t>(list[place]);
  }
  __device__ __forceinline__ uint32_t start(int32_t position) const {
    return __umulhi(static_cast<uint32_t>(position) * 2654435769u, size);
  }
  __device__ __forceinline__ uint32_t next(uint32_t at) const { return at + 1 == size ? 0 : at + 1; }

  // Returns whether the position was met at another place. Of two inserters of one position at least one meets it.
  __device__ __forceinline__ bool insert(uint32_t place) const {
    const int32_t wanted = position(place);
    uint32_t at = start(wanted);
    Entry seen = Layout::kNoEntry;
    for (;;) {
      const Entry found = atomicCAS(&table[at], seen, static_cast<Entry>(place));
      if (found == seen) return seen != Layout::kNoEntry;  // an empty entry, or one of a later occurrence, is ours now
      if (position(found) != wanted) {
        at = next(at);
        seen = Layout::kNoEntry;
      } else if (found < place) {
        return true;
      } else {
        seen = found;
      }
    }
  }
  // Whether the position listed at this place occurs there first. After a barrier.
  __device__ __forceinline__ bool is_first(uint32_t place) const {
    const int32_t wanted = position(place);
    for (uint32_t at = start(wanted);; at = next(at)) {
      const uint32_t found = table[at];
      if (found == place) return true;
      if (position(found) == wanted) return false;
    }
  }
};

template <int kThreads, typename Layout>
__device__ __forceinline__ void clear_table(const Misses<Layout>& misses) {
  constexpr int kVectorEntries = 16 / sizeof(typename Layout::Entry);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < misses.size / kVectorEntries; i += kThreads)
    reinterpret_cast<uint4*>(misses.table)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// The places in the list at which a position occurs first, in order, to `firsts`, which lies where the table is; they
// are complete after the caller's next barrier. Returns their number. All threads call it alike. `is_clear`: the table.
template <int kThreads, int E, typename Layout>
__device__ __noinline__ int find_firsts(const Misses<Layout> misses, int num_listed, bool is_clear, int* warp_totals,
                                        uint16_t* firsts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (!is_clear) {
    clear_table<kThreads>(misses);
    __syncthreads();
  }
  const int run = (num_listed + kThreads - 1) / kThreads;  // of places, a thread's
  const int first_listed = threadIdx.x * run;
  const int own_listed = min(max(num_listed - first_listed, 0), run);
  bool met = false;
#pragma unroll 1
  for (int i = 0; i < own_listed; ++i) met |= misses.insert(first_listed + i);
  const bool repeats = __syncthreads_or(met);
  uint32_t is_first = static_cast<uint32_t>((uint64_t{1} << own_listed) - 1);
#pragma unroll 1
  for (int i = 0; repeats && i < own_listed; ++i)
    if (!misses.is_first(first_listed + i)) is_first &= ~(1u << i);
  int warp_firsts;
  int ordinal = small_prefix<E>(__popc(is_first), lane, warp_firsts);
  if (lane == 0) warp_totals[warp] = warp_firsts;
  __syncthreads();
  const int totals = lane < kThreads / 32 ? warp_totals[lane] : 0;
  ordinal += __reduce_add_sync(kAllLanes, lane < warp ? totals : 0);
#pragma unroll 1
  for (; is_first; is_first &= is_first - 1)
    firsts[ordinal++] = static_cast<uint16_t>(first_listed + __ffs(is_first) - 1);
  return __reduce_add_sync(kAllLanes, totals);
}

}  // namespace hisparse::cuda
