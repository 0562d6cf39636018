// A batch row's selection in registers, E consecutive entries a thread, and the block tables it is looked up in.
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/params.h"

namespace hisparse::cuda {

inline constexpr int32_t kNotReadable = -1, kOnHost = -2;  // page states, beside device blocks

// What the launcher derives from ResolveParams.
struct ResolveShape {
  Divider block;          // by block_size
  int32_t num_positions;  // max_pages * block_size
  int32_t shared_pages;   // max_pages where the page tables fit into shared memory, else 0
  int32_t shared_blocks;  // max_hot_blocks where a thread each suffices, else 0
};

// Device blocks of a request's pages, and of a region's slots.
__device__ __forceinline__ const int32_t* resident_blocks(const ResolveParams& p, int part, int request) {
  return p.resident + (static_cast<int64_t>(p.parts[part]) * p.max_requests + request) * p.max_pages;
}
__device__ __forceinline__ const int32_t* hot_blocks(const ResolveParams& p, int part, int region) {
  return p.hot + (static_cast<int64_t>(p.parts[part]) * p.num_regions + region) * p.max_hot_blocks;
}

// Adds each thread's number of valid entries to its query rows' counts. `valid` bit e: entry e is valid.
template <int E>
__device__ __noinline__ void add_counts(uint32_t valid, int top_k, int* row_count) {
  const int first = threadIdx.x * E;
  for (uint32_t left = valid; left;) {
    const int row = (first + __ffs(left) - 1) / top_k;
    const int end = (row + 1) * top_k - first;  // this thread's entries of the query row end here
    const uint32_t inside = end < 32 ? left & ((1u << end) - 1u) : left;
    atomicAdd(&row_count[row], __popc(inside));
    left &= ~inside;
  }
}

// kVector: the addresses and the count are multiples of 16 bytes.
template <int E, bool kVector>
__device__ __forceinline__ void load_entries(const int32_t* from, int count, int32_t (&out)[E]) {
  const int first = threadIdx.x * E;
  if constexpr (kVector) {
#pragma unroll
    for (int e = 0; e < E; e += 4) {
      int4 v = make_int4(-1, -1, -1, -1);
      if (first + e < count) v = *reinterpret_cast<const int4*>(from + first + e);
      out[e] = v.x, out[e + 1] = v.y, out[e + 2] = v.z, out[e + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e) out[e] = first + e < count ? from[first + e] : -1;
  }
}

template <int E, bool kVector>
__device__ __forceinline__ void store_entries(int32_t* to, int count, const int32_t (&values)[E]) {
  const int first = threadIdx.x * E;
  if constexpr (kVector) {
#pragma unroll
    for (int e = 0; e < E; e += 4)
      if (first + e < count)
        *reinterpret_cast<int4*>(to + first + e) = make_int4(values[e], values[e + 1], values[e + 2], values[e + 3]);
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e)
      if (first + e < count) to[first + e] = values[e];
  }
}

// A page's device block, kOnHost or kNotReadable.
__device__ __forceinline__ int32_t page_state(int32_t resident, int32_t host) {
  return resident >= 0 ? resident : host >= 0 ? kOnHost : kNotReadable;
}

// Copies the page tables of a request to shared memory: `load` asks for most of them, `store` needs them.
template <int kThreads>
struct PageTables {
  const int32_t* resident;
  const int32_t* host;
  int num_pages;  // 0: nothing is copied
  int4 r, h;

  __device__ __forceinline__ void load() {
    const int i = threadIdx.x * 4;
    if (num_pages % 4 == 0 && i < num_pages) {
      r = *reinterpret_cast<const int4*>(resident + i);
      h = *reinterpret_cast<const int4*>(host + i);
    }
  }
  __device__ __forceinline__ void store(int32_t* pages) {
    if (num_pages % 4 == 0) {
#pragma unroll 1
      for (int i = threadIdx.x * 4; i < num_pages;) {
        *reinterpret_cast<int4*>(pages + i) =
            make_int4(page_state(r.x, h.x), page_state(r.y, h.y), page_state(r.z, h.z), page_state(r.w, h.w));
        i += kThreads * 4;
        if (i >= num_pages) break;
        r = *reinterpret_cast<const int4*>(resident + i);
        h = *reinterpret_cast<const int4*>(host + i);
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < num_pages; i += kThreads) pages[i] = page_state(resident[i], host[i]);
    }
  }
};

// Rows of the residents and hits of another part than the first; -1 for all else.
template <int E, bool kVector>
__device__ __forceinline__ void store_part(const ResolveParams& p, const ResolveShape& shape, int part, int request,
                                           int region, int64_t first_entry, int count, uint32_t is_resident,
                                           uint32_t is_hit, const int32_t (&position)[E], const int32_t (&slot)[E]) {
  const int32_t* page_block = resident_blocks(p, part, request);
  const int32_t* slot_block = hot_blocks(p, part, max(region, 0));
  int32_t row[E];
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const bool here = is_resident >> e & 1u;
    const int at = here ? position[e] : slot[e];
    row[e] = -1;
    if ((is_resident | is_hit) >> e & 1u) {
      const int in_blocks = shape.block.quotient(at);
      row[e] = (here ? page_block : slot_block)[in_blocks] * p.block_stride_rows + (at - in_blocks * p.block_size);
    }
  }
  store_entries<E, kVector>(p.rows + static_cast<int64_t>(part) * p.num_query_rows * p.top_k + first_entry, count, row);
}

}  // namespace hisparse::cuda
