// torch tensors -> params structs of the ops that move rows and pages. See arguments.h.
#pragma once

#include "hisparse/arguments.h"

namespace hisparse {

struct FetchTensors {
  const Tensor &group_host, &pool, &layer_offset, &layer_part;
  const Tensor &plan_host_row, &plan_slot, &plan_count, &row_request, &hot_region, &hot;
};

inline FetchParams make_fetch_params(const FetchTensors& tensors, int64_t row_bytes, int64_t block_size,
                                     int64_t block_stride_bytes, bool skip_io) {
  const Place on(tensors.pool);
  FetchParams params{};
  params.group_host = Place::host().data<uint8_t>(tensors.group_host, 2, "group_host");
  params.pool = on.data<uint8_t>(tensors.pool, 1, "pool");
  params.layer_offset = on.data<int64_t>(tensors.layer_offset, 1, "layer_offset");
  params.layer_part = on.data<int32_t>(tensors.layer_part, 1, "layer_part");
  params.plan_host_row = on.data<int32_t>(tensors.plan_host_row, 2, "plan_host_row");
  params.plan_slot = on.data<int32_t>(tensors.plan_slot, 2, "plan_slot");
  params.plan_count = on.data<int32_t>(tensors.plan_count, 1, "plan_count");
  params.row_request = on.data<int32_t>(tensors.row_request, 1, "row_request");
  params.hot_region = on.data<int32_t>(tensors.hot_region, 1, "hot_region");
  params.hot = on.data<int32_t>(tensors.hot, 3, "hot");
  params.num_layers = extent(tensors.layer_offset, 0, "num_layers");
  params.num_batch_rows = extent(tensors.plan_count, 0, "R");
  params.plan_capacity = extent(tensors.plan_host_row, 1, "plan_capacity");
  params.num_regions = extent(tensors.hot, 1, "num_regions");
  params.max_hot_blocks = extent(tensors.hot, 2, "max_hot_blocks");
  params.row_bytes = positive(row_bytes, "row_bytes");
  params.block_size = positive(block_size, "block_size");
  params.block_stride_bytes = positive(block_stride_bytes, "block_stride_bytes");
  params.skip_io = skip_io;
  need(tensors.layer_part.size(0) == params.num_layers, "layer_part of layer_offset's shape");
  need(tensors.group_host.size(1) == int64_t{params.num_layers} * row_bytes, "group_host [rows, layers * row_bytes]");
  need(tensors.plan_host_row.size(0) >= params.num_batch_rows && tensors.plan_slot.size(0) >= params.num_batch_rows &&
           tensors.plan_slot.size(1) == params.plan_capacity && tensors.row_request.size(0) >= params.num_batch_rows,
       "plan_host_row, plan_slot and row_request for every entry of plan_count");
  return params;
}

struct PagesTensors {
  const Tensor &pool, &host, &page_blocks, &host_blocks;
  const Tensor &layer_offset, &layer_part, &host_offset, &host_row_stride;
};

inline PagesParams make_pages_params(const PagesTensors& tensors, int64_t row_bytes, int64_t block_size,
                                     int64_t block_stride_bytes) {
  const Place on(tensors.pool);
  PagesParams params{};
  params.pool = on.data<uint8_t>(tensors.pool, 1, "pool");
  params.host = Place::host().data<uint8_t>(tensors.host, 1, "host");
  params.page_blocks = on.data<int32_t>(tensors.page_blocks, 2, "page_blocks");
  params.host_blocks = on.data<int32_t>(tensors.host_blocks, 1, "host_blocks");
  params.layer_offset = on.data<int64_t>(tensors.layer_offset, 1, "layer_offset");
  params.layer_part = on.data<int32_t>(tensors.layer_part, 1, "layer_part");
  params.host_offset = on.data<int64_t>(tensors.host_offset, 1, "host_offset");
  params.host_row_stride = on.data<int64_t>(tensors.host_row_stride, 1, "host_row_stride");
  params.num_layers = extent(tensors.layer_offset, 0, "num_layers");
  params.num_pages = extent(tensors.host_blocks, 0, "num_pages");
  params.row_bytes = positive(row_bytes, "row_bytes");
  params.block_size = positive(block_size, "block_size");
  params.block_stride_bytes = positive(block_stride_bytes, "block_stride_bytes");
  need(tensors.page_blocks.size(1) == params.num_pages, "page_blocks [num_parts, n] with host_blocks [n]");
  need(tensors.layer_part.size(0) == params.num_layers && tensors.host_offset.size(0) == params.num_layers &&
           tensors.host_row_stride.size(0) == params.num_layers,
       "layer_part, host_offset and host_row_stride of layer_offset's shape");
  return params;
}

struct GatherTensors {
  const Tensor &pool, &host, &staging, &device_blocks, &host_blocks;
};

inline GatherParams make_gather_params(const GatherTensors& tensors, int64_t layer_offset, int64_t host_offset,
                                       int64_t host_row_stride, int64_t row_bytes, int64_t block_size,
                                       int64_t block_stride_bytes) {
  const Place on(tensors.pool);
  GatherParams params{};
  params.pool = on.data<uint8_t>(tensors.pool, 1, "pool");
  params.host = Place::host().data<uint8_t>(tensors.host, 1, "host");
  params.staging = on.data<uint8_t>(tensors.staging, 2, "staging");
  params.device_blocks = on.data<int32_t>(tensors.device_blocks, 1, "device_blocks");
  params.host_blocks = on.data<int32_t>(tensors.host_blocks, 1, "host_blocks");
  params.layer_offset = layer_offset;
  params.host_offset = host_offset;
  params.host_row_stride = host_row_stride;
  params.num_pages = extent(tensors.device_blocks, 0, "num_pages");
  params.row_bytes = positive(row_bytes, "row_bytes");
  params.block_size = positive(block_size, "block_size");
  params.block_stride_bytes = positive(block_stride_bytes, "block_stride_bytes");
  need(tensors.host_blocks.size(0) == params.num_pages, "host_blocks of device_blocks' shape");
  need(tensors.staging.size(1) == row_bytes && tensors.staging.size(0) >= int64_t{params.num_pages} * block_size,
       "staging [>= n * block_size, row_bytes]");
  return params;
}

}  // namespace hisparse
