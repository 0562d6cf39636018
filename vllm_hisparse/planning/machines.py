"""GPUs, and an estimate of the memory that vLLM leaves for KV on one of them."""

from __future__ import annotations

from vllm_hisparse.config import GIB, MIB

from .models import Model

# Device memory in MiB, as published output of nvidia-smi shows it.
GPU_MEMORY_MIB = {
    "h100": 81559,
    "h20": 97871,
    "gh200": 97871,
    "h200": 143771,
    "b200": 183359,
    "b300": 275040,
}
GPU_UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization
# Assumed, not measured: CUDA context, activations of an 8,192-token step, CUDA graphs, communication.
WORKING_BYTES = 5 * GIB


def kv_memory_bytes(
    model: Model,
    gpu: str,
    tensor_parallel: int,
    speculative_tokens: int,
    utilization: float = GPU_UTILIZATION,
) -> int:
    """KV memory of one GPU: vLLM's share of the device, less weights and working memory. May be negative.

    An estimate, good to a few GiB. vLLM logs the true figure as "Available KV cache memory".
    """
    share = int(GPU_MEMORY_MIB[gpu] * MIB * utilization)
    return share - model.weight_bytes(tensor_parallel, speculative_tokens) - WORKING_BYTES
