#include "hisparse/cuda.h"
#include "hisparse/fetch.cuh"
#include "hisparse/launch.cuh"

namespace hisparse::cuda {
namespace {

// 16 CTAs fill a PCIe Gen5 x16 link when there is much to move; with few rows, where latency rules, 32 are 1 us faster
// (docs/kernel.md). They wait far more than they compute, and share their SMs.
constexpr int kFetchCtas = 32;
constexpr int kMaxFetchRows = 12000;  // 48 KiB of shared memory

template <int kPieces>
cudaError_t launch_fetch(const FetchParams& params, cudaStream_t stream) {
  return launch(fetch_kernel<kPieces>, dim3(kFetchCtas), kFetchThreads, params.num_batch_rows * 4, stream, params,
                Divider::of(params.block_size));
}

}  // namespace

cudaError_t fetch(const FetchParams& params, cudaStream_t stream) {
  if (params.skip_io || params.num_batch_rows == 0 || params.num_layers == 0) return cudaSuccess;
  if (params.row_bytes % 16 != 0 || params.num_batch_rows > kMaxFetchRows) return cudaErrorInvalidValue;
  const int64_t pieces = static_cast<int64_t>(params.row_bytes / 16) * params.num_layers;
  if (pieces > INT32_MAX / 16) return cudaErrorInvalidValue;
  if (pieces <= 64) return launch_fetch<2>(params, stream);
  if (pieces <= 96) return launch_fetch<3>(params, stream);
  return launch_fetch<6>(params, stream);
}

}  // namespace hisparse::cuda
