// torch tensors -> params structs, for both bindings. Checks dtype, rank, density and the extents that the kernels rely
// on; never reads a tensor's data. Only the stable ABI is used. The Python wrappers check the same with more words;
// these checks keep a direct call through torch.ops from reaching memory that is not there.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "hisparse/params.h"

namespace hisparse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
inline constexpr ScalarType kDtype = ScalarType::Undefined;
template <>
inline constexpr ScalarType kDtype<uint8_t> = ScalarType::Byte;
template <>
inline constexpr ScalarType kDtype<int16_t> = ScalarType::Short;
template <>
inline constexpr ScalarType kDtype<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kDtype<int64_t> = ScalarType::Long;

// Where the tensors of a call lie.
class Place {
 public:
  explicit Place(const Tensor& tensor) : type_(type_of(tensor)), index_(tensor.get_device_index()) {}

  static Place host() { return Place(aoti_torch_device_type_cpu(), -1); }

  // Pointer to a dense tensor of the given type and rank, at this place.
  template <typename T>
  T* data(const Tensor& tensor, int64_t rank, const char* name) const {
    STD_TORCH_CHECK(tensor.scalar_type() == kDtype<T>, name, ": got dtype ",
                    torch::headeronly::toString(tensor.scalar_type()), "; need ",
                    torch::headeronly::toString(kDtype<T>));
    STD_TORCH_CHECK(tensor.dim() == rank, name, ": got ", tensor.dim(), " dimensions; need ", rank);
    STD_TORCH_CHECK(tensor.is_contiguous(), name, ": got strides; need a contiguous tensor");
    STD_TORCH_CHECK(is_at(tensor), name, ": got device ", type_of(tensor), ":", tensor.get_device_index(), "; need ",
                    type_, ":", index_, " as of the other tensors");
    return static_cast<T*>(tensor.data_ptr());
  }

 private:
  Place(int32_t type, int32_t index) : type_(type), index_(index) {}

  bool is_at(const Tensor& tensor) const {
    if (type_of(tensor) != type_) return false;
    return type_ == aoti_torch_device_type_cpu() || tensor.get_device_index() == index_;
  }

  static int32_t type_of(const Tensor& tensor) {
    int32_t type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    return type;
  }

  int32_t type_;
  int32_t index_;
};

inline int32_t to_int32(int64_t value, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value <= std::numeric_limits<int32_t>::max(), name, ": got ", value,
                  "; need 0 .. 2^31 - 1");
  return static_cast<int32_t>(value);
}

inline int32_t extent(const Tensor& tensor, int64_t dim, const char* name) { return to_int32(tensor.size(dim), name); }

inline int32_t positive(int64_t value, const char* name) {
  STD_TORCH_CHECK(value > 0, name, ": got ", value, "; need a positive number");
  return to_int32(value, name);
}

inline void need(bool condition, const char* what) {
  STD_TORCH_CHECK(condition, "got shapes that do not fit; need ", what);
}

inline const BatchRow* batch_rows(const Tensor& batch, const Place& on) {
  const int32_t* rows = on.data<int32_t>(batch, 2, "batch");
  need(batch.size(1) * sizeof(int32_t) == sizeof(BatchRow), "batch [>= R, 4]");
  need(reinterpret_cast<uintptr_t>(rows) % alignof(BatchRow) == 0, "batch at a multiple of 16 bytes");
  return reinterpret_cast<const BatchRow*>(rows);
}

struct ResolveTensors {
  const Tensor &topk, &query_start, &rows, &counts;
  const Tensor &resident, &host, &hot, &batch;
  const Tensor &slot_of, &position_of, &key, &clock;
  const Tensor &plan_host_row, &plan_slot, &plan_count, &counters;
};

inline void set_resolve_tables(ResolveParams& params, const ResolveTensors& tensors, const Place& on) {
  params.resident = on.data<int32_t>(tensors.resident, 3, "resident");
  params.host = on.data<int32_t>(tensors.host, 2, "host");
  params.hot = on.data<int32_t>(tensors.hot, 3, "hot");
  params.batch = batch_rows(tensors.batch, on);
  params.max_requests = extent(tensors.resident, 1, "max_requests");
  params.max_pages = extent(tensors.resident, 2, "max_pages");
  params.num_regions = extent(tensors.hot, 1, "num_regions");
  params.max_hot_blocks = extent(tensors.hot, 2, "max_hot_blocks");
  need(tensors.host.size(0) == params.max_requests && tensors.host.size(1) == params.max_pages,
       "host [max_requests, max_pages] as in resident");
  need(tensors.hot.size(0) == tensors.resident.size(0), "as many parts in hot as in resident");
}

inline void set_resolve_state(ResolveParams& params, const ResolveTensors& tensors, const Place& on) {
  params.slot_of = on.data<int16_t>(tensors.slot_of, 2, "slot_of");
  params.position_of = on.data<int32_t>(tensors.position_of, 2, "position_of");
  params.key = on.data<int32_t>(tensors.key, 2, "key");
  params.clock = on.data<int32_t>(tensors.clock, 1, "clock");
  params.max_positions = extent(tensors.slot_of, 1, "max_positions");
  params.max_slots = extent(tensors.position_of, 1, "max_slots");
  need(tensors.slot_of.size(0) == params.num_regions, "slot_of [num_regions, ...] as in hot");
  need(tensors.position_of.size(0) == params.num_regions, "position_of [num_regions, ...] as in hot");
  need(tensors.key.size(0) == params.num_regions && tensors.key.size(1) == params.max_slots,
       "key of position_of's shape");
  need(tensors.clock.size(0) == params.num_regions, "clock [num_regions] as in hot");
  need(params.max_slots <= kMaxSlots, "max_slots <= 32768, what an int16 slot number can name");
}

inline void set_resolve_outputs(ResolveParams& params, const ResolveTensors& tensors, const Place& on) {
  params.topk = on.data<int32_t>(tensors.topk, 2, "topk");
  params.query_start = on.data<int32_t>(tensors.query_start, 1, "query_start");
  params.rows = on.data<int32_t>(tensors.rows, 3, "rows");
  params.counts = on.data<int32_t>(tensors.counts, 1, "counts");
  params.plan_host_row = on.data<int32_t>(tensors.plan_host_row, 2, "plan_host_row");
  params.plan_slot = on.data<int32_t>(tensors.plan_slot, 2, "plan_slot");
  params.plan_count = on.data<int32_t>(tensors.plan_count, 1, "plan_count");
  params.counters = on.data<int64_t>(tensors.counters, 1, "counters");
  params.num_query_rows = extent(tensors.topk, 0, "T");
  params.top_k = extent(tensors.topk, 1, "K");
  need(tensors.query_start.size(0) >= 1, "query_start [R + 1]");
  params.num_batch_rows = extent(tensors.query_start, 0, "R") - 1;
  params.plan_capacity = extent(tensors.plan_host_row, 1, "plan_capacity");
  params.num_plan_rows = extent(tensors.plan_count, 0, "num_plan_rows");
  need(tensors.rows.size(0) == params.num_parts && tensors.rows.size(1) == params.num_query_rows &&
           tensors.rows.size(2) == params.top_k,
       "rows [len(parts), T, K]");
  need(tensors.counts.size(0) == params.num_query_rows, "counts [T]");
  need(tensors.batch.size(0) >= params.num_batch_rows, "batch [>= R, 4]");
  need(tensors.plan_host_row.size(0) >= params.num_batch_rows && tensors.plan_slot.size(0) >= params.num_batch_rows &&
           tensors.plan_count.size(0) >= params.num_batch_rows && tensors.plan_slot.size(1) == params.plan_capacity,
       "plan_host_row and plan_slot [>= R, capacity], plan_count [>= R]");
  need(tensors.counters.size(0) == kNumCounters, "counters [8]");
}

inline ResolveParams make_resolve_params(const ResolveTensors& tensors, const std::vector<int64_t>& parts,
                                         int64_t block_size, int64_t block_stride_rows, int64_t max_query_rows,
                                         int64_t policy) {
  ResolveParams params{};
  STD_TORCH_CHECK(!parts.empty() && parts.size() <= kMaxParts, "parts: got ", parts.size(), "; need 1 .. ", kMaxParts);
  params.num_parts = static_cast<int32_t>(parts.size());
  params.block_size = positive(block_size, "block_size");
  params.block_stride_rows = positive(block_stride_rows, "block_stride_rows");
  params.max_query_rows = positive(max_query_rows, "max_query_rows");
  STD_TORCH_CHECK(policy == kLru || policy == kLrfu, "policy: got ", policy, "; need 0 (LRU) or 1 (LRFU)");
  params.policy = static_cast<int32_t>(policy);
  const Place on(tensors.topk);
  set_resolve_tables(params, tensors, on);
  set_resolve_state(params, tensors, on);
  set_resolve_outputs(params, tensors, on);
  for (int i = 0; i < params.num_parts; ++i) {
    STD_TORCH_CHECK(parts[i] >= 0 && parts[i] < tensors.resident.size(0), "parts: got ", parts[i],
                    "; need a part of resident");
    params.parts[i] = static_cast<int32_t>(parts[i]);
  }
  const int64_t num_positions = int64_t{params.max_pages} * params.block_size;
  need(num_positions <= params.max_positions, "max_positions >= max_pages * block_size");
  const int64_t num_wanted = int64_t{params.max_query_rows} * params.top_k;
  need(params.plan_capacity >= (num_wanted < params.max_slots ? num_wanted : params.max_slots),
       "a plan capacity of min(max_query_rows * K, max_slots)");
  need(int64_t{params.max_hot_blocks} * params.block_size >= params.max_slots, "max_hot_blocks to hold max_slots");
  return params;
}

inline WordsParams make_words_params(const Tensor& words, const std::vector<int64_t>& at,
                                     const std::vector<int64_t>& value) {
  const Place on(words);
  WordsParams params{};
  params.words = on.data<int32_t>(words, 1, "words");
  params.num_words = extent(words, 0, "num_words");
  params.at = at.data();
  params.value = value.data();
  params.num_writes = to_int32(static_cast<int64_t>(at.size()), "num_writes");
  STD_TORCH_CHECK(at.size() == value.size(), "got ", at.size(), " indices for ", value.size(), " values; need as many");
  for (const int64_t word : value)
    STD_TORCH_CHECK(word == static_cast<int32_t>(word), "value: got ", word, "; need an int32");
  for (const int64_t index : at)
    STD_TORCH_CHECK(index >= 0 && index < params.num_words, "at: got ", index, "; need 0 .. ", params.num_words - 1);
  return params;
}

struct ForgetTensors {
  const Tensor &slot_of, &position_of, &key, &clock;
  const Tensor &regions, &first_slot, &first_position;
};

inline ForgetParams make_forget_params(const ForgetTensors& tensors) {
  const Place on(tensors.slot_of);
  ForgetParams params{};
  params.slot_of = on.data<int16_t>(tensors.slot_of, 2, "slot_of");
  params.position_of = on.data<int32_t>(tensors.position_of, 2, "position_of");
  params.key = on.data<int32_t>(tensors.key, 2, "key");
  params.clock = on.data<int32_t>(tensors.clock, 1, "clock");
  params.regions = on.data<int32_t>(tensors.regions, 1, "regions");
  params.first_slot = on.data<int32_t>(tensors.first_slot, 1, "first_slot");
  params.first_position = on.data<int32_t>(tensors.first_position, 1, "first_position");
  params.num_regions = extent(tensors.slot_of, 0, "num_regions");
  params.max_positions = extent(tensors.slot_of, 1, "max_positions");
  params.max_slots = extent(tensors.position_of, 1, "max_slots");
  params.num_forgets = extent(tensors.regions, 0, "num_forgets");
  need(tensors.position_of.size(0) == params.num_regions && tensors.key.size(0) == params.num_regions &&
           tensors.key.size(1) == params.max_slots && tensors.clock.size(0) == params.num_regions,
       "position_of and key [num_regions, max_slots], clock [num_regions] as in slot_of");
  need(tensors.first_slot.size(0) == params.num_forgets && tensors.first_position.size(0) == params.num_forgets,
       "first_slot and first_position of regions' shape");
  return params;
}

}  // namespace hisparse
