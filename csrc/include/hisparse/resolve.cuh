// The resolver: selected positions -> physical rows, hot-region upkeep and the plan of misses. One CTA a batch row.
//
// A CTA's way, a barrier after each step:
//   1. load the selection, the page tables, slot_of and the region's keys (independent loads, one latency); mark the
//      slots that are hit; leave early where nothing is wanted from the hot region
//   2. list the misses in selection order; give hits their keys; find the range of the other slots' ranks
//   3. hash the listed misses, which keeps each position's first occurrence; histogram the ranks
//   4. find the victims' threshold (select.cuh)
//   5. list the victims in slot order; they leave slot_of
//   6. hand the i-th victim to the i-th miss; publish
// Nothing depends on the order in which threads run. What it costs is instructions, not bytes: a CTA executes this
// once, so that the code is kept short and work on misses is done on the list, not on the selection.
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/params.h"
#include "hisparse/policy.cuh"
#include "hisparse/select.cuh"

#include <type_traits>

namespace hisparse::cuda {

inline constexpr int kMaxVerifyRows = 64;
inline constexpr int kMaxSharedPages = 8192;  // of page tables copied to shared memory
inline constexpr int32_t kNotReadable = -1, kOnHost = -2;

// What the launcher derives from ResolveParams.
struct ResolveShape {
  Divider block;          // by block_size
  int32_t num_positions;  // max_pages * block_size
  int32_t shared_pages;   // max_pages where the page tables fit into shared memory, else 0
};

// Dynamic shared memory: scratch | list [threads * E] | hash [kHashEntries] | pages [shared_pages] int32.
// scratch: first hit flags [threads * S] bytes and bins [kBins] int32, later victims [threads * S] uint16.
// list, hash: of 32 bits each; 16 bits where they would not fit otherwise (kWide).
template <int kThreads, int E, int S>
struct ResolveLayout {
  static constexpr bool kWide = kThreads * E > 8192;
  using Entry = std::conditional_t<kWide, uint16_t, uint32_t>;
  static constexpr Entry kNoEntry = static_cast<Entry>(~0u);
  static constexpr int kFlagBytes = kThreads * S;
  static constexpr int kScratchBytes =
      kFlagBytes + kBins * 4 > kFlagBytes * 2 ? kFlagBytes + kBins * 4 : kFlagBytes * 2;
  static constexpr int kListBytes = kThreads * E * sizeof(Entry);
  static constexpr int kHashEntries = 2 * kThreads * E < 49152 ? 2 * kThreads * E : 49152;
  static constexpr int kBytes = kScratchBytes + kListBytes + kHashEntries * sizeof(Entry);
  static constexpr bool kSharesPages = !kWide;
};

struct EntrySummary {
  int32_t misses;
  uint32_t entries;  // resident | wanted << 16
};

__device__ __forceinline__ void add_counter(const ResolveParams& p, int counter, uint32_t number) {
  if (number) atomicAdd(reinterpret_cast<unsigned long long*>(p.counters) + counter, number);
}

// -1 for every step-th query row from first_row on: rows that belong to no batch row, or to one without a request.
template <int kThreads>
__device__ __noinline__ void fill_padding(const ResolveParams& p, int first_row, int last_row, int step) {
  for (int t = first_row; t < last_row; t += step) {
    for (int part = 0; part < p.num_parts; ++part) {
      int32_t* out = p.rows + (static_cast<int64_t>(part) * p.num_query_rows + t) * p.top_k;
      for (int i = threadIdx.x; i < p.top_k; i += kThreads) out[i] = -1;
    }
    if (threadIdx.x == 0) p.counts[t] = 0;
  }
}

// A batch row with too many query rows for a hot region (prefill): resident pages only, no state.
template <int kThreads>
__device__ __noinline__ void translate_rows(const ResolveParams& p, const ResolveShape& shape, int request,
                                            int first_row, int last_row, int step) {
  const int32_t* host = p.host + static_cast<int64_t>(request) * p.max_pages;
  uint32_t all_valid = 0, all_unreadable = 0;
  for (int t = first_row; t < last_row; t += step) {
    int num_valid = 0;
    for (int begin = 0; begin < p.top_k; begin += kThreads) {
      const int i = begin + threadIdx.x;
      const int position = i < p.top_k ? p.topk[static_cast<int64_t>(t) * p.top_k + i] : -1;
      const bool real = static_cast<uint32_t>(position) < static_cast<uint32_t>(shape.num_positions);
      const int page = real ? shape.block.quotient(position) : 0;
      bool readable = false;
      for (int part = 0; part < p.num_parts && i < p.top_k; ++part) {
        const int64_t table = static_cast<int64_t>(p.parts[part]) * p.max_requests + request;
        const int block = real ? p.resident[table * p.max_pages + page] : -1;
        if (part == 0) readable = block >= 0;
        p.rows[(static_cast<int64_t>(part) * p.num_query_rows + t) * p.top_k + i] =
            readable ? block * p.block_stride_rows + shape.block.remainder(position) : -1;
      }
      num_valid += __syncthreads_count(readable);
      all_unreadable += real && !readable && host[page] < 0;
    }
    if (threadIdx.x == 0) {
      p.counts[t] = num_valid;
      all_valid += num_valid;
    }
  }
  add_counter(p, kResident, all_valid);
  add_counter(p, kUnreadable, __reduce_add_sync(kAllLanes, all_unreadable) * ((threadIdx.x & 31) == 0));
}

// Adds each thread's number of valid entries to its query rows' counts. `valid` bit e: entry e is valid.
template <int E>
__device__ __noinline__ void add_counts(uint32_t valid, int top_k, int* row_count) {
  const int first = threadIdx.x * E;
  for (uint32_t left = valid; left;) {
    const int row = (first + __ffs(left) - 1) / top_k;
    const int end = (row + 1) * top_k - first;  // this thread's entries of the query row end here
    const uint32_t inside = end < 32 ? left & ((1u << end) - 1u) : left;
    atomicAdd(&row_count[row], __popc(inside));
    left &= ~inside;
  }
}

// kVector: the addresses and the count are multiples of 16 bytes.
template <int E, bool kVector>
__device__ __forceinline__ void load_entries(const int32_t* from, int count, int32_t (&out)[E]) {
  const int first = threadIdx.x * E;
  if constexpr (kVector) {
#pragma unroll
    for (int e = 0; e < E; e += 4) {
      int4 v = make_int4(-1, -1, -1, -1);
      if (first + e < count) v = *reinterpret_cast<const int4*>(from + first + e);
      out[e] = v.x, out[e + 1] = v.y, out[e + 2] = v.z, out[e + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e) out[e] = first + e < count ? from[first + e] : -1;
  }
}

template <int E, bool kVector>
__device__ __forceinline__ void store_entries(int32_t* to, int count, const int32_t (&values)[E]) {
  const int first = threadIdx.x * E;
  if constexpr (kVector) {
#pragma unroll
    for (int e = 0; e < E; e += 4)
      if (first + e < count)
        *reinterpret_cast<int4*>(to + first + e) = make_int4(values[e], values[e + 1], values[e + 2], values[e + 3]);
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e)
      if (first + e < count) to[first + e] = values[e];
  }
}

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

// A page's device block, kOnHost or kNotReadable, for all pages of a request.
template <int kThreads>
__device__ __forceinline__ void copy_page_tables(const int32_t* resident, const int32_t* host, int num_pages,
                                                 int32_t* pages) {
  if (num_pages % 4 == 0) {
#pragma unroll 2
    for (int i = threadIdx.x * 4; i < num_pages; i += kThreads * 4) {
      const int4 r = *reinterpret_cast<const int4*>(resident + i), h = *reinterpret_cast<const int4*>(host + i);
      *reinterpret_cast<int4*>(pages + i) = make_int4(r.x >= 0   ? r.x
                                                      : h.x >= 0 ? kOnHost
                                                                 : kNotReadable,
                                                      r.y >= 0   ? r.y
                                                      : h.y >= 0 ? kOnHost
                                                                 : kNotReadable,
                                                      r.z >= 0   ? r.z
                                                      : h.z >= 0 ? kOnHost
                                                                 : kNotReadable,
                                                      r.w >= 0   ? r.w
                                                      : h.w >= 0 ? kOnHost
                                                                 : kNotReadable);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_pages; i += kThreads) {
      const int32_t r = resident[i];
      pages[i] = r >= 0 ? r : host[i] >= 0 ? kOnHost : kNotReadable;
    }
  }
}

// E: selection entries a thread, at least max_query_rows * K / kThreads; S: slots a thread, at least max_slots /
// kThreads. kVector: topk, rows, key and position_of and their rows allow 16-byte accesses.
template <int kThreads, int E, int S, bool kLrfu, bool kVector>
__global__ void __launch_bounds__(kThreads, 1)
    resolve_kernel(const __grid_constant__ ResolveParams p, const __grid_constant__ ResolveShape shape) {
  using Layout = ResolveLayout<kThreads, E, S>;
  using Entry = typename Layout::Entry;
  constexpr int kWarps = kThreads / 32;
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ EntrySummary entry_summary[kWarps];
  __shared__ uint2 slot_range[kWarps];      // rank of the slots in use, less one: lowest, highest plus one
  __shared__ uint32_t slot_totals[kWarps];  // candidates | hits << 16
  __shared__ int bin_totals[kWarps];
  __shared__ int first_totals[kWarps];
  __shared__ uint32_t victim_totals[kWarps];
  __shared__ int row_count[kMaxVerifyRows];
  __shared__ uint8_t gain[policy::kNumGains + 1];

  uint8_t* hit_flags = dynamic;
  int* bins = reinterpret_cast<int*>(dynamic + Layout::kFlagBytes);
  uint16_t* victims = reinterpret_cast<uint16_t*>(dynamic);
  Entry* list = reinterpret_cast<Entry*>(dynamic + Layout::kScratchBytes);
  Entry* hash_table = reinterpret_cast<Entry*>(dynamic + Layout::kScratchBytes + Layout::kListBytes);
  int32_t* pages = reinterpret_cast<int32_t*>(dynamic + Layout::kBytes);

  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int batch_row = blockIdx.x;
  const int warp = tid >> 5;
  const int first_slot = tid * S;

  wait_for_dependencies();
  release_dependents();

  // -- which rows; the selection is loaded meanwhile on the guess of one query row a batch row --
  const bool exists = batch_row < p.num_batch_rows;  // without any batch row one CTA still fills the padding
  const int first_row = p.query_start[batch_row];
  const int last_row = exists ? p.query_start[batch_row + 1] : first_row;
  const int end_row = p.query_start[p.num_batch_rows];
  const int request = exists ? p.row_request[batch_row] : -1;
  const int32_t* selection = p.topk + static_cast<int64_t>(batch_row) * p.top_k;
  int32_t position[E];
  load_entries<E, kVector>(selection, batch_row < p.num_query_rows ? p.top_k : 0, position);
#pragma unroll
  for (int i = tid; i < (Layout::kFlagBytes + kBins * 4) / 16; i += kThreads)
    reinterpret_cast<uint4*>(dynamic)[i] = make_uint4(0, 0, 0, 0);
  if (tid < kMaxVerifyRows) row_count[tid] = 0;
  if (kLrfu && tid <= policy::kNumGains) gain[tid] = static_cast<uint8_t>(policy::gain(tid));

  const int num_rows = last_row - first_row;
  const int slice = blockIdx.y, num_slices = gridDim.y;
  if (end_row < p.num_query_rows)
    fill_padding<kThreads>(p, end_row + batch_row * num_slices + slice, p.num_query_rows, gridDim.x * num_slices);
  if (p.num_plan_rows > p.num_batch_rows && batch_row == 0 && slice == 0)
#pragma unroll 1
    for (int r = p.num_batch_rows + tid; r < p.num_plan_rows; r += kThreads) p.plan_count[r] = 0;
  if (request < 0 || num_rows > p.max_query_rows || slice > 0) {
    if (slice == 0 && tid == 0 && exists) p.plan_count[batch_row] = 0;
    if (request < 0)
      fill_padding<kThreads>(p, first_row + slice, last_row, num_slices);
    else if (num_rows > p.max_query_rows)
      translate_rows<kThreads>(p, shape, request, first_row + slice, last_row, num_slices);
    return;
  }
  const int region = p.hot_region[request];
  const int count = num_rows * p.top_k;
  const int64_t first_entry = static_cast<int64_t>(first_row) * p.top_k;
  if (num_rows != 1 || first_row != batch_row) {
    selection = p.topk + first_entry;
    load_entries<E, kVector>(selection, count, position);
  }

  // -- 1. look up --
  const int32_t* resident = p.resident + (static_cast<int64_t>(p.parts[0]) * p.max_requests + request) * p.max_pages;
  const int32_t* host = p.host + static_cast<int64_t>(request) * p.max_pages;
  const int64_t some_region = max(region, 0);
  int16_t* slot_of = p.slot_of + some_region * p.max_positions;
  int32_t* position_of = p.position_of + some_region * p.max_slots;
  int32_t* key_of = p.key + some_region * p.max_slots;

  uint32_t is_real = 0;
  int32_t slot[E];
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const bool real = static_cast<uint32_t>(position[e]) < static_cast<uint32_t>(shape.num_positions);
    is_real |= static_cast<uint32_t>(real) << e;
    position[e] = real ? position[e] : 0;
    slot[e] = region >= 0 ? slot_of[position[e]] : -1;
  }
  int32_t key[S], held[S];  // held: the position in a slot
  const int num_slots = region >= 0 ? p.hot_rows[region] : 0;
  const int clock = region >= 0 ? p.clock[region] + 1 : 0;
  if (region >= 0) {
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < S; i += 4) {
        int4 k = make_int4(INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN), h = make_int4(-1, -1, -1, -1);
        if (first_slot + i < p.max_slots) {
          k = *reinterpret_cast<const int4*>(key_of + first_slot + i);
          h = *reinterpret_cast<const int4*>(position_of + first_slot + i);
        }
        key[i] = k.x, key[i + 1] = k.y, key[i + 2] = k.z, key[i + 3] = k.w;
        held[i] = h.x, held[i + 1] = h.y, held[i + 2] = h.z, held[i + 3] = h.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < S; ++i) {
        key[i] = first_slot + i < p.max_slots ? key_of[first_slot + i] : INT32_MIN;
        held[i] = first_slot + i < p.max_slots ? position_of[first_slot + i] : -1;
      }
    }
  }
  if (Layout::kSharesPages && shape.shared_pages > 0)
    copy_page_tables<kThreads>(resident, host, shape.shared_pages, pages);
  __syncthreads();  // and the rest of shared memory is clear

  int32_t block[E];   // of the page, later of the row
  int32_t offset[E];  // of the row in its block
  uint32_t is_resident = 0, is_wanted = 0, is_miss = 0;
  int place = 0;
  uint32_t is_hosted = 0;
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const int page = shape.block.quotient(position[e]);
    offset[e] = position[e] - page * p.block_size;
    if (Layout::kSharesPages && shape.shared_pages > 0) {
      // Neighbouring entries lie on pages far apart: a gather from global memory would take a cycle an entry and table.
      block[e] = pages[page];
    } else {
      const int32_t host_block = host[page];
      block[e] = resident[page];
      if (block[e] < 0) block[e] = host_block >= 0 ? kOnHost : kNotReadable;
    }
  }
#pragma unroll
  for (int e = 0; e < E; ++e) {
    is_resident |= static_cast<uint32_t>(block[e] >= 0) << e;
    is_hosted |= static_cast<uint32_t>(block[e] == kOnHost) << e;
    is_miss |= static_cast<uint32_t>(slot[e] < 0) << e;
  }
  is_resident &= is_real;
  const uint32_t is_unreadable = is_real & ~is_resident & ~is_hosted;
  is_wanted = num_slots > 0 ? is_real & ~is_resident & is_hosted : 0u;
  is_miss &= is_wanted;
#pragma unroll
  for (int e = 0; e < E; ++e)
    if ((is_wanted & ~is_miss) >> e & 1u) hit_flags[slot[e]] = 1;
  if (__any_sync(kAllLanes, is_unreadable != 0)) {
    const uint32_t unreadable = __reduce_add_sync(kAllLanes, __popc(is_unreadable));
    if (lane == 0) add_counter(p, kUnreadable, unreadable);
  }
  int warp_misses;
  place = small_prefix<E>(__popc(is_miss), lane, warp_misses);
  const uint32_t warp_entries = __reduce_add_sync(
      kAllLanes, static_cast<uint32_t>(__popc(is_resident)) | static_cast<uint32_t>(__popc(is_wanted)) << 16);
  if (lane == 0) entry_summary[warp] = {warp_misses, warp_entries};
  // The range of the slots' ranks. Slots that turn out to be hit widen it a little; an empty slot's rank, 0, does not
  // count. Slots from num_slots on are empty.
  const PolicyStep<kLrfu> step{clock, gain};
  uint32_t distance[S];  // first the rank
  if (region >= 0) {
    uint32_t lowest = UINT32_MAX, highest = 0;
#pragma unroll
    for (int i = 0; i < S; ++i) {
      distance[i] = step.rank(key[i]);
      lowest = min(lowest, distance[i] - 1u);
      highest = max(highest, distance[i]);
    }
    lowest = __reduce_min_sync(kAllLanes, lowest);
    highest = __reduce_max_sync(kAllLanes, highest);
    if (lane == 0) slot_range[warp] = make_uint2(lowest, highest);
  }
  __syncthreads();
  const EntrySummary other = lane < kWarps ? entry_summary[lane] : EntrySummary{0, 0};
  const uint32_t all_entries = __reduce_add_sync(kAllLanes, other.entries);
  const int num_listed = __reduce_add_sync(kAllLanes, other.misses);

  bool counts_by_entry = num_rows > 1;
  uint32_t is_hot = is_wanted;
  int num_hits = 0, num_misses = 0, num_loads = 0;
  if (all_entries >> 16) {
    const int32_t* block_of = p.hot + (static_cast<int64_t>(p.parts[0]) * p.num_regions + region) * p.max_hot_blocks;
    const Misses<Layout> misses{list, hash_table, static_cast<uint32_t>(min(num_listed * 8, Layout::kHashEntries)),
                                selection};
    const int first_place = place + __reduce_add_sync(kAllLanes, lane < warp ? other.misses : 0);

    // -- 2. list the misses; hits' keys --
    if (num_listed > 0) {
      constexpr int kVectorEntries = 16 / sizeof(Entry);
#pragma unroll 1
      for (uint32_t i = tid; i < misses.size / kVectorEntries; i += kThreads)
        reinterpret_cast<uint4*>(hash_table)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    place = first_place;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      if (is_miss >> e & 1u) list[place++] = static_cast<Entry>(Layout::kWide ? tid * E + e : position[e]);
      // The block of a hit's slot: needed at the end, asked for now.
      const bool hit = (is_wanted & ~is_miss) >> e & 1u;
      const int in_blocks = shape.block.quotient(hit ? slot[e] : 0);
      const int32_t slot_block = block_of[in_blocks];
      if (hit) {
        block[e] = slot_block;
        offset[e] = slot[e] - in_blocks * p.block_size;
      }
    }
    uint32_t slot_hit = 0;  // bit i: slot first_slot + i is hit
#pragma unroll
    for (int i = 0; i < S; i += 4)
      slot_hit |= (*reinterpret_cast<const uint32_t*>(hit_flags + first_slot + i) * 0x10204080u >> 28) << i;
    const int own_slots = min(max(num_slots - first_slot, 0), S);
    const uint32_t candidates = ~slot_hit & static_cast<uint32_t>((uint64_t{1} << own_slots) - 1);
#pragma unroll
    for (int i = 0; i < S; ++i)
      if (!(candidates >> i & 1u)) distance[i] = kNoCandidate;
    if (slot_hit) {
      if constexpr (kVector) {
#pragma unroll
        for (int i = 0; i < S; i += 4) {
          int32_t fresh[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) fresh[j] = slot_hit >> (i + j) & 1u ? step.hit(key[i + j]) : key[i + j];
          *reinterpret_cast<int4*>(key_of + first_slot + i) = make_int4(fresh[0], fresh[1], fresh[2], fresh[3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < S; ++i)
          if (slot_hit >> i & 1u) key_of[first_slot + i] = step.hit(key[i]);
      }
    }
    const uint32_t warp_slots = __reduce_add_sync(
        kAllLanes, static_cast<uint32_t>(__popc(candidates)) | static_cast<uint32_t>(__popc(slot_hit)) << 16);
    if (lane == 0) slot_totals[warp] = warp_slots;
    __syncthreads();
    const uint32_t slots = __reduce_add_sync(kAllLanes, lane < kWarps ? slot_totals[lane] : 0u);
    const int num_candidates = slots & 0xffff;
    num_hits = slots >> 16;
    if (tid == 0) p.clock[region] = clock;

    if (num_listed > 0) {
      // -- 3. hash the list, a run of places a thread; histogram the ranks --
      const int run = (num_listed + kThreads - 1) / kThreads;
      const int first_listed = tid * run;
      const int own_listed = min(max(num_listed - first_listed, 0), run);
      int32_t next_wanted = 0, next_host_block = 0;  // what the first of them will need, asked for now
      int16_t next_absent = -1;
      bool met = false;
      if (own_listed > 0) {
        next_wanted = misses.position(first_listed);
        next_host_block = host[shape.block.quotient(next_wanted)];
        if constexpr (kLrfu) next_absent = slot_of[next_wanted];
#pragma unroll 1
        for (int i = 0; i < own_listed; ++i) met |= misses.insert(first_listed + i);
      }
      uint32_t lowest = 0, widest = 0;
      const uint2 range = lane < kWarps ? slot_range[lane] : make_uint2(UINT32_MAX, 0);
      lowest = __reduce_min_sync(kAllLanes, range.x) + 1u;
      widest = rank_distance(__reduce_max_sync(kAllLanes, range.y), lowest);
      const Digit digit(0, 32 - __clz(widest));
#pragma unroll
      for (int i = 0; i < S; ++i)
        if (distance[i] != kNoCandidate) distance[i] = rank_distance(distance[i], lowest);
      count_digit<S, true>(distance, digit, bins);
      const bool repeats = __syncthreads_or(met);

      // -- 4. first occurrences; the threshold --
      uint32_t is_first = static_cast<uint32_t>((uint64_t{1} << own_listed) - 1);
      int ordinal = first_listed;
      num_misses = num_listed;
      sum_bins<kThreads>(bins, bin_totals);
      if (repeats) {
#pragma unroll 1
        for (int i = 0; i < own_listed; ++i)
          if (!misses.is_first(first_listed + i)) is_first &= ~(1u << i);
        int warp_firsts;
        ordinal = small_prefix<E>(__popc(is_first), lane, warp_firsts);
        if (lane == 0) first_totals[warp] = warp_firsts;
      }
      __syncthreads();
      if (repeats) {
        const int firsts = lane < kWarps ? first_totals[lane] : 0;
        num_misses = __reduce_add_sync(kAllLanes, firsts);
        ordinal += __reduce_add_sync(kAllLanes, lane < warp ? firsts : 0);
      }
      num_loads = min(num_misses, num_candidates);

      // -- 5. victims in slot order --
      Threshold threshold{kNoCandidate, 0};
      if (num_loads < num_candidates)
        threshold = find_threshold<kThreads, S>(distance, num_loads, digit, bins, bin_totals);
      uint32_t chosen = 0, tied = 0;
#pragma unroll
      for (int i = 0; i < S; ++i) chosen |= static_cast<uint32_t>(distance[i] < threshold.bound) << i;
      int warp_below, warp_tied = 0, before_tied = 0;
      int rank = small_prefix<S>(__popc(chosen), lane, warp_below);
      if (threshold.ties > 0) {
#pragma unroll
        for (int i = 0; i < S; ++i) tied |= static_cast<uint32_t>(distance[i] == threshold.bound) << i;
        before_tied = small_prefix<S>(__popc(tied), lane, warp_tied);
      }
      if (lane == 0) victim_totals[warp] = static_cast<uint32_t>(warp_below) | static_cast<uint32_t>(warp_tied) << 16;
      __syncthreads();
      const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? victim_totals[lane] : 0u);
      rank += before & 0xffff;
      if (threshold.ties > 0) {
        before_tied += before >> 16;
        rank += min(before_tied, threshold.ties);
#pragma unroll 1
        for (int left = min(threshold.ties - before_tied, __popc(tied)); left > 0; --left, tied &= tied - 1)
          chosen |= tied & -tied;
      }
#pragma unroll
      for (int i = 0; i < S; ++i) {
        if (chosen >> i & 1u) {
          victims[rank++] = static_cast<uint16_t>(first_slot + i);
          if (held[i] >= 0) slot_of[held[i]] = step.absent(key[i]);
        }
      }
      __syncthreads();

      // -- 6. hand out --
      const int64_t plan = static_cast<int64_t>(batch_row) * p.plan_capacity;
#pragma unroll 1
      for (; is_first && ordinal < num_loads; is_first &= is_first - 1, ++ordinal) {
        const int listed = __ffs(is_first) - 1;
        if (listed > 0) {
          next_wanted = misses.position(first_listed + listed);
          next_host_block = host[shape.block.quotient(next_wanted)];
          if constexpr (kLrfu) next_absent = slot_of[next_wanted];
        }
        const int victim = victims[ordinal];
        p.plan_host_row[plan + ordinal] = next_host_block * p.block_size + shape.block.remainder(next_wanted);
        p.plan_slot[plan + ordinal] = victim;
        key_of[victim] = step.loaded(next_absent);
        slot_of[next_wanted] = static_cast<int16_t>(victim);
        position_of[victim] = next_wanted;
      }
      counts_by_entry |= num_loads < num_misses;
      const bool repeated = num_misses < num_listed;
      if (repeated) __syncthreads();  // slot_of is up to date
      place = first_place;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        if (!(is_miss >> e & 1u)) continue;
        slot[e] = repeated ? slot_of[position[e]] : place < num_loads ? victims[place] : -1;
        ++place;
        if (slot[e] >= 0) {
          const int in_blocks = shape.block.quotient(slot[e]);
          block[e] = block_of[in_blocks];
          offset[e] = slot[e] - in_blocks * p.block_size;
        } else {
          is_hot &= ~(1u << e);
        }
      }
    }
  }

  // -- publish --
  const uint32_t is_valid = is_resident | is_hot;
  if (counts_by_entry) {
    add_counts<E>(is_valid, p.top_k, row_count);
    __syncthreads();
    if (tid < num_rows) p.counts[first_row + tid] = row_count[tid];
  }
  if (tid < 4) {
    if (tid == 0) {
      if (!counts_by_entry) p.counts[first_row] = (all_entries & 0xffff) + (all_entries >> 16);
      p.plan_count[batch_row] = num_loads;
    }
    static_assert(kHits == 0 && kMisses == 1 && kResident == 2 && kOverflow == 3);
    const int low = tid & 1 ? num_misses : num_hits;
    const int high = tid & 1 ? num_misses - num_loads : static_cast<int>(all_entries & 0xffff);
    add_counter(p, tid, tid < 2 ? low : high);
  }
  int32_t out[E];
#pragma unroll
  for (int e = 0; e < E; ++e) out[e] = is_valid >> e & 1u ? block[e] * p.block_stride_rows + offset[e] : -1;
  store_entries<E, kVector>(p.rows + first_entry, count, out);
#pragma unroll 1
  for (int part = 1; part < p.num_parts; ++part) {
    const int32_t* page_block =
        p.resident + (static_cast<int64_t>(p.parts[part]) * p.max_requests + request) * p.max_pages;
    const int32_t* slot_block =
        p.hot + (static_cast<int64_t>(p.parts[part]) * p.num_regions + some_region) * p.max_hot_blocks;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const bool here = is_resident >> e & 1u;
      const int row = here ? position[e] : slot[e];
      if (is_valid >> e & 1u)
        out[e] = (here ? page_block : slot_block)[shape.block.quotient(row)] * p.block_stride_rows + offset[e];
    }
    store_entries<E, kVector>(p.rows + static_cast<int64_t>(part) * p.num_query_rows * p.top_k + first_entry, count,
                              out);
  }
}

}  // namespace hisparse::cuda
