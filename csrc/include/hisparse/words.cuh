// Writes single words of the tables that the kernels read. The words travel in the launch's own parameters: no copy
// to the device goes before it, and nothing has to outlive the call.
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/params.h"

namespace hisparse::cuda {

inline constexpr int kMaxWords = 448;  // of a launch, whose parameters may take 4 KiB

struct Words {
  int32_t at[kMaxWords];
  int32_t value[kMaxWords];
  int32_t num_writes;
};

__global__ void __launch_bounds__(kMaxWords) words_kernel(int32_t* words, const __grid_constant__ Words writes) {
  wait_for_dependencies();
  release_dependents();
  const int i = threadIdx.x;
  if (i < writes.num_writes) words[writes.at[i]] = writes.value[i];
}

}  // namespace hisparse::cuda
