#include "hisparse/cuda.h"
#include "hisparse/forget.cuh"
#include "hisparse/launch.cuh"
#include "hisparse/resolve.cuh"

#include <algorithm>
#include <cstdint>

namespace hisparse::cuda {
namespace {

constexpr int kMaxSlices = 64;  // CTAs that share a prefill row

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

template <int kThreads, int E, int S, bool kLrfu, bool kVector>
cudaError_t launch_resolve(const ResolveParams& p, int num_slices, cudaStream_t stream) {
  using Layout = ResolveLayout<kThreads, E, S>;
  const int shared_pages =
      Layout::kSharesPages && p.max_pages <= kMaxSharedPages && aligned(p.resident, 16) && aligned(p.host, 16)
          ? p.max_pages
          : 0;
  const int shared_blocks = Layout::kSharesPages && p.max_hot_blocks <= kThreads ? p.max_hot_blocks : 0;
  const ResolveShape shape{Divider::of(p.block_size), p.max_pages * p.block_size, shared_pages, shared_blocks};
  const int tables = (shared_blocks + 3) / 4 * 4 + shared_pages;
  return launch(resolve_kernel<kThreads, E, S, kLrfu, kVector>, dim3(std::max(p.num_batch_rows, 1), num_slices),
                kThreads, Layout::kBytes + tables * sizeof(int32_t), stream, p, shape);
}

// Few threads where they suffice: what is done once a thread outweighs what is done once an entry.
template <bool kLrfu>
cudaError_t launch_policy(const ResolveParams& p, int num_slices, cudaStream_t stream) {
  const int entries = p.max_query_rows * p.top_k;
  const bool vector = p.top_k % 4 == 0 && p.max_slots % 4 == 0 && aligned(p.topk, 16) && aligned(p.rows, 16) &&
                      aligned(p.key, 16) && aligned(p.position_of, 16);
  if (entries <= 2048 && p.max_slots <= 4096)
    return vector ? launch_resolve<512, 4, 8, kLrfu, true>(p, num_slices, stream)
                  : launch_resolve<512, 4, 8, kLrfu, false>(p, num_slices, stream);
  if (!vector) return launch_resolve<1024, 32, 32, kLrfu, false>(p, num_slices, stream);
  if (entries <= 4096 && p.max_slots <= 8192) return launch_resolve<512, 8, 16, kLrfu, true>(p, num_slices, stream);
  if (entries <= 8192 && p.max_slots <= 16384) return launch_resolve<1024, 8, 16, kLrfu, true>(p, num_slices, stream);
  if (entries <= 16384) return launch_resolve<1024, 16, 32, kLrfu, true>(p, num_slices, stream);
  return launch_resolve<1024, 32, 32, kLrfu, true>(p, num_slices, stream);
}

}  // namespace

cudaError_t resolve(const ResolveParams& p, cudaStream_t stream) {
  const int64_t entries = static_cast<int64_t>(p.max_query_rows) * p.top_k;
  const int64_t positions = static_cast<int64_t>(p.max_pages) * p.block_size;
  if (entries > 32 * 1024 || p.max_slots > 32 * 1024 || p.max_query_rows > kMaxVerifyRows || positions > INT32_MAX ||
      p.num_parts < 1 || p.num_parts > kMaxParts)
    return cudaErrorInvalidValue;
  // More query rows than verify rows can explain: there is prefill, whose rows are shared among several CTAs.
  const int num_rows = std::max(p.num_batch_rows, 1);
  const bool prefill = p.num_query_rows > static_cast<int64_t>(num_rows) * p.max_query_rows;
  const int num_slices = prefill ? std::min(kMaxSlices, p.num_query_rows / num_rows) : 1;
  return p.policy == kLrfu ? launch_policy<true>(p, num_slices, stream) : launch_policy<false>(p, num_slices, stream);
}

cudaError_t forget(const ForgetParams& p, cudaStream_t stream) {
  if (p.num_forgets == 0) return cudaSuccess;
  return launch(forget_kernel, dim3(p.num_forgets, kForgetCtas), kForgetThreads, 0, stream, p);
}

}  // namespace hisparse::cuda
