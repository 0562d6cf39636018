#include "hisparse/cuda.h"
#include "hisparse/launch.cuh"
#include "hisparse/pages.cuh"

#include <algorithm>

namespace hisparse::cuda {
namespace {

// The link needs few CTAs; staging also copies pages that are on the device, which feeds on more.
constexpr int kPageCtas = 16;
constexpr int kGatherCtas = 32;

template <bool kToHost>
cudaError_t move_pages(const PagesParams& params, cudaStream_t stream) {
  if (params.num_pages == 0 || params.num_layers == 0) return cudaSuccess;
  if (params.row_bytes % 16 != 0 || params.num_layers > kMaxPageLayers) return cudaErrorInvalidValue;
  return launch(pages_kernel<kToHost>, dim3(kPageCtas), kPageThreads, 0, stream, params);
}

}  // namespace

cudaError_t write_pages(const PagesParams& params, cudaStream_t stream) { return move_pages<true>(params, stream); }

cudaError_t read_pages(const PagesParams& params, cudaStream_t stream) { return move_pages<false>(params, stream); }

cudaError_t gather_pages(const GatherParams& params, cudaStream_t stream) {
  if (params.num_pages == 0) return cudaSuccess;
  if (params.row_bytes % 16 != 0) return cudaErrorInvalidValue;
  return launch(gather_kernel, dim3(std::min(kGatherCtas, params.num_pages * 4)), kPageThreads, 0, stream, params);
}

}  // namespace hisparse::cuda
