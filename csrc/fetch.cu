#include "hisparse/cuda.h"
#include "hisparse/fetch.cuh"
#include "hisparse/launch.cuh"

#include <algorithm>

namespace hisparse::cuda {
namespace {

// 16 CTAs fill a PCIe Gen5 x16 link when there is much to move; with few rows, where latency rules, 32 are 1 us faster
// (docs/kernel.md). They wait far more than they compute.
constexpr int kFetchCtas = 32;
// 24 KiB of shared memory, beside 20 KiB that every launch has. engine_checks.py tells users.
constexpr int kMaxFetchRows = 6000;

int divide_up(int number, int divisor) { return (number + divisor - 1) / divisor; }

// As many batch rows as the CTAs can look up with an entry a thread, shared evenly.
FetchShape make_shape(const FetchParams& p) {
  FetchShape shape{};
  shape.block = Divider::of(p.block_size);
  const int64_t positions = static_cast<int64_t>(p.max_pages) * p.block_size;
  const int least_chunks = std::max(divide_up(p.top_k, kMaxChunk), 1);
  const bool possible = p.topk != nullptr && p.top_k > 0 && p.plan_capacity > 0 && positions <= INT32_MAX;
  shape.num_positions = possible ? static_cast<int32_t>(positions) : 0;
  shape.early_rows = possible ? std::min({kFetchCtas / least_chunks, p.num_selected_rows, kMaxEarlyRows}) : 0;
  shape.num_chunks = shape.early_rows > 0 ? kFetchCtas / shape.early_rows : 1;
  shape.chunk = divide_up(p.top_k, shape.num_chunks);
  return shape;
}

template <int kPieces, int kEarly>
cudaError_t launch_fetch(const FetchParams& params, cudaStream_t stream) {
  return launch(fetch_kernel<kPieces, kEarly>, dim3(kFetchCtas), kFetchThreads, params.num_batch_rows * 4, stream,
                params, make_shape(params));
}

}  // namespace

cudaError_t fetch(const FetchParams& params, cudaStream_t stream) {
  if (params.skip_io || params.num_batch_rows == 0 || params.num_layers == 0) return cudaSuccess;
  if (params.row_bytes % 16 != 0 || params.num_batch_rows > kMaxFetchRows) return cudaErrorInvalidValue;
  const int64_t pieces = static_cast<int64_t>(params.row_bytes / 16) * params.num_layers;
  if (pieces > INT32_MAX / 16) return cudaErrorInvalidValue;
  if (pieces <= 64) return launch_fetch<2, 4>(params, stream);
  if (pieces <= 96) return launch_fetch<3, 3>(params, stream);
  if (pieces <= 192) return launch_fetch<6, 2>(params, stream);
  return launch_fetch<6, 0>(params, stream);
}

}  // namespace hisparse::cuda
