// Floors of the resolver benchmark, on the run's own machine and memory: an empty kernel, a plain block-table
// translation, and random rows read from host memory by a loop that does nothing else.
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

void run_read_rows(const uint8_t* host, uint8_t* out, const int* rows, int num_rows, int row_bytes, int num_ctas,
                   cudaStream_t stream) {
  if (row_bytes <= 1536)
    read_rows_kernel<3><<<num_ctas, 512, 0, stream>>>(host, out, rows, num_rows, row_bytes);
  else
    read_rows_kernel<6><<<num_ctas, 512, 0, stream>>>(host, out, rows, num_rows, row_bytes);
}
}
