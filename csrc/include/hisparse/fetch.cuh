// Moves planned misses from host memory into hot slots, for all layers of an index group in one contiguous read a miss.
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/params.h"

namespace hisparse::cuda {

inline constexpr int kFetchThreads = 512;
inline constexpr int kFetchWarps = kFetchThreads / 32;

// Dynamic shared memory: plan_end [R] int32.
//
// Every CTA builds the running sum of the plans, so that all planned rows of all batch rows form one list; warp w takes
// rows w, w + W, ... of it. Lanes look up 32 of the warp's rows at once, then the warp moves them one after another,
// kPieces 16-byte pieces a lane in flight. Where a row goes is looked up while it is on its way.
template <int kPieces>
__global__ void __launch_bounds__(kFetchThreads, 1)
    fetch_kernel(const __grid_constant__ FetchParams p, const __grid_constant__ Divider block_size) {
  extern __shared__ __align__(16) int32_t plan_end[];
  __shared__ int warp_total[kFetchWarps];
  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int warp = tid >> 5;
  const int num_batch_rows = p.num_batch_rows;

  wait_for_dependencies();
  release_dependents();

  // -- running sum of the plans; a thread sums a run of batch rows --
  const int run = (num_batch_rows + kFetchThreads - 1) / kFetchThreads;
  const int first_row = tid * run, last_row = min(first_row + run, num_batch_rows);
  int own = 0;
#pragma unroll 1
  for (int row = first_row; row < last_row; ++row) plan_end[row] = own += p.plan_count[row];
  const int own_end = inclusive_prefix(own, lane);
  if (lane == 31) warp_total[warp] = own_end;
  __syncthreads();
  const int before = own_end - own + __reduce_add_sync(kAllLanes, lane < warp ? warp_total[lane] : 0);
#pragma unroll 1
  for (int row = first_row; row < last_row; ++row) plan_end[row] += before;
  __syncthreads();
  const int num_planned = plan_end[num_batch_rows - 1];

  const int row_pieces = p.row_bytes / 16;
  const int pieces = row_pieces * p.num_layers;
  const int64_t host_row_bytes = static_cast<int64_t>(pieces) * 16;
  const int num_warps = gridDim.x * kFetchWarps;
  const int first = warp * gridDim.x + blockIdx.x;  // neighbours in the list go to different CTAs

  for (int64_t base = first; base < num_planned; base += static_cast<int64_t>(num_warps) * 32) {
    // -- look up row base + lane * num_warps --
    const int64_t mine = base + static_cast<int64_t>(lane) * num_warps;
    int32_t host_row = 0, slot = 0, region = 0;
    if (mine < num_planned) {
      int low = 0, high = num_batch_rows - 1;  // the first batch row whose plan ends after `mine`
      while (low < high) {
        const int middle = (low + high) >> 1;
        if (plan_end[middle] > mine)
          high = middle;
        else
          low = middle + 1;
      }
      const int64_t at = static_cast<int64_t>(low) * p.plan_capacity + mine - (low > 0 ? plan_end[low - 1] : 0);
      host_row = p.plan_host_row[at];
      slot = p.plan_slot[at];
      region = p.hot_region[p.row_request[low]];
    }
    const int todo = static_cast<int>(min(static_cast<int64_t>(32), (num_planned - base + num_warps - 1) / num_warps));
    for (int i = 0; i < todo; ++i) {
      const uint8_t* source = p.group_host + __shfl_sync(kAllLanes, host_row, i) * host_row_bytes;
      const int row_slot = __shfl_sync(kAllLanes, slot, i);
#pragma unroll 1
      for (int begin = 0; begin < pieces; begin += 32 * kPieces) {
        uint4 data[kPieces];
#pragma unroll
        for (int c = 0; c < kPieces; ++c) {
          const int piece = begin + 32 * c + lane;
          if (piece < pieces) data[c] = load_once(source + piece * 16);
        }
        const int row_region = __shfl_sync(kAllLanes, region, i);
        const int slot_block = block_size.quotient(row_slot);
        const int64_t in_block = static_cast<int64_t>(row_slot - slot_block * block_size.divisor) * p.row_bytes;
        uint8_t* target[kPieces];
#pragma unroll
        for (int c = 0; c < kPieces; ++c) {
          const int piece = min(begin + 32 * c + lane, pieces - 1);
          const int layer = piece / row_pieces;
          const int64_t table = static_cast<int64_t>(p.layer_part[layer]) * p.num_regions + row_region;
          const int64_t block = p.hot[table * p.max_hot_blocks + slot_block];
          target[c] = p.pool + block * p.block_stride_bytes + p.layer_offset[layer] + in_block +
                      (piece - layer * row_pieces) * 16;
        }
#pragma unroll
        for (int c = 0; c < kPieces; ++c)
          if (begin + 32 * c + lane < pieces) *reinterpret_cast<uint4*>(target[c]) = data[c];
      }
    }
  }
}

}  // namespace hisparse::cuda
