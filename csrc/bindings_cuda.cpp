// CUDA implementations of the schemas in bindings.cpp: each kernel runs on the current stream of the device that holds
// the tensors it writes.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "hisparse/bindings.h"
#include "hisparse/cuda.h"

namespace hisparse {

struct Cuda {
  static constexpr auto resolve = &cuda::resolve;
  static constexpr auto fetch = &cuda::fetch;
  static constexpr auto write_pages = &cuda::write_pages;
  static constexpr auto read_pages = &cuda::read_pages;
  static constexpr auto gather_pages = &cuda::gather_pages;
  static constexpr auto write_words = &cuda::write_words;
  static constexpr auto forget = &cuda::forget;

  template <typename Kernel, typename Params>
  static void launch(Kernel kernel, const Params& params, const Tensor& on) {
    const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
    const cudaError_t error = kernel(params, static_cast<cudaStream_t>(stream));
    STD_TORCH_CHECK(error == cudaSuccess, "got ", cudaGetErrorName(error),
                    " from a launch: ", cudaGetErrorString(error));
  }
};

}  // namespace hisparse

STABLE_TORCH_LIBRARY_IMPL(hisparse, CUDA, m) { hisparse::Ops<hisparse::Cuda>::register_in(m); }
