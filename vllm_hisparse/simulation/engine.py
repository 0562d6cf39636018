"""vLLM's scheduler for a served model, with HiSparse's scheduler role or without: no weights, no worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from vllm_hisparse.config import GIB
from vllm_hisparse.planning.geometry import Geometry
from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
from vllm_hisparse.simulation.model import GLM_5_2, PAGE_TOKENS, ServedModel
from vllm_hisparse.testing.engine_config import EngineOptions, build_scheduler, make_vllm_config

__all__ = ["EngineSize", "SchedulerSide"]

CONFIG_MODEL_LEN = 1024  # what the tiny model behind vLLM's configuration takes


@dataclass(frozen=True)
class EngineSize:
    """Memory and limits of an engine. The KV of an MLA model is replicated, so one rank stands for all."""

    model: ServedModel = GLM_5_2
    device_gib: float = 24.0  # KV memory of one GPU
    host_gib: float = 1024.0  # host pool, shared by the ranks of a node
    max_requests: int = 256
    max_model_len: int = 131072
    max_step_tokens: int = 8192
    low: float = 0.08
    high: float = 0.20
    max_passing: int = 16
    num_device_blocks: int | None = None  # instead of what `device_gib` holds

    @property
    def num_plain_blocks(self) -> int:
        """Blocks of a pool without HiSparse: a page of rows and keys each, nothing padded."""
        if self.num_device_blocks is not None:
            return self.num_device_blocks
        page_bytes = PAGE_TOKENS * (self.model.token_bytes + self.model.token_key_bytes)
        return int(self.device_gib * GIB) // page_bytes


class SchedulerSide:
    """One engine's scheduler and what it takes to feed it requests.

    Attributes:
        scheduler: vLLM's.
        coordinator: ours, None without HiSparse.
    """

    def __init__(
        self,
        size: EngineSize,
        hisparse: bool = True,
        coordinator: type[HiSparseCoordinator] = HiSparseCoordinator,
        geometry: Geometry | None = None,
    ) -> None:
        """`coordinator` and `geometry` take the place of our own: for other policies and other layouts."""
        self.size = size
        with TemporaryDirectory() as directory:
            self.config = _vllm_config(size, hisparse, Path(directory))
        kv_cache_config = _hisparse_pools(self.config, size, geometry) if hisparse else _plain_pool(size)
        self.config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        # Where the connector looks it up when it is bound.
        with patch("vllm_hisparse.scheduler.coordinator.HiSparseCoordinator", coordinator):
            self.scheduler, self._hasher = build_scheduler(self.config, kv_cache_config)
        self.coordinator = self.scheduler.connector.coordinator if hisparse else None

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> Any:
        """A request arrives; returns vLLM's object."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def result(self, output: Any, meta: Any = None, token: int = 1) -> Any:
        """A step's ModelRunnerOutput: `token` for each request whose prompt is computed."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        request_ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        done = [requests[r].num_computed_tokens >= requests[r].num_tokens for r in request_ids]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[token] if has_token else [] for has_token in done],
            kv_connector_output=None if meta is None else KVConnectorOutput(kv_connector_worker_meta=meta),
        )


def _vllm_config(size: EngineSize, hisparse: bool, directory: Path) -> Any:
    options = EngineOptions(
        page_tokens=PAGE_TOKENS,
        max_requests=size.max_requests,
        max_step_tokens=size.max_step_tokens,
        max_model_len=CONFIG_MODEL_LEN,
        top_k=size.model.top_k,
    )
    config = make_vllm_config(options, directory)
    config.model_config.max_model_len = size.max_model_len
    config.scheduler_config.max_model_len = size.max_model_len
    config.cache_config.num_gpu_blocks_override = size.num_device_blocks
    # As users have it: regions start at twice top-k and may grow.
    config.kv_transfer_config.kv_connector_extra_config = {
        "host_pool_gib": size.host_gib,
        "low_watermark": size.low,
        "high_watermark": size.high,
        "max_passing": size.max_passing,
    }
    config.attention_config.hisparse_config = replace(
        config.attention_config.hisparse_config, device_buffer_size=None
    )
    if not hisparse:
        config.kv_transfer_config = None
        config.attention_config.hisparse_config = None
    return config


def _hisparse_pools(config: Any, size: EngineSize, geometry: Geometry | None) -> Any:
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    from vllm_hisparse.planning.groups import kv_cache_groups
    from vllm_hisparse.planning.pools import host_pool_bytes, kv_cache_config

    specs = dict(size.model.specs())
    if geometry is not None:
        specs |= _planned(kv_cache_groups(config, specs), geometry)
    groups = kv_cache_groups(config, specs)
    assert groups is not None
    pools = kv_cache_config(config, groups, int(size.device_gib * GIB), host_pool_bytes(config))
    return generate_scheduler_kv_cache_config([pools])


def _planned(groups: Any, geometry: Geometry) -> dict[str, Any]:
    """A resident spec with this geometry: planning takes over the plan of one that is there."""
    from vllm_hisparse.planning.specs import ResidentSpec

    name, spec = next(
        (g.layer_names[0], g.kv_cache_spec) for g in groups if isinstance(g.kv_cache_spec, ResidentSpec)
    )
    plan = replace(spec.plan, geometry=geometry)
    return {name: replace(spec, plan=plan)}


def _plain_pool(size: EngineSize) -> Any:
    """One group of all layers; its spec stands for them, since only the number of blocks counts here."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    specs = size.model.specs()
    spec = next(iter(specs.values()))
    return KVCacheConfig(
        num_blocks=size.num_plain_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(specs), spec)],
    )
