"""Stand-ins for Triton kernels that the interpreter cannot run, or runs slowly.

An interpreted program costs a millisecond or two, whatever it computes: some fifty calls of the language,
each a chain of Python calls around one of NumPy's. A decode step of a few requests has dozens of programs.

A stand-in computes a whole launch. It has the parameters of the kernel it replaces, by the same names, or the
first of them and `launch` for the rest, and gives the same bits; the tests compare it with the interpreted
kernel. Where it cannot, it writes nothing and returns the grid to launch the kernel on. A kernel of another
vLLM version that has other parameters stays with the interpreter.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from pkgutil import resolve_name
from typing import Any

from vllm.logger import init_logger

from . import blocks, indexer, inputs, sampling

logger = init_logger("vllm.vllm_hisparse")

_RUNNER = "vllm.v1.worker.gpu"

StandIn = Callable[..., tuple[int, ...] | None]

STAND_INS: dict[str, StandIn] = {
    "vllm.model_executor.layers.quantization.utils.fp8_utils._per_token_group_quant_fp8": (
        indexer.quantize_groups
    ),
    "vllm.v1.attention.backends.mla.indexer.BuildPrefillChunkMetadataKernel.kernel": (
        indexer.build_prefill_chunk_metadata
    ),
    f"{_RUNNER}.block_table._compute_slot_mappings_kernel": blocks.compute_slot_mappings,
    f"{_RUNNER}.block_table._gather_block_tables_kernel": blocks.gather_block_tables,
    f"{_RUNNER}.buffer_utils._apply_write_kernel": blocks.apply_write,
    f"{_RUNNER}.input_batch._prepare_prefill_inputs_kernel": inputs.prepare_prefill_inputs,
    f"{_RUNNER}.input_batch._prepare_pos_seq_lens_kernel": inputs.prepare_pos_seq_lens,
    f"{_RUNNER}.input_batch._combine_sampled_and_draft_tokens_kernel": (
        inputs.combine_sampled_and_draft_tokens
    ),
    f"{_RUNNER}.input_batch._expand_idx_mapping_kernel": inputs.expand_idx_mapping,
    f"{_RUNNER}.input_batch._get_num_sampled_and_rejected_kernel": inputs.get_num_sampled_and_rejected,
    f"{_RUNNER}.input_batch._post_update_kernel": inputs.post_update,
    f"{_RUNNER}.sample.logprob._topk_log_softmax_kernel": sampling.topk_log_softmax,
    f"{_RUNNER}.sample.logprob._ranks_kernel": sampling.ranks,
    f"{_RUNNER}.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
}

originals: dict[StandIn, Any] = {}  # the kernel that each registered stand-in replaces


def register() -> None:
    """Routes vLLM's launches to the stand-ins. Idempotent: a second registration would only warn."""
    if originals:
        return
    from vllm.triton_utils.dispatcher import register_kernels

    accepted = {}
    for name, stand_in in STAND_INS.items():
        kernel = resolve_name(name)
        if not takes(stand_in, kernel.arg_names):
            logger.info("%s has other parameters than its stand-in: it is interpreted.", name)
            continue
        accepted[name] = _or_original(stand_in, kernel)
        originals[stand_in] = kernel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it looks at every attribute of every module
        register_kernels(accepted)


def takes(stand_in: StandIn, names: list[str]) -> bool:
    """Whether a kernel with parameters of these names can be launched as `stand_in`."""
    parameters = inspect.signature(stand_in).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    if len(own) == len(parameters):
        return own == names
    return own == names[: len(own)]


def _or_original(stand_in: StandIn, kernel: Any) -> Callable[..., None]:
    """Launches `stand_in`, then `kernel` if it has to."""

    @wraps(stand_in)
    def launch(*args: Any, **kwargs: Any) -> None:
        grid = stand_in(*args, **kwargs)
        if grid is not None:
            kernel[grid](*args, **kwargs)

    return launch
