// Moves planned misses from host memory into hot slots, for all layers of an index group in one contiguous read a miss.
//
// The kernel is launched to run beside the resolver that it depends on. What the resolver reads is final by then, what
// it writes is not: so every CTA looks up a chunk of the selection by itself, and its warps ask for the host rows of
// what seems to miss before the resolver has ended. Then the plan says which of them go where, what else of the chunk
// is to be read, and what the batch rows want whose selection was not looked up.
//
// Nothing follows from `slot_of` as it is read early, at an unknown moment of the resolver's work, but that a row is
// asked for: a row's bytes are those of its position whatever it said, and they are stored only if the plan has its
// slot. So nothing needs the two kernels to overlap.
#pragma once

#include "hisparse/row.cuh"

namespace hisparse::cuda {

inline constexpr int kFetchWarps = 16;  // that move rows
inline constexpr int kPlanWarps = 4;    // that read the plan
inline constexpr int kPlanThreads = kPlanWarps * 32;
inline constexpr int kFetchThreads = (kFetchWarps + kPlanWarps) * 32;
inline constexpr int kMaxChunk = kFetchWarps * 32;
inline constexpr int kMaxEarlyRows = 32;  // one lane each

// What the launcher derives from FetchParams.
struct FetchShape {
  Divider block;          // by block_size
  int32_t num_positions;  // max_pages * block_size
  int32_t early_rows;     // so many batch rows are looked up early, at most kMaxEarlyRows and R
  int32_t num_chunks;     // CTAs that share one of them
  int32_t chunk;          // entries of the selection each, at most kMaxChunk
};

// Rows of the chunk's selection, and where they go.
struct Chunk {
  int2 early[kPlanThreads];            // asked for early: position, host row
  int2 others[kMaxChunk];              // wanted but not asked for: position, host row
  int early_slot[kPlanThreads];        // of `early`; -1: the plan does not have it
  int2 late[kMaxChunk];                // planned but not asked for: host row, slot
  uint32_t is_loaded[kMaxSlots / 32];  // bit s: the plan has slot s
  int num_predicted, num_others, num_late;
};

// The place of every lane whose flag is set, in a list in shared memory that has `length` entries so far.
__device__ __forceinline__ int append(int* length, bool flag, int lane) {
  const unsigned votes = __ballot_sync(kAllLanes, flag);
  int place = 0;
  if (lane == 0 && votes != 0) place = atomicAdd(length, __popc(votes));
  return __shfl_sync(kAllLanes, place, 0) + __popc(votes & lanes_below(lane));
}

// An entry a thread: what it wants from the host, and whether that seems to miss.
__device__ __forceinline__ void look_up(const FetchParams& p, const FetchShape& shape, Chunk& chunk, int capacity,
                                        const BatchRow& row, int position, int lane) {
  bool is_wanted = false, is_missing = false;
  int host_row = 0;
  if (static_cast<uint32_t>(position) < static_cast<uint32_t>(shape.num_positions)) {
    const int page = shape.block.quotient(position);
    const int64_t table = static_cast<int64_t>(p.part) * p.max_requests + row.request;
    const int block = load_current(p.resident + table * p.max_pages + page);
    const int host_block = load_current(p.host + static_cast<int64_t>(row.request) * p.max_pages + page);
    const int slot = load_current(p.slot_of + static_cast<int64_t>(row.region) * p.max_positions + position);
    host_row = host_block * p.block_size + position - page * p.block_size;
    is_wanted = block < 0 && host_block >= 0;
    is_missing = is_wanted && slot < 0 && row.num_slots > 0;
  }
  const int place = append(&chunk.num_predicted, is_missing, lane);
  const bool is_asked_for = is_missing && place < capacity;
  const int other = append(&chunk.num_others, is_wanted && !is_asked_for, lane);
  if (is_asked_for)
    chunk.early[place] = make_int2(position, host_row);
  else if (is_wanted)
    chunk.others[other] = make_int2(position, host_row);
}

// Where a plan thread looks when the plan is there: what of `slot_of` belongs to its entries of the chunk; null: none.
struct PlanEntries {
  const int16_t* early;
  const int16_t* other[kMaxChunk / kPlanThreads];
};

// By the plan threads, before the resolver has ended: whatever needs no plan.
__device__ __forceinline__ PlanEntries prepare_plans(const FetchParams& p, Chunk& chunk, int region, int num_early,
                                                     int thread) {
  const int num_others = region >= 0 ? chunk.num_others : 0;
  const int16_t* slot_of = p.slot_of + static_cast<int64_t>(region) * p.max_positions;
  PlanEntries entries;
  entries.early = thread < num_early ? slot_of + chunk.early[thread].x : nullptr;
#pragma unroll
  for (int i = 0; i < kMaxChunk / kPlanThreads; ++i) {
    const int other = thread + i * kPlanThreads;
    entries.other[i] = other < num_others ? slot_of + chunk.others[other].x : nullptr;
  }
  chunk.early_slot[thread] = -1;
  return entries;
}

// By the plan threads, after the resolver has ended: the running sum of the plans, without those of the batch rows in
// `is_early`, and what of the chunk the plan of its batch row has. A position that the plan has loaded is where
// `slot_of` says, and the plan has that slot; any other slot is a hit's. Passes one barrier of the CTA.
__device__ __forceinline__ void read_plans(const FetchParams& p, Chunk& chunk, const PlanEntries& entries,
                                           int batch_row, int region, uint32_t is_early, int32_t* plan_end,
                                           int* warp_total, int thread) {
  const int lane = thread & 31, warp = thread >> 5;

  // -- ask for the chunk's part: all at once, the plan's first slots before their number is known --
  constexpr int kOthers = kMaxChunk / kPlanThreads, kGuessed = 4;
  const int32_t* slots = p.plan_slot + static_cast<int64_t>(batch_row) * p.plan_capacity;
  int num_loaded = 0, slot[kGuessed], early_slot = -1, other_slot[kOthers];
  if (region >= 0) {
    num_loaded = load_current(p.plan_count + batch_row);
    if (entries.early != nullptr) early_slot = load_current(entries.early);
#pragma unroll
    for (int i = 0; i < kGuessed; ++i)
      slot[i] = load_current(slots + min(thread + i * kPlanThreads, p.plan_capacity - 1));
#pragma unroll
    for (int i = 0; i < kOthers; ++i) other_slot[i] = entries.other[i] != nullptr ? load_current(entries.other[i]) : -1;
  }

  // -- sum a run of batch rows a thread; collect the chunk's slots --
  const int run = (p.num_batch_rows + kPlanThreads - 1) / kPlanThreads;
  const int first_row = thread * run, last_row = min(first_row + run, p.num_batch_rows);
  int own = 0;
#pragma unroll 1
  for (int row = first_row; row < last_row; ++row) {
    const bool is_done = row < kMaxEarlyRows && is_early >> row & 1u;
    plan_end[row] = own += is_done ? 0 : load_current(p.plan_count + row);
  }
  const int own_end = inclusive_prefix(own, lane);
  if (lane == 31) warp_total[warp] = own_end;
  const auto collect = [&](int s) { atomicOr(&chunk.is_loaded[s >> 5], 1u << (s & 31)); };
  if (num_loaded > 0) {
#pragma unroll
    for (int i = 0; i < kGuessed; ++i)
      if (thread + i * kPlanThreads < num_loaded) collect(slot[i]);
#pragma unroll 1
    for (int i = thread + kGuessed * kPlanThreads; i < num_loaded; i += kPlanThreads) collect(load_current(slots + i));
  }
  __syncthreads();
  const int before = own_end - own + __reduce_add_sync(kAllLanes, lane < warp ? warp_total[lane] : 0);
#pragma unroll 1
  for (int row = first_row; row < last_row; ++row) plan_end[row] += before;
  if (num_loaded == 0) return;

  // -- what goes where --
  const auto has = [&](int s) { return s >= 0 && (chunk.is_loaded[s >> 5] >> (s & 31) & 1u); };
  if (has(early_slot)) chunk.early_slot[thread] = early_slot;
#pragma unroll
  for (int i = 0; i < kOthers; ++i)
    if (has(other_slot[i]))
      chunk.late[atomicAdd(&chunk.num_late, 1)] = make_int2(chunk.others[thread + i * kPlanThreads].y, other_slot[i]);
}

// Dynamic shared memory: plan_end [R] int32.
//
// CTA c has chunk c % num_chunks of batch row c / num_chunks, if that is looked up early: an entry a thread. A moving
// warp asks for up to kEarly rows of the list of misses and keeps them in registers. Meanwhile the plan warps wait for
// the plan: they are others than those that move, since a warp that reads on while rows are on their way to it waits
// for them (rows and other loads share its few scoreboards).
//
// The plans of the other batch rows form one list, by a running sum that every CTA builds; moving warp w takes rows w,
// w + W, ... of it. Lanes look up 32 of the warp's rows at once, then the warp moves them one after another.
//
// kEarly: 0 where a row does not fit into kPieces pieces a lane.
template <int kPieces, int kEarly>
__global__ void __launch_bounds__(kFetchThreads, 1)
    fetch_kernel(const __grid_constant__ FetchParams p, const __grid_constant__ FetchShape shape) {
  extern __shared__ __align__(16) int32_t plan_end[];
  __shared__ int warp_total[kPlanWarps];
  __shared__ Chunk chunk;
  __shared__ Piece place_of[kEarly > 0 ? 32 * kPieces : 1];  // of the pieces of the chunk's rows
  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int warp = tid >> 5;
  const bool is_mover = warp < kFetchWarps;
  const int pieces = p.row_bytes / 16 * p.num_layers;
  const int64_t host_row_bytes = static_cast<int64_t>(pieces) * 16;
  constexpr int capacity = kFetchWarps * kEarly;  // of chunk.early
  static_assert(kFetchWarps * kEarly <= kPlanThreads);

  // -- before the resolver has ended: look up the chunk --
  int region = -1;  // of the chunk, -1: there is none
  const int batch_row = shape.early_rows > 0 ? blockIdx.x / shape.num_chunks : 0;
  uint32_t is_early = 0;  // bit r: batch row r is looked up early
  if constexpr (kEarly > 0) {
    const int first_entry = (blockIdx.x - batch_row * shape.num_chunks) * shape.chunk;
    const bool has_chunk = batch_row < shape.early_rows && first_entry < p.top_k;
    BatchRow row = has_chunk ? load_row(p.batch + batch_row) : BatchRow{-1, -1, 0, 0};
    int query_row = 0;
    bool is_single = false;  // more query rows would have the same positions read more than once
    if (lane < shape.early_rows) {
      query_row = load_current(p.query_start + lane);
      is_single = load_current(p.query_start + lane + 1) == query_row + 1;
    }
    is_early = __ballot_sync(kAllLanes, is_single);
    query_row = __shfl_sync(kAllLanes, query_row, batch_row);
    if (!(is_early >> batch_row & 1u)) row.request = -1;
    int position = -1;
    if (row.request >= 0) {
      const int entry = first_entry + tid;
      region = row.region;
      if (tid < shape.chunk && entry < p.top_k)
        position = load_current(p.topk + static_cast<int64_t>(query_row) * p.top_k + entry);
    }
    if (tid == 0) chunk.num_predicted = chunk.num_others = chunk.num_late = 0;
    for (int i = tid; i < kMaxSlots / 32; i += kFetchThreads) chunk.is_loaded[i] = 0;
    __syncthreads();
    if (region >= 0 && is_mover) look_up(p, shape, chunk, capacity, row, position, lane);
    __syncthreads();
    if (region >= 0 && chunk.num_predicted + chunk.num_others == 0) region = -1;  // all resident: nothing is planned
  }

  // -- ask for what seems to miss; read the plan --
  const int num_early = kEarly > 0 && region >= 0 ? min(chunk.num_predicted, capacity) : 0;
  RowPart<kPieces> early[kEarly > 0 ? kEarly : 1];
  if (is_mover) {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      const int listed = warp + i * kFetchWarps;
      if (listed < num_early) early[i].load(p.group_host + chunk.early[listed].y * host_row_bytes, 0, pieces, lane);
    }
    wait_for_dependencies();
    release_dependents();
    __syncthreads();  // that of read_plans, passed with rows on their way; why it is one of all: docs/kernel.md
  } else {
    const int thread = tid - kFetchWarps * 32;
    const PlanEntries entries = prepare_plans(p, chunk, region, num_early, thread);
    if (kEarly > 0 && region >= 0)
#pragma unroll 1
      for (int i = thread; i < pieces; i += kPlanThreads) place_of[i] = find_piece(p, region, i);
    wait_for_dependencies();
    release_dependents();
    read_plans(p, chunk, entries, batch_row, region, is_early, plan_end, warp_total, thread);
  }
  __syncthreads();
  if (!is_mover) return;

  // -- the chunk's rows --
  if constexpr (kEarly > 0) {
    if (region >= 0) {
      if (warp < num_early) {  // where they go is looked up for all of them at once, without branches
        const auto find = [&](int piece) { return place_of[piece]; };
        int slot[kEarly];
#pragma unroll
        for (int i = 0; i < kEarly; ++i) {
          const int listed = warp + i * kFetchWarps;
          slot[i] = listed < num_early ? chunk.early_slot[listed] : -1;
          early[i].look_up(p, shape.block, find, max(slot[i], 0), 0, pieces, lane);
        }
#pragma unroll
        for (int i = 0; i < kEarly; ++i)
          if (slot[i] >= 0) early[i].store(p, shape.block, find, slot[i], 0, pieces, lane);
      }
#pragma unroll 1
      for (int i = warp; i < chunk.num_late; i += kFetchWarps) {
        const int2 row = chunk.late[i];
        move_row<kPieces>(p, shape.block, p.group_host + row.x * host_row_bytes, region, row.y, pieces, lane);
      }
    }
  }

  // -- the list --
  const int num_planned = plan_end[p.num_batch_rows - 1];
  const int num_warps = gridDim.x * kFetchWarps;
  const int first = blockIdx.x * kFetchWarps + warp;  // neighbours in the list go to one CTA
#pragma unroll 1
  for (int64_t base = first; base < num_planned; base += static_cast<int64_t>(num_warps) * 32) {
    // -- look up row base + lane * num_warps --
    const int64_t mine = base + static_cast<int64_t>(lane) * num_warps;
    int32_t list_row = 0, slot = 0, list_region = 0;
    if (mine < num_planned) {
      int low = 0, high = p.num_batch_rows - 1;  // the first batch row whose plan ends after `mine`
      while (low < high) {
        const int middle = (low + high) >> 1;
        if (plan_end[middle] > mine)
          high = middle;
        else
          low = middle + 1;
      }
      const int64_t at = static_cast<int64_t>(low) * p.plan_capacity + mine - (low > 0 ? plan_end[low - 1] : 0);
      list_row = p.plan_host_row[at];
      slot = p.plan_slot[at];
      list_region = p.batch[low].region;
    }
    const int todo = static_cast<int>(min(static_cast<int64_t>(32), (num_planned - base + num_warps - 1) / num_warps));
#pragma unroll 1
    for (int i = 0; i < todo; ++i) {
      const uint8_t* source = p.group_host + __shfl_sync(kAllLanes, list_row, i) * host_row_bytes;
      move_row<kPieces>(p, shape.block, source, __shfl_sync(kAllLanes, list_region, i), __shfl_sync(kAllLanes, slot, i),
                        pieces, lane);
    }
  }
}

}  // namespace hisparse::cuda
