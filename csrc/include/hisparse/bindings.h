// The ops as torch sees them, once for every backend. A Backend names its kernels and says how to launch one:
//   static constexpr auto resolve = ...;  (and so on, one a kernel)
//   template <typename Kernel, typename Params> static void launch(Kernel, const Params&, const Tensor& on);
#pragma once

#include <vector>

#include "hisparse/page_arguments.h"

namespace hisparse {

template <typename Backend>
struct Ops {
  static void resolve(const Tensor& topk, const Tensor& query_start, const Tensor& rows, const Tensor& counts,
                      const Tensor& resident, const Tensor& host, const Tensor& hot, const Tensor& batch,
                      const Tensor& slot_of, const Tensor& position_of, const Tensor& key, const Tensor& clock,
                      const Tensor& plan_host_row, const Tensor& plan_slot, const Tensor& plan_count,
                      const Tensor& counters, const std::vector<int64_t>& parts, int64_t block_size,
                      int64_t block_stride_rows, int64_t max_query_rows, int64_t policy) {
    const ResolveTensors tensors{topk,    query_start, rows, counts, resident,      host,      hot,        batch,
                                 slot_of, position_of, key,  clock,  plan_host_row, plan_slot, plan_count, counters};
    Backend::launch(Backend::resolve,
                    make_resolve_params(tensors, parts, block_size, block_stride_rows, max_query_rows, policy), topk);
  }

  static void fetch(const Tensor& group_host, const Tensor& pool, const Tensor& layer_offset, const Tensor& layer_part,
                    const Tensor& plan_host_row, const Tensor& plan_slot, const Tensor& plan_count, const Tensor& batch,
                    const Tensor& hot, int64_t row_bytes, int64_t block_size, int64_t block_stride_bytes,
                    bool skip_io) {
    const FetchTensors tensors{group_host, pool,       layer_offset, layer_part, plan_host_row,
                               plan_slot,  plan_count, batch,        hot};
    Backend::launch(Backend::fetch, make_fetch_params(tensors, row_bytes, block_size, block_stride_bytes, skip_io),
                    pool);
  }

  static void fetch_selected(const Tensor& group_host, const Tensor& pool, const Tensor& layer_offset,
                             const Tensor& layer_part, const Tensor& plan_host_row, const Tensor& plan_slot,
                             const Tensor& plan_count, const Tensor& batch, const Tensor& hot, const Tensor& topk,
                             const Tensor& query_start, const Tensor& resident, const Tensor& host,
                             const Tensor& slot_of, int64_t part, int64_t row_bytes, int64_t block_size,
                             int64_t block_stride_bytes, bool skip_io) {
    const FetchTensors tensors{group_host, pool,       layer_offset, layer_part, plan_host_row,
                               plan_slot,  plan_count, batch,        hot};
    const SelectionTensors selection{topk, query_start, resident, host, slot_of};
    Backend::launch(Backend::fetch,
                    make_fetch_params(tensors, selection, part, row_bytes, block_size, block_stride_bytes, skip_io),
                    pool);
  }

  static void write_pages(const Tensor& pool, const Tensor& host, const Tensor& page_blocks, const Tensor& host_blocks,
                          const Tensor& layer_offset, const Tensor& layer_part, const Tensor& host_offset,
                          const Tensor& host_row_stride, int64_t row_bytes, int64_t block_size,
                          int64_t block_stride_bytes) {
    const PagesTensors tensors{pool,         host,       page_blocks, host_blocks,
                               layer_offset, layer_part, host_offset, host_row_stride};
    Backend::launch(Backend::write_pages, make_pages_params(tensors, row_bytes, block_size, block_stride_bytes), pool);
  }

  static void read_pages(const Tensor& pool, const Tensor& host, const Tensor& page_blocks, const Tensor& host_blocks,
                         const Tensor& layer_offset, const Tensor& layer_part, const Tensor& host_offset,
                         const Tensor& host_row_stride, int64_t row_bytes, int64_t block_size,
                         int64_t block_stride_bytes) {
    const PagesTensors tensors{pool,         host,       page_blocks, host_blocks,
                               layer_offset, layer_part, host_offset, host_row_stride};
    Backend::launch(Backend::read_pages, make_pages_params(tensors, row_bytes, block_size, block_stride_bytes), pool);
  }

  static void gather_pages(const Tensor& pool, const Tensor& host, const Tensor& staging, const Tensor& device_blocks,
                           const Tensor& host_blocks, int64_t layer_offset, int64_t host_offset,
                           int64_t host_row_stride, int64_t row_bytes, int64_t block_size, int64_t block_stride_bytes) {
    const GatherTensors tensors{pool, host, staging, device_blocks, host_blocks};
    Backend::launch(Backend::gather_pages,
                    make_gather_params(tensors, layer_offset, host_offset, host_row_stride, row_bytes, block_size,
                                       block_stride_bytes),
                    pool);
  }

  static void write_words(const Tensor& words, const std::vector<int64_t>& at, const std::vector<int64_t>& value) {
    Backend::launch(Backend::write_words, make_words_params(words, at, value), words);
  }

  static void forget(const Tensor& slot_of, const Tensor& position_of, const Tensor& key, const Tensor& clock,
                     const Tensor& regions, const Tensor& first_slot, const Tensor& first_position) {
    Backend::launch(Backend::forget,
                    make_forget_params({slot_of, position_of, key, clock, regions, first_slot, first_position}),
                    slot_of);
  }

  static void register_in(torch::stable::detail::StableLibrary& library) {
    library.impl("resolve", TORCH_BOX(&Ops::resolve));
    library.impl("fetch", TORCH_BOX(&Ops::fetch));
    library.impl("fetch_selected", TORCH_BOX(&Ops::fetch_selected));
    library.impl("write_pages", TORCH_BOX(&Ops::write_pages));
    library.impl("read_pages", TORCH_BOX(&Ops::read_pages));
    library.impl("gather_pages", TORCH_BOX(&Ops::gather_pages));
    library.impl("write_words", TORCH_BOX(&Ops::write_words));
    library.impl("forget", TORCH_BOX(&Ops::forget));
  }
};

}  // namespace hisparse
