// The resolver: selected positions -> physical rows, hot-region upkeep and the plan of misses. One CTA a batch row.
//
// A CTA's way, a barrier after each step:
//   1. ask for all that the batch row's record leads to: the selection, the page tables, the region's keys and, last
//      and longest, slot_of; rank the slots
//   2. look the pages up, then the slots; mark the slots that are hit, write all rows but those of misses, and note
//      whether positions may repeat
//   3. list the misses in selection order; count the other slots of low rank
//   4. where positions may repeat, find their first occurrences (misses.cuh)
//   5. find the victims' threshold (select.cuh); give hits their keys and list the victims in slot order
//   6. hand the i-th victim to the i-th miss; publish
// Nothing depends on the order in which threads run. What it costs is instructions and latencies, not bytes: a CTA
// executes this once, so that the code is kept short, work on misses is done on the list, not on the selection, and
// what does not depend on slot_of is done before it has come. A row without a region ends after step 2's rows.
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/entries.cuh"
#include "hisparse/misses.cuh"
#include "hisparse/params.h"
#include "hisparse/policy.cuh"
#include "hisparse/select.cuh"
#include "hisparse/translate.cuh"

#include <type_traits>

namespace hisparse::cuda {

inline constexpr int kMaxVerifyRows = 64;
inline constexpr int kMaxSharedPages = 8192;  // of page tables copied to shared memory
inline constexpr int kGroupSlots = 16;        // of Summary::limit

// Dynamic shared memory: scratch | list [threads * E] | hash [kHashEntries] | blocks [shared_blocks] int32 | pages
// [shared_pages] int32.
// scratch: first hit flags [threads * S] bytes and bins [kBins] int32, later victims [threads * S] uint16.
// hash: first a bit a position, modulo kSeenBits; last the places of the first occurrences.
// list, hash: of 32 bits each; 16 bits where they would not fit otherwise (kWide).
template <int kThreads, int E, int S>
struct ResolveLayout {
  static constexpr bool kWide = kThreads * E > 8192;
  using Entry = std::conditional_t<kWide, uint16_t, uint32_t>;
  static constexpr Entry kNoEntry = static_cast<Entry>(~0u);
  static constexpr int kFlagBytes = kThreads * S;
  static constexpr int kScratchBytes = kFlagBytes * 2;
  static constexpr int kListBytes = kThreads * E * sizeof(Entry);
  static constexpr int kHashEntries = 2 * kThreads * E < 49152 ? 2 * kThreads * E : 49152;
  static constexpr int kHashBytes = kHashEntries * sizeof(Entry);
  static constexpr int kBytes = kScratchBytes + kListBytes + kHashBytes;
  static constexpr bool kSharesPages = !kWide;
  static constexpr uint32_t kSeenBits = kHashBytes >= 65536 ? 524288 : kHashBytes * 8;
  static_assert((kSeenBits & (kSeenBits - 1)) == 0 && kFlagBytes > kBins * 4 && kSeenBits % (128 * kThreads) == 0);
};

// A warp's part of the look-up.
struct Summary {
  uint32_t misses;
  uint32_t entries;  // resident | wanted << 16
};

// Of the ranks of a warp's slots, those that turn out to be hit included.
struct RankRange {
  uint32_t lowest;   // of a slot in use, less one: an empty slot's rank, 0, does not count
  uint32_t highest;  // of any
  uint32_t limit;    // every kGroupSlots slots have one with at most this rank
};

// E: selection entries a thread, at least max_query_rows * K / kThreads; S: slots a thread, at least max_slots /
// kThreads. kVector: topk, rows, key and position_of and their rows allow 16-byte accesses.
template <int kThreads, int E, int S, bool kLrfu, bool kVector>
__global__ void __launch_bounds__(kThreads, 1)
    resolve_kernel(const __grid_constant__ ResolveParams p, const __grid_constant__ ResolveShape shape) {
  using Layout = ResolveLayout<kThreads, E, S>;
  using Entry = typename Layout::Entry;
  constexpr int kWarps = kThreads / 32;
  constexpr int kGroupLanes = S < kGroupSlots ? kGroupSlots / S : 1;
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ Summary summaries[kWarps];
  __shared__ RankRange rank_ranges[kWarps];
  __shared__ uint32_t slot_totals[kWarps];  // candidates | hits << 16
  __shared__ int first_totals[kWarps];
  __shared__ uint32_t victim_totals[kWarps];
  __shared__ Crossing crossing;
  __shared__ int row_count[kMaxVerifyRows];
  __shared__ uint8_t gain[policy::kNumGains + 1];

  uint8_t* hit_flags = dynamic;
  int* bins = reinterpret_cast<int*>(dynamic + Layout::kFlagBytes);
  uint16_t* victims = reinterpret_cast<uint16_t*>(dynamic);
  Entry* list = reinterpret_cast<Entry*>(dynamic + Layout::kScratchBytes);
  Entry* hash_table = reinterpret_cast<Entry*>(dynamic + Layout::kScratchBytes + Layout::kListBytes);
  uint32_t* seen = reinterpret_cast<uint32_t*>(hash_table);
  uint16_t* firsts = reinterpret_cast<uint16_t*>(hash_table);
  int32_t* blocks = reinterpret_cast<int32_t*>(dynamic + Layout::kBytes);
  int32_t* pages = blocks + (shape.shared_blocks + 3) / 4 * 4;

  int tid = threadIdx.x;
  keep(tid);  // it is asked for everywhere, and reading it again takes a while
  const int lane = tid & 31;
  const int batch_row = blockIdx.x;
  const int warp = tid >> 5;
  const bool is_last_warp = warp == kWarps - 1;
  const int first_slot = tid * S;

  wait_for_dependencies();
  release_dependents();

  // -- which rows; the selection is loaded meanwhile on the guess of one query row a batch row --
  const bool exists = batch_row < p.num_batch_rows;  // without any batch row one CTA still fills the padding
  const BatchRow owner = exists ? load_row(p.batch + batch_row) : BatchRow{-1, -1, 0, 0};
  const int request = owner.request;
  const int first_row = p.query_start[batch_row];
  const int last_row = exists ? p.query_start[batch_row + 1] : first_row;
  const int end_row = p.query_start[p.num_batch_rows];
  const int32_t* selection = p.topk + static_cast<int64_t>(batch_row) * p.top_k;
  int32_t position[E];
  load_entries<E, kVector>(selection, batch_row < p.num_query_rows ? p.top_k : 0, position);
  const int own_gain = kLrfu && tid <= policy::kNumGains ? policy::gain(tid) : 0;
#pragma unroll
  for (int i = 0; i < S; i += 8) *reinterpret_cast<uint2*>(hit_flags + first_slot + i) = make_uint2(0, 0);
  if (tid <= kBins / 4) reinterpret_cast<uint4*>(bins)[tid] = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < Layout::kSeenBits / 128 / kThreads; ++i)
    reinterpret_cast<uint4*>(seen)[i * kThreads + tid] = make_uint4(0, 0, 0, 0);
  if (tid < kMaxVerifyRows) row_count[tid] = 0;

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

  // -- 1. ask for everything --
  const int32_t* resident = resident_blocks(p, 0, request);
  const int32_t* host = p.host + static_cast<int64_t>(request) * p.max_pages;
  PageTables<kThreads> page_tables{resident, host, Layout::kSharesPages ? shape.shared_pages : 0};
  page_tables.load();
  const bool has_region = owner.region >= 0 && owner.num_slots > 0;
  const int region = has_region ? owner.region : 0;
  const int num_slots = has_region ? owner.num_slots : 0;
  const int count = num_rows * p.top_k;
  const int64_t first_entry = static_cast<int64_t>(first_row) * p.top_k;
  if (num_rows != 1 || first_row != batch_row) {
    selection = p.topk + first_entry;
    load_entries<E, kVector>(selection, count, position);
  }
  uint32_t is_real = 0;
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const bool real = static_cast<uint32_t>(position[e]) < static_cast<uint32_t>(shape.num_positions);
    is_real |= static_cast<uint32_t>(real) << e;
    position[e] = real ? position[e] : 0;
  }

  int16_t* slot_of = p.slot_of + static_cast<int64_t>(region) * p.max_positions;
  int32_t* position_of = p.position_of + static_cast<int64_t>(region) * p.max_slots;
  int32_t* key_of = p.key + static_cast<int64_t>(region) * p.max_slots;
  const int32_t* block_of = hot_blocks(p, 0, region);
  int32_t slot[E], key[S];
  int32_t own_block = 0;
  int clock = 0;
  if (has_region) {
    clock = p.clock[region];
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < S; i += 4) {
        int4 k = make_int4(INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN);
        if (first_slot + i < p.max_slots) k = *reinterpret_cast<const int4*>(key_of + first_slot + i);
        key[i] = k.x, key[i + 1] = k.y, key[i + 2] = k.z, key[i + 3] = k.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < S; ++i) key[i] = first_slot + i < p.max_slots ? key_of[first_slot + i] : INT32_MIN;
    }
    if (tid < shape.shared_blocks) own_block = block_of[tid];
  }
  // The gathers take L1 a cycle an entry. While it serves one half of the warps, the other half ranks its slots.
  const auto gather_slots = [&] {
    __syncwarp();
#pragma unroll
    for (int e = 0; e < E; ++e) slot[e] = slot_of[position[e]];
    __syncwarp();
  };
  if (has_region && warp < kWarps / 2) gather_slots();
  if (kLrfu && tid <= policy::kNumGains) gain[tid] = static_cast<uint8_t>(own_gain);
  page_tables.store(pages);
  const PolicyStep<kLrfu> step{clock + 1, gain};
  uint32_t distance[S];  // first the rank
  if (has_region) {
    if (tid < shape.shared_blocks) blocks[tid] = own_block;
    uint32_t lowest = UINT32_MAX, highest = 0, group = UINT32_MAX;
#pragma unroll
    for (int i = 0; i < S; ++i) {
      distance[i] = step.rank(key[i]);
      lowest = min(lowest, distance[i] - 1u);
      highest = max(highest, distance[i]);
      group = min(group, first_slot + i < num_slots ? distance[i] : UINT32_MAX);
    }
#pragma unroll
    for (int other = 1; other < kGroupLanes; other <<= 1) group = min(group, __shfl_xor_sync(kAllLanes, group, other));
#pragma unroll
    for (int i = 0; i < S; ++i) keep(distance[i]);
    lowest = __reduce_min_sync(kAllLanes, lowest);
    highest = __reduce_max_sync(kAllLanes, highest);
    const uint32_t limit = __reduce_max_sync(kAllLanes, group == UINT32_MAX ? 0u : group);
    if (lane == 0) rank_ranges[warp] = {lowest, highest, limit};
    if (warp >= kWarps / 2) gather_slots();
  }
  __syncthreads();  // and the rest of shared memory is clear

  // -- 2. pages --
  int32_t row[E];
  uint32_t is_resident = 0, is_hosted = 0;
#pragma unroll
  for (int e = 0; e < E; ++e) row[e] = shape.block.quotient(position[e]);
  int32_t block[E];
  // Neighbouring entries lie on pages far apart: a gather from global memory would take a cycle an entry and table.
  if (Layout::kSharesPages && shape.shared_pages > 0) {
#pragma unroll
    for (int e = 0; e < E; ++e) block[e] = pages[row[e]];
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e) block[e] = page_state(resident[row[e]], host[row[e]]);
  }
#pragma unroll
  for (int e = 0; e < E; ++e) {
    is_resident |= static_cast<uint32_t>(block[e] >= 0) << e;
    is_hosted |= static_cast<uint32_t>(block[e] == kOnHost) << e;
    row[e] = block[e] * p.block_stride_rows + (position[e] - row[e] * p.block_size);
  }
  is_resident &= is_real;
  is_hosted &= is_real;
#pragma unroll
  for (int e = 0; e < E; ++e) row[e] = is_resident >> e & 1u ? row[e] : -1;
  const uint32_t is_wanted = has_region ? is_hosted : 0u;
  if (__any_sync(kAllLanes, (is_real & ~is_resident & ~is_hosted) != 0)) {
    const uint32_t unreadable = __reduce_add_sync(kAllLanes, __popc(is_real & ~is_resident & ~is_hosted));
    if (lane == 0) add_counter(p, kUnreadable, unreadable);
  }
  Summary own{0, __reduce_add_sync(kAllLanes, static_cast<uint32_t>(__popc(is_resident)) |
                                                  static_cast<uint32_t>(__popc(is_wanted)) << 16)};

  // -- slots; a warp that wants none does not wait for them --
  const bool is_single = num_rows == 1;
  int32_t* rows = p.rows + first_entry;
  uint32_t is_hit = 0, is_miss = 0, seen_before[E] = {};
  int place = 0;
  RankRange ranks{UINT32_MAX, 0, 0};
  uint32_t lowest = 0;
  Digit low_ranks{};
  if (has_region) {
    if (lane < kWarps) ranks = rank_ranges[lane];
    lowest = __reduce_min_sync(kAllLanes, ranks.lowest) + 1u;
    low_ranks = Digit::of(0, rank_distance(__reduce_max_sync(kAllLanes, ranks.limit), lowest));
    if (__any_sync(kAllLanes, is_wanted != 0)) {
#pragma unroll
      for (int e = 0; e < E; ++e) is_miss |= static_cast<uint32_t>(slot[e] < 0) << e;
      is_miss &= is_wanted;
      is_hit = is_wanted & ~is_miss;
#pragma unroll
      for (int e = 0; e < E; ++e)
        if (is_hit >> e & 1u) hit_flags[slot[e]] = 1;
      int32_t in_blocks[E];
#pragma unroll
      for (int e = 0; e < E; ++e) in_blocks[e] = shape.block.quotient(is_hit >> e & 1u ? slot[e] : 0);
      if (shape.shared_blocks > 0) {
#pragma unroll
        for (int e = 0; e < E; ++e) block[e] = blocks[in_blocks[e]];
      } else {
#pragma unroll
        for (int e = 0; e < E; ++e) block[e] = block_of[in_blocks[e]];
      }
#pragma unroll
      for (int e = 0; e < E; ++e)
        if (is_hit >> e & 1u) row[e] = block[e] * p.block_stride_rows + (slot[e] - in_blocks[e] * p.block_size);
      int warp_misses;
      place = small_prefix<E>(__popc(is_miss), lane, warp_misses);
      own.misses = warp_misses;
      if (is_single) {  // several query rows repeat each other, so that they are compared in any case
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const bool miss = is_miss >> e & 1u;
          const uint32_t word = static_cast<uint32_t>(position[e]) % Layout::kSeenBits / 32;
          const uint32_t bit = miss ? 1u << (position[e] & 31) : 0u;  // without a branch
          seen_before[e] = atomicOr(&seen[miss ? word : lane], bit);
        }
      }
    }
  }
  store_entries<E, kVector>(rows, count, row);
  for (int part = 1; part < p.num_parts; ++part)
    store_part<E, kVector>(p, shape, part, request, region, first_entry, count, is_resident, is_hit, position, slot);
  if (lane == 0) summaries[warp] = own;
  __syncthreads();
  const Summary other = lane < kWarps ? summaries[lane] : Summary{0, 0};
  const uint32_t all_entries = __reduce_add_sync(kAllLanes, other.entries);
  bool counts_by_entry = !is_single;
  uint32_t is_hot = is_wanted;
  int num_hits = 0, num_misses = 0, num_loads = 0;
  if (all_entries >> 16) {
    const int num_listed = __reduce_add_sync(kAllLanes, other.misses);
    const Misses<Layout> misses{list, hash_table, static_cast<uint32_t>(min(num_listed * 8, Layout::kHashEntries)),
                                selection};
    const int first_place = place + __reduce_add_sync(kAllLanes, lane < warp ? other.misses : 0);

    // -- 3. list the misses; count the low ranks --
    place = first_place;
#pragma unroll
    for (int e = 0; e < E; ++e)
      if (is_miss >> e & 1u) list[place++] = static_cast<Entry>(Layout::kWide ? tid * E + e : position[e]);
    uint32_t slot_hit = 0;  // bit i: slot first_slot + i is hit
#pragma unroll
    for (int i = 0; i < S; i += 4)
      slot_hit |= (*reinterpret_cast<const uint32_t*>(hit_flags + first_slot + i) * 0x10204080u >> 28) << i;
    const int own_slots = min(max(num_slots - first_slot, 0), S);
    const uint32_t candidates = ~slot_hit & static_cast<uint32_t>((uint64_t{1} << own_slots) - 1);
#pragma unroll
    for (int i = 0; i < S; ++i) distance[i] = candidates >> i & 1u ? rank_distance(distance[i], lowest) : kNoCandidate;
    if (num_listed > 0 && !is_single) clear_table<kThreads>(misses);
    if (num_listed > 0) count_digit<S>(distance, low_ranks, bins);
    const uint32_t warp_slots = __reduce_add_sync(
        kAllLanes, static_cast<uint32_t>(__popc(candidates)) | static_cast<uint32_t>(__popc(slot_hit)) << 16);
    if (lane == 0) slot_totals[warp] = warp_slots;
    uint32_t met = 0;
#pragma unroll
    for (int e = 0; e < E; ++e) met |= seen_before[e] >> (position[e] & 31) & is_miss >> e;
    const bool compares = __syncthreads_or(met & 1u) || !is_single;
    const uint32_t slots = __reduce_add_sync(kAllLanes, lane < kWarps ? slot_totals[lane] : 0u);
    const int num_candidates = slots & 0xffff;
    num_hits = slots >> 16;
    if (is_last_warp && lane == 0) p.clock[region] = step.clock;

    // -- 4. where positions may repeat: places of the first occurrences --
    num_misses = num_listed;
    if (compares && num_listed > 0)
      num_misses = find_firsts<kThreads, E>(misses, num_listed, !is_single, first_totals, firsts);
    num_loads = min(num_misses, num_candidates);

    // -- 5. victims in slot order; one warp looks for their threshold, others would hold it up --
    if (warp == 0 && num_listed > 0) find_digit(bins, num_misses, &crossing);  // of use if there are more candidates
    if (num_listed > 0) __syncthreads();
    // -- hits' keys; from here on all warps work, where one has looked for the threshold --
    int32_t touched[S];  // of all slots, so that what they look up comes at once and without branches
#pragma unroll
    for (int i = 0; i < S; ++i) touched[i] = step.hit(key[i]);
#pragma unroll
    for (int i = 0; i < S; ++i) keep(touched[i]);
#pragma unroll
    for (int i = 0; i < S; ++i) touched[i] = slot_hit >> i & 1u ? touched[i] : key[i];
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < S; i += 4)  // no slot behind the region is hit
        if (slot_hit >> i & 15u)
          *reinterpret_cast<int4*>(key_of + first_slot + i) =
              make_int4(touched[i], touched[i + 1], touched[i + 2], touched[i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < S; ++i)
        if (slot_hit >> i & 1u) key_of[first_slot + i] = touched[i];
    }
    if (num_listed > 0) {
      Threshold threshold{kNoCandidate, 0};
      if (num_loads < num_candidates) {
        const auto highest = [&] { return rank_distance(__reduce_max_sync(kAllLanes, ranks.highest), lowest); };
        threshold = find_threshold<kThreads, S>(distance, num_loads, low_ranks, highest, bins, &crossing);
      }
      uint32_t chosen = 0, tied = 0;
#pragma unroll
      for (int i = 0; i < S; ++i) {
        chosen |= static_cast<uint32_t>(distance[i] < threshold.bound) << i;
        tied |= static_cast<uint32_t>(distance[i] == threshold.bound) << i;
      }
      if (threshold.ties == 0) tied = 0;
      // below | tied << 16
      const uint32_t own_victims = static_cast<uint32_t>(__popc(chosen)) | static_cast<uint32_t>(__popc(tied)) << 16;
      const uint32_t victims_end = inclusive_prefix(own_victims, lane);
      if (lane == 31) victim_totals[warp] = victims_end;
      __syncthreads();
      const uint32_t before =
          __reduce_add_sync(kAllLanes, lane < warp ? victim_totals[lane] : 0u) + victims_end - own_victims;
      const int before_tied = before >> 16;
      int ordinal = (before & 0xffff) + min(before_tied, threshold.ties);
#pragma unroll 1
      for (int left = min(threshold.ties - before_tied, __popc(tied)); left > 0; --left, tied &= tied - 1)
        chosen |= tied & -tied;
#pragma unroll 1
      for (; chosen; chosen &= chosen - 1) victims[ordinal++] = static_cast<uint16_t>(first_slot + __ffs(chosen) - 1);
      __syncthreads();

      // -- 6. hand out: the i-th victim to the i-th miss --
      const bool repeated = num_misses < num_listed;
      const auto store_misses = [&] {
        place = first_place;
#pragma unroll 1
        for (uint32_t left = is_miss; left; left &= left - 1, ++place) {
          const int e = __ffs(left) - 1;
          const int loaded = repeated ? slot_of[misses.position(place)] : place < num_loads ? victims[place] : -1;
          if (loaded < 0) {
            is_hot &= ~(1u << e);
            continue;
          }
          const int in_blocks = shape.block.quotient(loaded), in_block = loaded - in_blocks * p.block_size;
          const int32_t slot_block = shape.shared_blocks > 0 ? blocks[in_blocks] : block_of[in_blocks];
          rows[tid * E + e] = slot_block * p.block_stride_rows + in_block;
#pragma unroll 1
          for (int part = 1; part < p.num_parts; ++part)
            rows[static_cast<int64_t>(part) * p.num_query_rows * p.top_k + tid * E + e] =
                hot_blocks(p, part, region)[in_blocks] * p.block_stride_rows + in_block;
        }
      };
      const int64_t plan = static_cast<int64_t>(batch_row) * p.plan_capacity;
      struct Load {
        int32_t wanted, page, host_block, held, old_key;
        int16_t victim, absent;
      };
      const auto look_at = [&](int i) {
        Load load;
        load.victim = static_cast<int16_t>(victims[i]);
        load.held = position_of[load.victim];
        load.old_key = key_of[load.victim];
        load.wanted = misses.position(compares ? firsts[i] : i);
        load.absent = kLrfu ? slot_of[load.wanted] : -1;
        load.page = shape.block.quotient(load.wanted);
        load.host_block = host[load.page];
        return load;
      };
      const auto settle = [&](int i, const Load& load) {
        p.plan_host_row[plan + i] = load.host_block * p.block_size + (load.wanted - load.page * p.block_size);
        p.plan_slot[plan + i] = load.victim;
        key_of[load.victim] = step.loaded(load.absent);
        position_of[load.victim] = load.wanted;
        slot_of[load.wanted] = load.victim;
        if (load.held >= 0) slot_of[load.held] = step.absent(load.old_key);
      };
      Load first{};
      if (tid < num_loads) first = look_at(tid);
      if (!repeated) store_misses();  // while what the first loads give way to is on its way
      if (tid < num_loads) settle(tid, first);
#pragma unroll 1
      for (int i = tid + kThreads; i < num_loads; i += kThreads) settle(i, look_at(i));
      counts_by_entry |= num_loads < num_misses;
      if (repeated) __syncthreads();  // slot_of is up to date
      if (repeated) store_misses();
    }
  }

  // -- publish; the first warps are those that still hand out --
  const uint32_t is_valid = is_resident | is_hot;
  if (counts_by_entry) {
    add_counts<E>(is_valid, p.top_k, row_count);
    __syncthreads();
    if (tid < num_rows) p.counts[first_row + tid] = row_count[tid];
  }
  if (is_last_warp && lane < 4) {
    if (lane == 0) {
      if (!counts_by_entry) p.counts[first_row] = (all_entries & 0xffff) + (all_entries >> 16);
      p.plan_count[batch_row] = num_loads;
    }
    static_assert(kHits == 0 && kMisses == 1 && kResident == 2 && kOverflow == 3);
    const int low = lane & 1 ? num_misses : num_hits;
    const int high = lane & 1 ? num_misses - num_loads : static_cast<int>(all_entries & 0xffff);
    add_counter(p, lane, lane < 2 ? low : high);
  }
}

}  // namespace hisparse::cuda
