"""How many requests a setup serves, before there is an engine: what `vllm-hisparse plan` and the page show.

One arithmetic: a setup is turned into what the planner reads of a VllmConfig, and bounds.py, geometry.py and
sizes.py do the rest, as they do in an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from types import SimpleNamespace
from typing import Any

from vllm_hisparse.config import CONNECTOR, GIB, HiSparseConfig, user_error

from .bounds import Concurrency, RequestBlocks, admission_concurrency, request_blocks, steady_concurrency
from .geometry import round_up
from .layout import LayerPlan, Layout
from .models import Model, layer_plan
from .sizes import NUM_RESERVED_HOST_BLOCKS, device_blocks, host_block_bytes, host_blocks, needed_host_blocks

KV_DTYPES = ("fp8", "bf16", "fp32")
MAX_NUM_SEQS = 256
STEP_TOKENS = 8192  # vLLM's default of --max-num-batched-tokens for a server
HOST_STEP = GIB // 64  # a recommended host pool is a multiple of this,
WHOLE_GIB = 8 * GIB  # or of a GiB if it is larger
STEPS_IN_FLIGHT = 2  # vLLM with asynchronous scheduling and no pipeline parallelism


@dataclass(frozen=True)
class Setup:
    """A server, as far as concurrency depends on it: one data-parallel replica on one node."""

    model: Model
    kv_bytes: int  # device memory for KV on one GPU
    context: int  # --max-model-len, in tokens
    host_pool_bytes: int | None = None  # that its ranks share; None: as much as the device can use
    speculative_tokens: int = 0
    kv_dtype: str = "fp8"
    max_requests: int = MAX_NUM_SEQS
    step_tokens: int = STEP_TOKENS
    steps_in_flight: int = STEPS_IN_FLIGHT
    start_hot_rows: int | None = None  # vLLM's device_buffer_size
    options: Mapping[str, Any] = field(default_factory=dict)  # of the connector, without host_pool_gib

    def __post_init__(self) -> None:
        sizes = {
            "context": self.context,
            "max_num_seqs": self.max_requests,
            "max_num_batched_tokens": self.step_tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                raise user_error(
                    got=f"{name}={value}", need="at least 1", because="nothing is served otherwise"
                )
        if self.speculative_tokens < 0:
            raise user_error(
                got=f"{self.speculative_tokens} speculative tokens", need="0 or more", because="it is a count"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise user_error(
                got=f"KV dtype {self.kv_dtype!r}", need=f"one of {KV_DTYPES}", because="rows have no other"
            )
        limit = self.model.max_context
        if limit and self.context > limit:
            raise user_error(
                got=f"a context of {self.context} tokens",
                need=f"at most {limit}",
                because=f"{self.model.name} has no more positions",
            )

    def vllm_config(self) -> Any:
        """What the planner reads of a VllmConfig."""
        host = (self.host_pool_bytes or GIB) / GIB
        extra = {**self.options, "host_pool_gib": host}
        speculative = SimpleNamespace(num_speculative_tokens=self.speculative_tokens)
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_extra_config=extra
            ),
            attention_config=SimpleNamespace(
                hisparse_config=SimpleNamespace(
                    device_buffer_size=self.start_hot_rows, eager_host_mirror=True
                )
            ),
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(index_topk=self.model.top_k), max_model_len=self.context
            ),
            speculative_config=speculative,
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.max_requests, max_num_batched_tokens=self.step_tokens
            ),
            max_in_flight_tokens=self.steps_in_flight * self.step_tokens,
        )


@dataclass(frozen=True)
class Estimate:
    """Pools and bounds of a setup. Concurrency counts requests of `context` tokens."""

    setup: Setup
    config: HiSparseConfig
    plan: LayerPlan
    need: RequestBlocks
    num_device_blocks: int
    num_host_blocks: int

    @cached_property
    def num_regions(self) -> int:
        """Hot regions that may exist at a time."""
        return self.need.num_regions(
            self.num_device_blocks, self.plan.block_stride_bytes, self.setup.max_requests
        )

    @cached_property
    def plain(self) -> Concurrency:
        """vLLM without HiSparse: blocks of 64 tokens in all layers, no padding, every page on the device
        (get_max_concurrency_for_kv_cache_config in vLLM).
        """
        shape = self.plan.geometry.shape
        block = shape.num_layers * shape.page_bytes + shape.num_indexer_layers * shape.indexer_page_bytes
        fit = Fraction(self.setup.kv_bytes // block, self.need.num_pages)
        most = self.setup.max_requests
        return Concurrency(device=fit, host=fit, num_regions=most, max_requests=most)

    @cached_property
    def admission(self) -> Concurrency:
        """HiSparse: requests that could all be admitted at once."""
        return admission_concurrency(
            self.need, self.num_device_blocks, self.num_host_blocks, self.setup.max_requests
        )

    @cached_property
    def steady(self) -> Concurrency:
        """HiSparse: requests that decode at a time, with hot regions as they are granted."""
        return self._steady(self.need.start_hot_blocks)

    @cached_property
    def floor(self) -> Concurrency:
        """HiSparse: the same with the smallest regions that can serve a step."""
        return self._steady(self.need.floor_hot_blocks)

    @cached_property
    def layout(self) -> Layout:
        """What an engine would lay out."""
        need, plan = self.need, self.plan
        return Layout(
            geometry=plan.geometry,
            layers=plan.layers,
            index_groups=plan.index_groups,
            indexer_layers=plan.indexer_layers,
            num_device_blocks=self.num_device_blocks,
            num_host_blocks=self.num_host_blocks,
            max_requests=self.setup.max_requests,
            max_positions=self.setup.context,
            num_regions=self.num_regions,
            floor_hot_blocks=need.floor_hot_blocks,
            start_hot_blocks=need.start_hot_blocks,
            max_hot_blocks=need.max_hot_blocks,
            tail_pages=need.tail_pages,
            admission_pages=need.admission_pages,
        )

    @property
    def starts(self) -> bool:
        """Whether one request fits at all: an engine refuses to start otherwise."""
        return self.admission.device >= 1 and self.num_host_blocks >= needed_host_blocks(self.need)

    @property
    def host_pool_bytes(self) -> int:
        """Host pool, whole blocks."""
        return self.num_host_blocks * host_block_bytes(self.plan)

    @cached_property
    def needed_host_pool_bytes(self) -> int:
        """Smallest host pool that limits nothing else: every page of the requests that fit in the other
        resources with the smallest regions.
        """
        floor = self.floor
        requests = min(floor.device, Fraction(floor.num_regions), Fraction(floor.max_requests))
        pages = max(ceil(requests * self.need.num_pages), self.need.num_pages)
        return (pages + NUM_RESERVED_HOST_BLOCKS) * host_block_bytes(self.plan)

    @property
    def host_budget_bytes(self) -> int:
        """Host pool as it is asked for: given, or what is needed in round figures."""
        if self.setup.host_pool_bytes is not None:
            return self.setup.host_pool_bytes
        needed = self.needed_host_pool_bytes
        return round_up(needed, GIB if needed > WHOLE_GIB else HOST_STEP)

    def _steady(self, hot_blocks: int) -> Concurrency:
        return steady_concurrency(
            self.need,
            self.num_device_blocks,
            self.num_host_blocks,
            self.num_regions,
            self.setup.max_requests,
            hot_blocks,
        )


def estimate(setup: Setup) -> Estimate:
    """Pools and bounds. Raises ValueError for options that contradict each other."""
    vllm_config = setup.vllm_config()
    config = HiSparseConfig.from_vllm_config(vllm_config)
    plan = layer_plan(setup.model, setup.kv_dtype, setup.speculative_tokens, config.max_indexer_pages)
    result = Estimate(
        setup=setup,
        config=config,
        plan=plan,
        need=request_blocks(vllm_config, plan),
        num_device_blocks=max(1, device_blocks(vllm_config, plan, max(0, setup.kv_bytes))),
        num_host_blocks=1,
    )
    return replace(result, num_host_blocks=max(1, host_blocks(plan, result.host_budget_bytes)))
