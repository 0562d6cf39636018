#include "hisparse/words.cuh"

#include "hisparse/cuda.h"
#include "hisparse/launch.cuh"

#include <algorithm>

namespace hisparse::cuda {

cudaError_t write_words(const WordsParams& p, cudaStream_t stream) {
  for (int32_t first = 0; first < p.num_writes; first += kMaxWords) {
    Words writes;
    writes.num_writes = std::min(p.num_writes - first, kMaxWords);
    for (int32_t i = 0; i < writes.num_writes; ++i) {
      writes.at[i] = static_cast<int32_t>(p.at[first + i]);
      writes.value[i] = static_cast<int32_t>(p.value[first + i]);
    }
    const int threads = (writes.num_writes + 31) / 32 * 32;
    const cudaError_t error = launch(words_kernel, dim3(1), threads, 0, stream, p.words, writes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace hisparse::cuda
