// Schemas of the namespace `hisparse` and its CPU implementations. This library is always built and is loaded first;
// the CUDA library only adds implementations to the schemas defined here.
#include "hisparse/bindings.h"

#include "hisparse/cpu.h"

namespace hisparse {

struct Cpu {
  static constexpr auto resolve = &cpu::resolve;
  static constexpr auto fetch = &cpu::fetch;
  static constexpr auto write_pages = &cpu::write_pages;
  static constexpr auto read_pages = &cpu::read_pages;
  static constexpr auto gather_pages = &cpu::gather_pages;
  static constexpr auto write_words = &cpu::write_words;
  static constexpr auto forget = &cpu::forget;

  template <typename Kernel, typename Params>
  static void launch(Kernel kernel, const Params& params, const Tensor& /*on*/) {
    kernel(params);
  }
};

}  // namespace hisparse

STABLE_TORCH_LIBRARY(hisparse, m) {
  m.def(
      "resolve(Tensor topk, Tensor query_start, Tensor(a!) rows, Tensor(b!) counts, Tensor resident, Tensor host, "
      "Tensor hot, Tensor batch, Tensor(c!) slot_of, Tensor(d!) position_of, Tensor(e!) key, Tensor(f!) clock, "
      "Tensor(g!) plan_host_row, Tensor(h!) plan_slot, Tensor(i!) plan_count, Tensor(j!) counters, int[] parts, int "
      "block_size, int block_stride_rows, "
      "int max_query_rows, int policy) -> ()");
  m.def(
      "fetch(Tensor group_host, Tensor(a!) pool, Tensor layer_offset, Tensor layer_part, Tensor plan_host_row, "
      "Tensor plan_slot, Tensor plan_count, Tensor batch, Tensor hot, int row_bytes, int block_size, "
      "int block_stride_bytes, bool skip_io) -> ()");
  m.def(
      "fetch_selected(Tensor group_host, Tensor(a!) pool, Tensor layer_offset, Tensor layer_part, "
      "Tensor plan_host_row, Tensor plan_slot, Tensor plan_count, Tensor batch, Tensor hot, Tensor topk, "
      "Tensor query_start, Tensor resident, Tensor host, Tensor slot_of, int part, int row_bytes, int block_size, "
      "int block_stride_bytes, bool skip_io) -> ()");
  m.def(
      "write_pages(Tensor pool, Tensor(a!) host, Tensor page_blocks, Tensor host_blocks, Tensor layer_offset, "
      "Tensor layer_part, Tensor host_offset, Tensor host_row_stride, int row_bytes, int block_size, "
      "int block_stride_bytes) -> ()");
  m.def(
      "read_pages(Tensor(a!) pool, Tensor host, Tensor page_blocks, Tensor host_blocks, Tensor layer_offset, "
      "Tensor layer_part, Tensor host_offset, Tensor host_row_stride, int row_bytes, int block_size, "
      "int block_stride_bytes) -> ()");
  m.def(
      "gather_pages(Tensor pool, Tensor host, Tensor(a!) staging, Tensor device_blocks, Tensor host_blocks, "
      "int layer_offset, int host_offset, int host_row_stride, int row_bytes, int block_size, "
      "int block_stride_bytes) -> ()");
  m.def("write_words(Tensor(a!) words, int[] at, int[] value) -> ()");
  m.def(
      "forget(Tensor(a!) slot_of, Tensor(b!) position_of, Tensor(c!) key, Tensor(d!) clock, "
      "Tensor regions, Tensor first_slot, Tensor first_position) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hisparse, CPU, m) { hisparse::Ops<hisparse::Cpu>::register_in(m); }
