// One params struct a kernel, shared by the CPU and the CUDA implementation. Free of torch: raw pointers, each with
// its shape and whether it may be null. Every array is dense and row-major.
//
// Names of extents: T query rows, K selected positions a query row, R batch rows, L layers, n pages, m regions.
#pragma once

#include <cstdint>

namespace hisparse {

inline constexpr int kMaxParts = 4;
inline constexpr int kNumCounters = 8;
inline constexpr int kMaxSlots = 32768;  // slot numbers are int16

// Indices into ResolveParams::counters.
enum Counter : int { kHits = 0, kMisses = 1, kResident = 2, kOverflow = 3, kUnreadable = 4 };

enum Policy : int { kLru = 0, kLrfu = 1 };

// A batch row of the step: 16 bytes, so that one load brings all that the kernels ask first.
struct alignas(16) BatchRow {
  int32_t request;    // request slot, -1: none
  int32_t region;     // hot region, -1: none
  int32_t num_slots;  // usable slots of the region
  int32_t unused;
};

// Positions of a selection -> physical rows; updates one index group's hot regions and plans the misses.
struct ResolveParams {
  const int32_t* topk;         // [T, K] logical positions; outside [0, max_pages * block_size): padding
  const int32_t* query_start;  // [R + 1] query rows of batch row r: [query_start[r], query_start[r + 1])
  int32_t* rows;               // [num_parts, T, K] out
  int32_t* counts;             // [T] out

  const int32_t* resident;  // [engine_parts, max_requests, max_pages] device block, -1: not readable
  const int32_t* host;      // [max_requests, max_pages] host block, -1: none
  const int32_t* hot;       // [engine_parts, num_regions, max_hot_blocks] device blocks in slot order
  const BatchRow* batch;    // [>= R]

  int16_t* slot_of;      // [num_regions, max_positions] inout; < 0: in no slot (see policy.h)
  int32_t* position_of;  // [num_regions, max_slots] inout
  int32_t* key;          // [num_regions, max_slots] inout
  int32_t* clock;        // [num_regions] inout

  int32_t* plan_host_row;  // [R, plan_capacity] out
  int32_t* plan_slot;      // [R, plan_capacity] out
  int32_t* plan_count;     // [num_plan_rows] out, 0 from R on
  int64_t* counters;       // [kNumCounters] accumulated

  int32_t parts[kMaxParts];  // engine parts that hold this group's layers; the first num_parts entries
  int32_t num_parts;

  int32_t num_query_rows;  // T
  int32_t top_k;           // K
  int32_t num_batch_rows;  // R
  int32_t max_requests;
  int32_t max_pages;
  int32_t num_regions;
  int32_t max_hot_blocks;
  int32_t max_positions;
  int32_t max_slots;
  int32_t plan_capacity;
  int32_t num_plan_rows;      // >= R
  int32_t block_size;         // tokens a page
  int32_t block_stride_rows;  // rows a device block
  int32_t max_query_rows;     // batch rows with more query rows are staged elsewhere
  int32_t policy;             // Policy
};

// Planned misses: host memory -> hot slots, for all layers of an index group.
struct FetchParams {
  const uint8_t* group_host;     // [num_host_rows, num_layers * row_bytes]
  uint8_t* pool;                 // [pool_bytes] inout
  const int64_t* layer_offset;   // [num_layers] bytes from a device block's start to the layer's first row
  const int32_t* layer_part;     // [num_layers] engine part that holds the layer
  const int32_t* plan_host_row;  // [R, plan_capacity]
  const int32_t* plan_slot;      // [R, plan_capacity]
  const int32_t* plan_count;     // [R]
  const BatchRow* batch;         // [>= R]
  const int32_t* hot;            // [engine_parts, num_regions, max_hot_blocks]

  // What the resolver was given, for reading before it has ended. topk null: not known.
  const int32_t* topk;         // [T, K]
  const int32_t* query_start;  // [num_selected_rows + 1]
  const int32_t* resident;     // [engine_parts, max_requests, max_pages]
  const int32_t* host;         // [max_requests, max_pages]
  const int16_t* slot_of;      // [num_regions, max_positions]

  int64_t block_stride_bytes;
  int32_t num_layers;
  int32_t num_batch_rows;  // R
  int32_t plan_capacity;
  int32_t num_regions;
  int32_t max_hot_blocks;
  int32_t row_bytes;
  int32_t block_size;
  int32_t num_selected_rows;  // batch rows of the selection, at most R
  int32_t top_k;              // K
  int32_t max_requests;
  int32_t max_pages;
  int32_t max_positions;
  int32_t part;  // the first of the group's engine parts, whose resident pages count
  bool skip_io;  // plan only: moves nothing
};

// Whole pages between the device pool and host memory, all layers and pages of a step.
struct PagesParams {
  uint8_t* pool;                   // [pool_bytes], written by read_pages
  uint8_t* host;                   // [host_bytes], written by write_pages
  const int32_t* page_blocks;      // [engine_parts, num_pages] device blocks
  const int32_t* host_blocks;      // [num_pages] host blocks; a negative block on either side: not moved
  const int64_t* layer_offset;     // [num_layers]
  const int32_t* layer_part;       // [num_layers]
  const int64_t* host_offset;      // [num_layers] bytes from the host memory's start to the layer's row 0
  const int64_t* host_row_stride;  // [num_layers] bytes between a layer's rows of consecutive tokens on the host

  int64_t block_stride_bytes;
  int32_t num_layers;
  int32_t num_pages;
  int32_t row_bytes;
  int32_t block_size;
};

// One layer's pages, wherever they are, into a dense staging area.
struct GatherParams {
  const uint8_t* pool;           // [pool_bytes]
  const uint8_t* host;           // [host_bytes]
  uint8_t* staging;              // [capacity_rows, row_bytes] out, the first num_pages * block_size rows
  const int32_t* device_blocks;  // [num_pages] device block of the layer's part, -1: take the host block
  const int32_t* host_blocks;    // [num_pages] host block, -1: none

  int64_t layer_offset;
  int64_t host_offset;
  int64_t host_row_stride;
  int64_t block_stride_bytes;
  int32_t num_pages;
  int32_t row_bytes;
  int32_t block_size;
};

// Single words of the tables, between steps. Read by the caller's thread, not later.
struct WordsParams {
  int32_t* words;        // [num_words] inout
  const int64_t* at;     // [num_writes] each index once
  const int64_t* value;  // [num_writes] int32 range

  int32_t num_words;
  int32_t num_writes;
};

// Drops slots of hot regions between steps.
struct ForgetParams {
  int16_t* slot_of;               // [num_regions, max_positions] inout
  int32_t* position_of;           // [num_regions, max_slots] inout
  int32_t* key;                   // [num_regions, max_slots] inout
  int32_t* clock;                 // [num_regions] inout
  const int32_t* regions;         // [num_forgets] each region once
  const int32_t* first_slot;      // [num_forgets]
  const int32_t* first_position;  // [num_forgets]

  int32_t num_forgets;
  int32_t num_regions;
  int32_t max_positions;
  int32_t max_slots;
};

}  // namespace hisparse
