// fetch, write_pages, read_pages and gather_pages on the CPU: plain row copies, 64-bit offsets throughout.
#include <cstdint>
#include <cstring>

#include "hisparse/cpu.h"

namespace hisparse::cpu {
namespace {

// Copies num_rows rows of row_bytes between two strided areas that do not overlap.
void copy_rows(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride, int32_t num_rows,
               int32_t row_bytes) {
  if (to_stride == row_bytes && from_stride == row_bytes) {
    std::memcpy(to, from, int64_t{num_rows} * row_bytes);
    return;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(to + row * to_stride, from + row * from_stride, row_bytes);
  }
}

void fetch_row(const FetchParams& params, int32_t region, int32_t host_row, int32_t slot) {
  const int64_t group_row_bytes = int64_t{params.num_layers} * params.row_bytes;
  const uint8_t* from = params.group_host + host_row * group_row_bytes;
  for (int32_t l = 0; l < params.num_layers; ++l) {
    const int64_t hot_row = int64_t{params.layer_part[l]} * params.num_regions + region;
    const int64_t block = params.hot[hot_row * params.max_hot_blocks + slot / params.block_size];
    uint8_t* to = params.pool + block * params.block_stride_bytes + params.layer_offset[l] +
                  int64_t{slot % params.block_size} * params.row_bytes;
    std::memcpy(to, from + int64_t{l} * params.row_bytes, params.row_bytes);
  }
}

// Calls move(device rows, host rows, host stride) for every page and layer that has a block on both sides.
template <typename Move>
void for_each_page(const PagesParams& params, Move move) {
  for (int32_t l = 0; l < params.num_layers; ++l) {
    const int32_t* blocks = params.page_blocks + int64_t{params.layer_part[l]} * params.num_pages;
    for (int32_t i = 0; i < params.num_pages; ++i) {
      const int64_t block = blocks[i];
      const int64_t host_block = params.host_blocks[i];
      if (block < 0 || host_block < 0) continue;
      move(params.pool + block * params.block_stride_bytes + params.layer_offset[l],
           params.host + params.host_offset[l] + host_block * params.block_size * params.host_row_stride[l],
           params.host_row_stride[l]);
    }
  }
}

}  // namespace

void fetch(const FetchParams& params) {
  if (params.skip_io) return;
  for (int32_t r = 0; r < params.num_batch_rows; ++r) {
    if (params.plan_count[r] == 0) continue;
    const int32_t region = params.batch[r].region;
    for (int32_t i = 0; i < params.plan_count[r]; ++i) {
      const int64_t entry = int64_t{r} * params.plan_capacity + i;
      fetch_row(params, region, params.plan_host_row[entry], params.plan_slot[entry]);
    }
  }
}

void write_pages(const PagesParams& params) {
  for_each_page(params, [&](const uint8_t* device, uint8_t* host, int64_t host_stride) {
    copy_rows(host, host_stride, device, params.row_bytes, params.block_size, params.row_bytes);
  });
}

void read_pages(const PagesParams& params) {
  for_each_page(params, [&](uint8_t* device, const uint8_t* host, int64_t host_stride) {
    copy_rows(device, params.row_bytes, host, host_stride, params.block_size, params.row_bytes);
  });
}

void gather_pages(const GatherParams& params) {
  const int64_t page_bytes = int64_t{params.block_size} * params.row_bytes;
  for (int32_t i = 0; i < params.num_pages; ++i) {
    const int64_t block = params.device_blocks[i];
    const int64_t host_block = params.host_blocks[i];
    uint8_t* to = params.staging + i * page_bytes;
    if (block >= 0) {
      std::memcpy(to, params.pool + block * params.block_stride_bytes + params.layer_offset, page_bytes);
    } else if (host_block >= 0) {
      const uint8_t* from = params.host + params.host_offset + host_block * params.block_size * params.host_row_stride;
      copy_rows(to, params.row_bytes, from, params.host_row_stride, params.block_size, params.row_bytes);
    }
  }
}

}  // namespace hisparse::cpu
