// Floors of the resolver benchmark, on the run's own machine and memory: an empty kernel, a plain block-table
// translation, the look-up that no resolver can do without, alone and with the reads of what misses, and random rows
// read from host memory by a loop that does nothing else.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__global__ void empty_kernel() {}

// rows[r, i] = table[r, position / block_size] * block_size + position % block_size
__global__ void translate_kernel(const int* __restrict__ topk, const int* __restrict__ table, int* __restrict__ rows,
                                 int top_k, int max_pages, int block_shift) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= top_k) return;
  const long entry = static_cast<long>(blockIdx.y) * top_k + i;
  const int position = topk[entry];
  const int mask = (1 << block_shift) - 1;
  int row = -1;
  if (position >= 0) {
    const int block = table[static_cast<long>(blockIdx.y) * max_pages + (position >> block_shift)];
    if (block >= 0) row = (block << block_shift) + (position & mask);
  }
  rows[entry] = row;
}

// How the warps of `chain_kernel` read the rows that their positions miss.
enum Reads : int {
  kNone = 0,
  kOneByOne = 1,  // into registers, the next row when one has arrived: keeps the link busy when there are many
  kTogether = 2,  // into shared memory, all at once: the shortest wait when there are few
};

struct Chain {
  const int* topk;         // [batch, top_k]
  const int4* rows_of;     // [batch] request and region of a batch row, the rest unused here
  const int* resident;     // [requests, max_pages]
  const int* host;         // [requests, max_pages]
  const int16_t* slot_of;  // [regions, max_positions]
  const int* hot;          // [regions, max_hot_blocks]
  int* rows;               // [batch, top_k] out
  const uint8_t* memory;   // host rows of row_bytes
  uint8_t* out;            // [batch, top_k, row_bytes] out
  int batch, top_k, max_pages, max_positions, max_hot_blocks, block_shift, row_bytes, stage_rows;
};

// A warp's rows, `host_row` of the lanes where it is not negative, to where its entries begin in `out`.
template <Reads kReads>
__device__ void read_missing(const Chain& p, int host_row, uint8_t* out) {
  extern __shared__ __align__(16) uint8_t stage[];  // [warps, stage_rows, row_bytes]
  const int lane = threadIdx.x % 32, pieces = p.row_bytes / 16;
  uint8_t* own = stage + threadIdx.x / 32 * p.stage_rows * p.row_bytes;
  for (unsigned left = __ballot_sync(~0u, host_row >= 0); left;) {
    unsigned asked = left;
    for (int n = 0; n < p.stage_rows && left; ++n, left &= left - 1) {
      const int source = __ffs(left) - 1;
      const uint8_t* from = p.memory + static_cast<long>(__shfl_sync(~0u, host_row, source)) * p.row_bytes;
      for (int base = lane; base < pieces; base += 64) {
        uint4 data[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int piece = base + 32 * c;
          if (piece >= pieces) continue;
          if (kReads == kOneByOne)
            data[c] = __ldcs(reinterpret_cast<const uint4*>(from) + piece);
          else
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(
                             __cvta_generic_to_shared(own + n * p.row_bytes + piece * 16))),
                         "l"(from + piece * 16)
                         : "memory");
        }
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (kReads == kOneByOne && base + 32 * c < pieces)
            reinterpret_cast<uint4*>(out + static_cast<long>(source) * p.row_bytes)[base + 32 * c] = data[c];
      }
    }
    if (kReads != kTogether) continue;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    asked &= ~left;
    for (int n = 0; asked; ++n, asked &= asked - 1) {
      uint8_t* to = out + static_cast<long>(__ffs(asked) - 1) * p.row_bytes;
      for (int piece = lane; piece < pieces; piece += 32)
        reinterpret_cast<uint4*>(to)[piece] = reinterpret_cast<const uint4*>(own + n * p.row_bytes)[piece];
    }
    __syncwarp();
  }
}

// What no resolver can do without: a position's request and region, page and slot, one dependent load after another,
// and its row; then the host rows of the positions that are in no slot. No region is kept up, nothing is chosen, listed
// or counted, and a row's place is known beforehand.
template <Reads kReads>
__global__ void chain_kernel(const Chain p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const long entry = static_cast<long>(blockIdx.y) * p.top_k + i;
  const int mask = (1 << p.block_shift) - 1;
  const int position = i < p.top_k ? p.topk[entry] : -1;
  const int4 owner = p.rows_of[blockIdx.y];
  const int request = owner.x, region = owner.y;
  int row = -1, host_row = -1;
  if (position >= 0) {
    const long page = static_cast<long>(request) * p.max_pages + (position >> p.block_shift);
    const int block = p.resident[page], host_block = p.host[page];
    const int slot = p.slot_of[static_cast<long>(region) * p.max_positions + position];
    const int* hot = p.hot + static_cast<long>(region) * p.max_hot_blocks;
    if (block >= 0)
      row = (block << p.block_shift) + (position & mask);
    else if (slot >= 0)
      row = (hot[slot >> p.block_shift] << p.block_shift) + (slot & mask);
    else if (host_block >= 0)
      host_row = (host_block << p.block_shift) + (position & mask);
  }
  if (i < p.top_k) p.rows[entry] = row;
  if (kReads != kNone) read_missing<kReads>(p, host_row, p.out + (entry - threadIdx.x % 32) * p.row_bytes);
}

// One warp a row, every lane with up to C loads of 16 bytes in flight.
template <int C>
__global__ void read_rows_kernel(const uint8_t* __restrict__ host, uint8_t* __restrict__ out,
                                 const int* __restrict__ rows, int num_rows, int row_bytes) {
  const int lane = threadIdx.x % 32;
  const int num_warps = gridDim.x * blockDim.x / 32;
  const int pieces = row_bytes / 16;
  for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < num_rows; i += num_warps) {
    const uint4* from = reinterpret_cast<const uint4*>(host + static_cast<size_t>(rows[i]) * row_bytes);
    uint4* to = reinterpret_cast<uint4*>(out + static_cast<size_t>(i) * row_bytes);
    for (int base = lane; base < pieces; base += 32 * C) {
      uint4 data[C];
#pragma unroll
      for (int c = 0; c < C; ++c)
        if (base + 32 * c < pieces) data[c] = __ldcs(from + base + 32 * c);
#pragma unroll
      for (int c = 0; c < C; ++c)
        if (base + 32 * c < pieces) to[base + 32 * c] = data[c];
    }
  }
}

}  // namespace

extern "C" {

void run_empty(cudaStream_t stream) { empty_kernel<<<1, 32, 0, stream>>>(); }

void run_translate(const int* topk, const int* table, int* rows, int batch, int top_k, int max_pages, int block_shift,
                   cudaStream_t stream) {
  translate_kernel<<<dim3((top_k + 255) / 256, batch), 256, 0, stream>>>(topk, table, rows, top_k, max_pages,
                                                                         block_shift);
}

// reads: Reads.
void run_chain(int reads, const int* topk, const int4* rows_of, const int* resident, const int* host,
               const int16_t* slot_of, const int* hot, int* rows, const uint8_t* memory, uint8_t* out, int batch,
               int top_k, int max_pages, int max_positions, int max_hot_blocks, int block_shift, int row_bytes,
               cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int stage_rows = reads == kTogether ? 4096 / row_bytes + 1 : 32;
  const size_t stage_bytes = reads == kTogether ? static_cast<size_t>(kThreads / 32) * stage_rows * row_bytes : 0;
  const Chain chain{topk,  rows_of, resident,  host,          slot_of,        hot,         rows,      memory,    out,
                    batch, top_k,   max_pages, max_positions, max_hot_blocks, block_shift, row_bytes, stage_rows};
  const auto kernel = reads == kNone       ? chain_kernel<kNone>
                      : reads == kOneByOne ? chain_kernel<kOneByOne>
                                           : chain_kernel<kTogether>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(stage_bytes));
  kernel<<<dim3((top_k + kThreads - 1) / kThreads, batch), kThreads, stage_bytes, stream>>>(chain);
}

void run_read_rows(const uint8_t* host, uint8_t* out, const int* rows, int num_rows, int row_bytes, int num_ctas,
                   cudaStream_t stream) {
  if (row_bytes <= 1536)
    read_rows_kernel<3><<<num_ctas, 512, 0, stream>>>(host, out, rows, num_rows, row_bytes);
  else
    read_rows_kernel<6><<<num_ctas, 512, 0, stream>>>(host, out, rows, num_rows, row_bytes);
}
}
