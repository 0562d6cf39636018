// torch tensors -> params structs of the ops that move rows and pages. See arguments.h.
#pragma once

#include "hisparse/arguments.h"

namespace hisparse {

struct FetchTensors {
  const Tensor &group_host, &pool, &layer_offset, &layer_part;
  const Tensor &plan_host_row, &plan_slot, &plan_count, &batch, &hot;
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
  params.batch = batch_rows(tensors.batch, on);
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
           tensors.plan_slot.size(1) == params.plan_capacity && tensors.batch.size(0) >= params.num_batch_rows,
       "plan_host_row, plan_slot and batch for every entry of plan_count");
  return params;
}

struct SelectionTensors {
  const Tensor &topk, &query_start, &resident, &host, &slot_of;
};

inline FetchParams make_fetch_params(const FetchTensors& tensors, const SelectionTensors& selection, int64_t part,
                                     int64_t row_bytes, int64_t block_size, int64_t block_stride_bytes, bool skip_io) {
  FetchParams params = make_fetch_params(tensors, row_bytes, block_size, block_stride_bytes, skip_io);
  const Place on(tensors.pool);
  params.topk = on.data<int32_t>(selection.topk, 2, "topk");
  params.query_start = on.data<int32_t>(selection.query_start, 1, "query_start");
  params.resident = on.data<int32_t>(selection.resident, 3, "resident");
  params.host = on.data<int32_t>(selection.host, 2, "host");
  params.slot_of = on.data<int16_t>(selection.slot_of, 2, "slot_of");
  need(selection.query_start.size(0) >= 1, "query_start [R + 1]");
  params.num_selected_rows = extent(selection.query_start, 0, "R") - 1;
  params.top_k = extent(selection.topk, 1, "K");
  params.max_requests = extent(selection.resident, 1, "max_requests");
  params.max_pages = extent(selection.resident, 2, "max_pages");
  params.max_positions = extent(selection.slot_of, 1, "max_positions");
  STD_TORCH_CHECK(part >= 0 && part < selection.resident.size(0), "part: got ", part, "; need a part of resident");
  params.part = static_cast<int32_t>(part);
  need(params.num_selected_rows <= params.num_batch_rows, "plan_count for every batch row of query_start");
  need(selection.host.size(0) == params.max_requests && selection.host.size(1) == params.max_pages,
       "host [max_requests, max_pages] as in resident");
  need(selection.slot_of.size(0) == params.num_regions, "slot_of [num_regions, ...] as in hot");
  need(int64_t{params.max_pages} * params.block_size <= params.max_positions,
       "max_positions >= max_pages * block_size");
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
