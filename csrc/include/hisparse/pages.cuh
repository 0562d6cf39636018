// Whole pages between the device pool and host memory (write-back, restore) and a layer's pages into staging (prefill).
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/params.h"

namespace hisparse::cuda {

inline constexpr int kPageThreads = 512;
inline constexpr int kPageWarps = kPageThreads / 32;
inline constexpr int kPieces = 4;                  // 16-byte pieces a lane holds in flight
inline constexpr int kChunkPieces = 32 * kPieces;  // what a warp moves at once: 2 KiB
inline constexpr int kMaxPageLayers = kPageThreads;

// Layers that lie side by side in a host row form a bundle: a warp then covers host memory without gaps, whatever the
// layers' places on the device. Static host side of the kernel: nothing; bundles are found from the offsets themselves.
struct Bundles {
  int32_t first_layer[kMaxPageLayers + 1];  // bundle b: layers [first_layer[b], first_layer[b + 1])
  int32_t chunk_end[kMaxPageLayers];        // running sum of a page's chunks
  int32_t count;
};

// All threads of the block call it; ends with a barrier.
__device__ __forceinline__ void find_bundles(const PagesParams& p, Bundles& bundles, int* warp_total) {
  const int layer = threadIdx.x;
  const int lane = layer & 31;
  const int warp = layer >> 5;
  bool leads = false;
  if (layer < p.num_layers) {
    leads = layer == 0 || p.host_offset[layer] != p.host_offset[layer - 1] + p.row_bytes ||
            p.host_row_stride[layer] != p.host_row_stride[layer - 1];
  }
  int total;
  int before = small_prefix<1>(leads, lane, total);
  if (lane == 0) warp_total[warp] = total;
  __syncthreads();
  before += __reduce_add_sync(kAllLanes, lane < warp ? warp_total[lane] : 0);
  if (leads) bundles.first_layer[before] = layer;
  if (layer == kPageThreads - 1) {
    bundles.count = before + leads;
    bundles.first_layer[before + leads] = p.num_layers;
  }
  __syncthreads();
  if (warp == 0) {
    int end = 0;
    for (int base = 0; base < bundles.count; base += 32) {
      const int b = base + lane;
      const int layers = b < bundles.count ? bundles.first_layer[b + 1] - bundles.first_layer[b] : 0;
      const int64_t pieces = static_cast<int64_t>(layers) * (p.row_bytes / 16) * p.block_size;
      const int chunks = static_cast<int>((pieces + kChunkPieces - 1) / kChunkPieces);
      const int own_end = end + inclusive_prefix(chunks, lane);
      if (b < bundles.count) bundles.chunk_end[b] = own_end;
      end = __shfl_sync(kAllLanes, own_end, 31);
    }
  }
  __syncthreads();
}

template <bool kToHost>
__global__ void __launch_bounds__(kPageThreads) pages_kernel(const __grid_constant__ PagesParams p) {
  __shared__ Bundles bundles;
  __shared__ int warp_total[32];
  wait_for_dependencies();
  release_dependents();
  if (threadIdx.x < 32) warp_total[threadIdx.x] = 0;
  __syncthreads();
  find_bundles(p, bundles, warp_total);

  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int row_pieces = p.row_bytes / 16;
  const int page_chunks = bundles.chunk_end[bundles.count - 1];
  const int64_t num_chunks = static_cast<int64_t>(page_chunks) * p.num_pages;
  // Neighbouring warps take neighbouring chunks: the writes of a CTA stay within a few host pages.
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * kPageWarps + warp; chunk < num_chunks;
       chunk += static_cast<int64_t>(gridDim.x) * kPageWarps) {
    const int page = static_cast<int>(chunk / page_chunks);
    const int in_page = static_cast<int>(chunk - static_cast<int64_t>(page) * page_chunks);
    const int64_t host_block = p.host_blocks[page];
    int low = 0, high = bundles.count - 1;  // the first bundle whose chunks end after in_page
    while (low < high) {
      const int middle = (low + high) >> 1;
      if (bundles.chunk_end[middle] > in_page)
        high = middle;
      else
        low = middle + 1;
    }
    const int first_layer = bundles.first_layer[low];
    const uint32_t token_pieces = (bundles.first_layer[low + 1] - first_layer) * row_pieces;
    const uint32_t num_pieces = token_pieces * p.block_size;
    const uint32_t first_piece = (in_page - (low > 0 ? bundles.chunk_end[low - 1] : 0)) * kChunkPieces + lane;
    const int64_t stride = p.host_row_stride[first_layer];
    uint8_t* host = p.host + p.host_offset[first_layer] + host_block * p.block_size * stride;

    uint8_t* device_side[kPieces];
    uint8_t* host_side[kPieces];
    uint4 data[kPieces];
    bool moves[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = first_piece + 32 * i;
      const uint32_t token = piece / token_pieces;
      const uint32_t in_token = piece - token * token_pieces;
      const uint32_t bundle_layer = in_token / row_pieces;
      const int layer = first_layer + bundle_layer;
      moves[i] = piece < num_pieces && host_block >= 0;
      const int64_t block =
          moves[i] ? p.page_blocks[static_cast<int64_t>(p.layer_part[layer]) * p.num_pages + page] : -1;
      moves[i] = block >= 0;
      host_side[i] = host + token * stride + in_token * 16;
      device_side[i] = moves[i]
                           ? p.pool + block * p.block_stride_bytes + p.layer_offset[layer] +
                                 static_cast<int64_t>(token) * p.row_bytes + (in_token - bundle_layer * row_pieces) * 16
                           : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (moves[i]) data[i] = load_once(kToHost ? device_side[i] : host_side[i]);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (moves[i]) *reinterpret_cast<uint4*>(kToHost ? host_side[i] : device_side[i]) = data[i];
  }
}

__global__ void __launch_bounds__(kPageThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  wait_for_dependencies();
  release_dependents();
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const uint32_t row_pieces = p.row_bytes / 16;
  const uint32_t page_pieces = row_pieces * p.block_size;
  const int page_chunks = (page_pieces + kChunkPieces - 1) / kChunkPieces;
  const int64_t page_bytes = static_cast<int64_t>(page_pieces) * 16;
  const int64_t num_chunks = static_cast<int64_t>(page_chunks) * p.num_pages;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * kPageWarps + warp; chunk < num_chunks;
       chunk += static_cast<int64_t>(gridDim.x) * kPageWarps) {
    const int page = static_cast<int>(chunk / page_chunks);
    const uint32_t first_piece = static_cast<uint32_t>(chunk - static_cast<int64_t>(page) * page_chunks) * kChunkPieces;
    const int64_t device_block = p.device_blocks[page];
    const int64_t host_block = p.host_blocks[page];
    if (device_block < 0 && host_block < 0) continue;
    const uint8_t* device = p.pool + device_block * p.block_stride_bytes + p.layer_offset;
    const uint8_t* host = p.host + p.host_offset + host_block * p.block_size * p.host_row_stride;
    uint4 data[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = first_piece + 32 * i + lane;
      const uint32_t token = piece / row_pieces;
      const int64_t at = device_block >= 0 ? static_cast<int64_t>(piece) * 16
                                           : token * p.host_row_stride + (piece - token * row_pieces) * 16;
      if (piece < page_pieces) data[i] = load_once((device_block >= 0 ? device : host) + at);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = first_piece + 32 * i + lane;
      if (piece < page_pieces)
        *reinterpret_cast<uint4*>(p.staging + page * page_bytes + static_cast<int64_t>(piece) * 16) = data[i];
    }
  }
}

}  // namespace hisparse::cuda
