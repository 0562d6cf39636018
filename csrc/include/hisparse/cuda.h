// CUDA launchers. Torch-free: params structs and a stream; capturable, no allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "hisparse/params.h"

namespace hisparse::cuda {

cudaError_t resolve(const ResolveParams& params, cudaStream_t stream);
cudaError_t fetch(const FetchParams& params, cudaStream_t stream);
cudaError_t write_pages(const PagesParams& params, cudaStream_t stream);
cudaError_t read_pages(const PagesParams& params, cudaStream_t stream);
cudaError_t gather_pages(const GatherParams& params, cudaStream_t stream);
cudaError_t write_words(const WordsParams& params, cudaStream_t stream);
cudaError_t forget(const ForgetParams& params, cudaStream_t stream);

}  // namespace hisparse::cuda
