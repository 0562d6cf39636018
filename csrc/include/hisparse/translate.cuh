// Query rows without a hot region: padding and prefill.
#pragma once

#include "hisparse/entries.cuh"

namespace hisparse::cuda {

__device__ __forceinline__ void add_counter(const ResolveParams& p, int counter, uint32_t number) {
  if (number) atomicAdd(reinterpret_cast<unsigned long long*>(p.counters) + counter, number);
}

// -1 for every step-th query row from first_row on: rows that belong to no batch row, or to one without a request.
template <int kThreads>
__device__ __noinline__ void fill_padding(const ResolveParams& p, int first_row, int last_row, int step) {
  for (int t = first_row; t < last_row; t += step) {
    for (int part = 0; part < p.num_parts; ++part) {
      int32_t* out = p.rows + (static_cast<int64_t>(part) * p.num_query_rows + t) * p.top_k;
      for (int i = threadIdx.x; i < p.top_k; i += kThreads) out[i] = -1;
    }
    if (threadIdx.x == 0) p.counts[t] = 0;
  }
}

// A batch row with too many query rows for a hot region (prefill): resident pages only, no state.
template <int kThreads>
__device__ __noinline__ void translate_rows(const ResolveParams& p, const ResolveShape& shape, int request,
                                            int first_row, int last_row, int step) {
  const int32_t* host = p.host + static_cast<int64_t>(request) * p.max_pages;
  uint32_t all_valid = 0, all_unreadable = 0;
  for (int t = first_row; t < last_row; t += step) {
    int num_valid = 0;
    for (int begin = 0; begin < p.top_k; begin += kThreads) {
      const int i = begin + threadIdx.x;
      const int position = i < p.top_k ? p.topk[static_cast<int64_t>(t) * p.top_k + i] : -1;
      const bool real = static_cast<uint32_t>(position) < static_cast<uint32_t>(shape.num_positions);
      const int page = real ? shape.block.quotient(position) : 0;
      bool readable = false;
      for (int part = 0; part < p.num_parts && i < p.top_k; ++part) {
        const int64_t table = static_cast<int64_t>(p.parts[part]) * p.max_requests + request;
        const int block = real ? p.resident[table * p.max_pages + page] : -1;
        if (part == 0) readable = block >= 0;
        p.rows[(static_cast<int64_t>(part) * p.num_query_rows + t) * p.top_k + i] =
            readable ? block * p.block_stride_rows + shape.block.remainder(position) : -1;
      }
      num_valid += __syncthreads_count(readable);
      all_unreadable += real && !readable && host[page] < 0;
    }
    if (threadIdx.x == 0) {
      p.counts[t] = num_valid;
      all_valid += num_valid;
    }
  }
  add_counter(p, kResident, all_valid);
  add_counter(p, kUnreadable, __reduce_add_sync(kAllLanes, all_unreadable) * ((threadIdx.x & 31) == 0));
}

}  // namespace hisparse::cuda
