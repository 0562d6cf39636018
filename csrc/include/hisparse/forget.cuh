// Drops slots of hot regions between steps: a shrink, rewritten positions, or a reset. One row of CTAs a region.
#pragma once

#include "hisparse/device.cuh"
#include "hisparse/params.h"
#include "hisparse/policy.h"

namespace hisparse::cuda {

inline constexpr int kForgetThreads = 512;
inline constexpr int kForgetCtas = 8;  // a region

__global__ void __launch_bounds__(kForgetThreads) forget_kernel(const __grid_constant__ ForgetParams p) {
  wait_for_dependencies();
  release_dependents();
  const int64_t region = p.regions[blockIdx.x];
  const int first_slot = p.first_slot[blockIdx.x];
  const int first_position = p.first_position[blockIdx.x];
  int16_t* slot_of = p.slot_of + region * p.max_positions;
  int32_t* position_of = p.position_of + region * p.max_slots;
  int32_t* key = p.key + region * p.max_slots;
  const int index = blockIdx.y * kForgetThreads + threadIdx.x;
  constexpr int kStep = kForgetCtas * kForgetThreads;

  for (int slot = index; slot < p.max_slots; slot += kStep) {
    const int position = position_of[slot];
    if (position < 0 || (slot < first_slot && position < first_position)) continue;
    slot_of[position] = -1;
    position_of[slot] = -1;
    key[slot] = policy::kEmptyKey;
  }
  // Histories of rewritten positions go too; a reset forgets all of them. Both loops write -1, in any order.
  const int64_t first = first_slot <= 0 ? 0 : max(first_position, 0);
  for (int64_t position = first + index; position < p.max_positions; position += kStep) slot_of[position] = -1;
  if (first_slot <= 0 && index == 0) p.clock[region] = 0;
}

}  // namespace hisparse::cuda
