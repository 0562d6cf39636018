"""The CPU platform for DSA models."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from vllm_hisparse.config import CONNECTOR
from vllm_hisparse.engine_checks import validate_engine

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.config.attention import HiSparseConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.vllm_hisparse")

INDEXER_BLOCK_SIZE = 64
ROTARY_OFF = "-rotary_embedding"
WORKER = "vllm_hisparse.cpu.worker.HiSparseCpuWorker"

# What engine and worker processes start with, unless the user has an opinion.
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # small products; idle threads spin, which a shared machine pays for
    "TORCH_COMPILE_DISABLE": "1",  # small helpers of the tensor-parallel path would be compiled while serving
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else a worker needs a NUMA node of its own
}

# Attribute of a VllmConfig between the two platform hooks. It lives and dies with the config, so a
# construction that fails in between leaves nothing behind.
_HIDDEN = "_hisparse_hidden"


@dataclass(frozen=True)
class _Hidden:
    """What `hide_hisparse` took out of a config."""

    connector: str | None  # outer connector name, when a HiSparse connector is configured
    hisparse_config: HiSparseConfig | None
    cudagraph_mode: CUDAGraphMode | None  # as the user asked for it: later code clears it on the CPU


class HiSparseCpuPlatform(CpuPlatform):
    """CpuPlatform that also serves DSA models, with HiSparse if asked for."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Class path of the attention backend: ours, registered as CUSTOM, for sparse MLA."""
        if not attn_selector_config.use_sparse:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum.CUSTOM.get_path()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Runs before vLLM's own checks: hides HiSparse from them; DSA models run eagerly."""
        super().apply_config_platform_defaults(vllm_config)
        hide_hisparse(vllm_config)
        if not is_dsa(vllm_config):
            return
        compilation = vllm_config.compilation_config
        if compilation.mode is None:
            from vllm.config import CompilationMode

            compilation.mode = CompilationMode.NONE  # compiled shapes would decide the rounding
        if ROTARY_OFF not in compilation.custom_ops:
            # The C++ op takes a [tokens, heads, dim] query for [batch, tokens, hidden] (0.32).
            compilation.custom_ops.append(ROTARY_OFF)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Runs after vLLM's own checks: brings HiSparse back, undoes what the stock platform does to MLA.

        Raises:
            ValueError: the model or HiSparse cannot run as configured.
        """
        if restore_hisparse(vllm_config):
            logger.info("HiSparse on the CPU: for tests and demonstrations only.")
        if not is_dsa(vllm_config):
            super().check_and_update_config(vllm_config)
            return
        check_triton()
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = (
            scheduler.enable_chunked_prefill,
            cache.enable_prefix_caching,
            scheduler.max_num_batched_tokens,
        )
        asynchronous = scheduler.async_scheduling
        block_size = cache.block_size if cache.user_specified_block_size else INDEXER_BLOCK_SIZE
        check_block_size(block_size)
        stock_worker = vllm_config.parallel_config.worker_cls == "auto"

        super().check_and_update_config(vllm_config)

        scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = kept
        cache.block_size = block_size
        if vllm_config.use_v2_model_runner:
            scheduler.async_scheduling = asynchronous
        if stock_worker:
            vllm_config.parallel_config.worker_cls = WORKER
        for name, value in CHILD_ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Runs when a worker starts."""
        super().register_triton_kernel_overrides()
        from . import kernels

        kernels.register()


def is_dsa(vllm_config: VllmConfig) -> bool:
    """Whether the model selects its context with an indexer."""
    model = vllm_config.model_config
    return model is not None and getattr(model.hf_text_config, "index_topk", None) is not None


def hide_hisparse(vllm_config: VllmConfig) -> None:
    """Takes HiSparse out of a config until `restore_hisparse`: vLLM's "CUDA only" check must not see it.

    Also covers a MultiConnector with a HiSparse child. The sub-configs are replaced by copies: objects that
    the caller passed in are never changed, whatever happens in between.
    """
    transfer, attention = vllm_config.kv_transfer_config, vllm_config.attention_config
    connector = transfer.kv_connector if transfer is not None and transfer.has_connector(CONNECTOR) else None
    if connector is None and attention.hisparse_config is None:
        return
    hidden = _Hidden(connector, attention.hisparse_config, vllm_config.compilation_config.cudagraph_mode)
    setattr(vllm_config, _HIDDEN, hidden)
    vllm_config.attention_config = _replaced(attention, hisparse_config=None)
    if connector is not None:
        vllm_config.kv_transfer_config = _replaced(transfer, kv_connector=None)


def restore_hisparse(vllm_config: VllmConfig) -> bool:
    """Undoes `hide_hisparse`, with HiSparse's defaults where no options were given. False if nothing was
    hidden.

    Raises:
        ValueError: see `validate_engine`. vLLM has skipped its own checks of HiSparse while it was hidden.
    """
    hidden: _Hidden | None = vllm_config.__dict__.pop(_HIDDEN, None)
    if hidden is None:
        return False
    from vllm.config.attention import HiSparseConfig

    vllm_config.attention_config.hisparse_config = hidden.hisparse_config or HiSparseConfig()
    if hidden.connector is not None:
        assert vllm_config.kv_transfer_config is not None
        vllm_config.kv_transfer_config.kv_connector = hidden.connector
    validate_engine(vllm_config, hidden.cudagraph_mode)
    return True


def check_block_size(block_size: int) -> None:
    """Raises ValueError if the indexer cannot address blocks of that size."""
    if block_size % INDEXER_BLOCK_SIZE:
        raise ValueError(
            f"got block_size={block_size}; need a multiple of {INDEXER_BLOCK_SIZE} because the indexer "
            "addresses its keys in blocks of that size"
        )


def check_triton() -> None:
    """Raises ValueError if vLLM runs without Triton, and so without Model Runner V2."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise ValueError(
            "got no usable Triton; need the triton package and TRITON_INTERPRET unset or 1 because DSA "
            "models run under Model Runner V2, whose kernels are interpreted on the CPU"
        )


def _replaced(config: Any, **changes: Any) -> Any:
    """A shallow copy of a sub-config with some fields changed, without the validation of a new one."""
    result = copy(config)
    for name, value in changes.items():
        setattr(result, name, value)
    return result
