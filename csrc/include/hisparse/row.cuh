// A row of a group on its way from host memory to its places on the device, in the registers of a warp.
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/params.h"

namespace hisparse::cuda {

// Where 16 bytes of a region's rows lie, but for block and slot.
struct Piece {
  int64_t blocks;  // in `hot`: the region's blocks in slot order
  int64_t offset;  // in `pool`: in slot 0 of block 0
};

__device__ __forceinline__ Piece find_piece(const FetchParams& p, int region, int piece) {
  const int row_pieces = p.row_bytes / 16;
  const int layer = piece / row_pieces;
  const int64_t table = static_cast<int64_t>(p.layer_part[layer]) * p.num_regions + region;
  return {table * p.max_hot_blocks, p.layer_offset[layer] + (piece - layer * row_pieces) * 16};
}

// A warp's share of a row, kPieces times 16 bytes a lane from piece `begin` on.
template <int kPieces>
struct RowPart {
  uint4 data[kPieces];
  int32_t block[kPieces];  // that it goes to

  __device__ __forceinline__ void load(const uint8_t* host_row, int begin, int pieces, int lane) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int piece = begin + 32 * c + lane;
      if (piece < pieces) data[c] = load_once(host_row + piece * 16);
    }
  }

  // find: number of a piece -> Piece.
  template <typename Find>
  __device__ __forceinline__ void look_up(const FetchParams& p, const Divider& block_size, const Find& find, int slot,
                                          int begin, int pieces, int lane) {
    const int slot_block = block_size.quotient(slot);
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
      block[c] = p.hot[find(min(begin + 32 * c + lane, pieces - 1)).blocks + slot_block];
  }

  template <typename Find>
  __device__ __forceinline__ void store(const FetchParams& p, const Divider& block_size, const Find& find, int slot,
                                        int begin, int pieces, int lane) const {
    const int64_t in_block = static_cast<int64_t>(block_size.remainder(slot)) * p.row_bytes;
    uint8_t* target[kPieces];
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
      target[c] =
          p.pool + block[c] * p.block_stride_bytes + find(min(begin + 32 * c + lane, pieces - 1)).offset + in_block;
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
    const auto find = [&](int piece) { return find_piece(p, region, piece); };
    part.look_up(p, block_size, find, slot, begin, pieces, lane);
    part.store(p, block_size, find, slot, begin, pieces, lane);
  }
}

}  // namespace hisparse::cuda
