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

#include "hisparse/device.cuh"
#include "hisparse/params.h"

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

// A warp's share of a row, kPieces times 16 bytes a lane from piece `begin` on.
template <int kPieces>
struct RowPart {
  uint4 data[kPieces];

  __device__ __forceinline__ void load(const uint8_t* host_row, int begin, int pieces, int lane) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int piece = begin + 32 * c + lane;
      if (piece < pieces) data[c] = load_once(host_row + piece * 16);
    }
  }

  __device__ __forceinline__ void store(const FetchParams& p, const Divider& block_size, int region, int slot,
                                        int begin, int pieces, int lane) const {
    const int row_pieces = p.row_bytes / 16;
    const int slot_block = block_size.quotient(slot);
    const int64_t in_block = static_cast<int64_t>(slot - slot_block * block_size.divisor) * p.row_bytes;
    uint8_t* target[kPieces];
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int piece = min(begin + 32 * c + lane, pieces - 1);
      const int layer = piece / row_pieces;
      const int64_t table = static_cast<int64_t>(p.layer_part[layer]) * p.num_regions + region;
      const int64_t block = p.hot[table * p.max_hot_blocks + slot_block];
      target[c] =
          p.pool + block * p.block_stride_bytes + p.layer_offset[layer] + in_block + (piece - layer * row_pieces) * 16;
    }
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
      if (begin + 32 * c + lane < pieces) *reinterpret_cast<uint4*>(target[c]) = data[c];
  }
};

// A warp moves one row. Where it goes is looked up while it is on its way.
template <int kPieces>
__device__ __forceinline__ void move_row(const FetchParams& p, const Divider& block_size, const uint8_t* host_row,
                                         int region, int slot, int pieces, int lane) {
#pragma unroll 1
  for (int begin = 0; begin < pieces; begin += 32 * kPieces) {
    RowPart<kPieces> part;
    part.load(host_row, begin, pieces, lane);
    part.store(p, block_size, region, slot, begin, pieces, lane);
  }
}

// A row to be read: of the chunk's selection, and where it goes.
struct Chunk {
  int2 early[kMaxChunk];               // asked for early: position, host row
  int2 others[kMaxChunk];              // wanted but not asked for: position, host row
  int early_slot[kMaxChunk];           // of `early`; -1: the plan does not have it
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
                                        int request, int region, int position, int lane) {
  bool is_wanted = false, is_missing = false;
  int host_row = 0;
  if (static_cast<uint32_t>(position) < static_cast<uint32_t>(shape.num_positions)) {
    const int page = shape.block.quotient(position);
    const int64_t table = static_cast<int64_t>(p.part) * p.max_requests + request;
    const int block = load_current(p.resident + table * p.max_pages + page);
    const int host_block = load_current(p.host + static_cast<int64_t>(request) * p.max_pages + page);
    const int slot = load_current(p.slot_of + static_cast<int64_t>(region) * p.max_positions + position);
    const int num_slots = load_current(p.hot_rows + region);
    host_row = host_block * p.block_size + position - page * p.block_size;
    is_wanted = block < 0 && host_block >= 0;
    is_missing = is_wanted && slot < 0 && num_slots > 0;
  }
  const int place = append(&chunk.num_predicted, is_missing, lane);
  const bool is_asked_for = is_missing && place < capacity;
  const int other = append(&chunk.num_others, is_wanted && !is_asked_for, lane);
  if (is_asked_for)
    chunk.early[place] = make_int2(position, host_row);
  else if (is_wanted)
    chunk.others[other] = make_int2(position, host_row);
}

// By the plan threads, after the resolver has ended: the running sum of the plans, without those of the batch rows in
// `is_early`, and what of the chunk the plan of its batch row has. A position that the plan has loaded is where
// `slot_of` says, and the plan has that slot; any other slot is a hit's.
__device__ __forceinline__ void read_plans(const FetchParams& p, Chunk& chunk, int batch_row, int region, int capacity,
                                           uint32_t is_early, int32_t* plan_end, int* warp_total, int thread) {
  const int lane = thread & 31, warp = thread >> 5;

  // -- ask for the chunk's part: all at once, the plan's first slots before their number is known --
  constexpr int kOthers = kMaxChunk / kPlanThreads;
  const int32_t* slots = p.plan_slot + static_cast<int64_t>(batch_row) * p.plan_capacity;
  int num_early = 0, num_loaded = 0, slot = 0, early_slot = -1, other_slot[kOthers];
  if (region >= 0) {
    const int16_t* slot_of = p.slot_of + static_cast<int64_t>(region) * p.max_positions;
    const int num_others = chunk.num_others;
    num_early = min(chunk.num_predicted, capacity);
    slot = load_current(slots + min(thread, p.plan_capacity - 1));
    num_loaded = load_current(p.plan_count + batch_row);
    if (thread < num_early) early_slot = load_current(slot_of + chunk.early[thread].x);
#pragma unroll
    for (int i = 0; i < kOthers; ++i) {
      const int other = thread + i * kPlanThreads;
      other_slot[i] = other < num_others ? load_current(slot_of + chunk.others[other].x) : -1;
    }
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
  if (thread < num_loaded) atomicOr(&chunk.is_loaded[slot >> 5], 1u << (slot & 31));
#pragma unroll 1
  for (int i = thread + kPlanThreads; i < num_loaded; i += kPlanThreads) {
    const int next = load_current(slots + i);
    atomicOr(&chunk.is_loaded[next >> 5], 1u << (next & 31));
  }
  partial_barrier<1, kPlanThreads>();
  const int before = own_end - own + __reduce_add_sync(kAllLanes, lane < warp ? warp_total[lane] : 0);
#pragma unroll 1
  for (int row = first_row; row < last_row; ++row) plan_end[row] += before;

  // -- what goes where --
  if (region < 0) return;
  const auto has = [&](int s) { return s >= 0 && (chunk.is_loaded[s >> 5] >> (s & 31) & 1u); };
  if (thread < num_early) chunk.early_slot[thread] = has(early_slot) ? early_slot : -1;
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
    int request = has_chunk ? load_current(p.row_request + batch_row) : -1;
    int query_row = 0;
    bool is_single = false;  // more query rows would have the same positions read more than once
    if (lane < shape.early_rows) {
      query_row = load_current(p.query_start + lane);
      is_single = load_current(p.query_start + lane + 1) == query_row + 1;
    }
    is_early = __ballot_sync(kAllLanes, is_single);
    query_row = __shfl_sync(kAllLanes, query_row, batch_row);
    if (!(is_early >> batch_row & 1u)) request = -1;
    int position = -1;
    if (request >= 0) {
      const int entry = first_entry + tid;
      region = load_current(p.hot_region + request);
      if (tid < shape.chunk && entry < p.top_k)
        position = load_current(p.topk + static_cast<int64_t>(query_row) * p.top_k + entry);
    }
    if (tid == 0) chunk.num_predicted = chunk.num_others = chunk.num_late = 0;
    for (int i = tid; i < kMaxSlots / 32; i += kFetchThreads) chunk.is_loaded[i] = 0;
    __syncthreads();
    if (region >= 0 && is_mover) look_up(p, shape, chunk, capacity, request, region, position, lane);
    __syncthreads();
  }

  // -- ask for what seems to miss; read the plan --
  RowPart<kPieces> early[kEarly > 0 ? kEarly : 1];
  if (is_mover) {
    if (kEarly > 0 && region >= 0) {
      const int num_early = min(chunk.num_predicted, capacity);
#pragma unroll
      for (int i = 0; i < kEarly; ++i) {
        const int listed = warp + i * kFetchWarps;
        if (listed < num_early) early[i].load(p.group_host + chunk.early[listed].y * host_row_bytes, 0, pieces, lane);
      }
    }
    wait_for_dependencies();
    release_dependents();
  } else {
    if (region >= 0) {  // where the rows will go is looked up by all movers at once
      for (int layer = warp - kFetchWarps; layer < p.num_layers; layer += kPlanWarps) {
        const int64_t table = static_cast<int64_t>(p.layer_part[layer]) * p.num_regions + region;
        for (int i = lane * 32; i < p.max_hot_blocks; i += 1024) prefetch(p.hot + table * p.max_hot_blocks + i);
        prefetch(p.layer_offset + layer);
      }
    }
    wait_for_dependencies();
    release_dependents();
    const int thread = tid - kFetchWarps * 32;
    read_plans(p, chunk, batch_row, region, capacity, is_early, plan_end, warp_total, thread);
  }
  __syncthreads();
  if (!is_mover) return;

  // -- the chunk's rows --
  if (kEarly > 0 && region >= 0) {
    const int num_early = min(chunk.num_predicted, capacity), num_late = chunk.num_late;
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      const int listed = warp + i * kFetchWarps;
      const int slot = listed < num_early ? chunk.early_slot[listed] : -1;
      if (slot >= 0) early[i].store(p, shape.block, region, slot, 0, pieces, lane);
    }
#pragma unroll 1
    for (int i = warp; i < num_late; i += kFetchWarps) {
      const int2 row = chunk.late[i];
      move_row<kPieces>(p, shape.block, p.group_host + row.x * host_row_bytes, region, row.y, pieces, lane);
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
      list_region = p.hot_region[p.row_request[low]];
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
