"""vLLM's connector interface: dispatch by role and forwarding, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from .config import HiSparseConfig, read_options
from .engine_checks import validate_engine
from .messages import Acknowledgement, encode
from .metrics import HiSparsePromMetrics, HiSparseStats
from .planning.layout import layout_from

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

    from .scheduler.coordinator import HiSparseCoordinator
    from .scheduler.queueing import QueueOrder
    from .scheduler.sampler import SchedulerSampler
    from .worker.sampler import RankSampler
    from .worker.worker import HiSparseWorker

__all__ = ["HiSparseConnector"]

logger = init_logger("vllm.vllm_hisparse")  # below vLLM's root, so that its handlers and levels apply


@dataclass
class HiSparseMetadata(KVConnectorMetadata):
    """A step's message, encoded; no bytes when nothing changed."""

    payload: bytes = b""


@dataclass
class HiSparseWorkerMetadata(KVConnectorWorkerMetadata):
    """A rank's acknowledgement; vLLM aggregates the ranks' before the scheduler sees them."""

    ack: Acknowledgement

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Counts of both."""
        assert isinstance(other, HiSparseWorkerMetadata)
        return HiSparseWorkerMetadata(self.ack.plus(other.ack))


class HiSparseConnector(KVConnectorBase_V1, SupportsHMA):
    """Takes the place of vLLM's connector of the same name.

    One instance a role; each uses one half of the methods.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.coordinator: HiSparseCoordinator | None = None  # scheduler role, once the cache manager is bound
        self.worker: HiSparseWorker | None = None  # worker role, once the KV caches are registered
        self._queue: QueueOrder | None = None  # scheduler role, with the coordinator
        self._sampler: SchedulerSampler | RankSampler | None = None  # of whichever role this is

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Blocks outermost: indexer, resident and hot blocks share one pool.

        vLLM asks before it allocates KV memory, which makes this the place to refuse a configuration.
        """
        validate_engine(vllm_config)
        return "BLHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False. vLLM asks while it builds its configuration: unreadable options are refused there."""
        read_options(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for pages: a preempted request finds on the host what was written."""
        return False

    # ---- both roles

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this role counted since the last call."""
        sample = self._sampler.sample() if self._sampler is not None else None
        return HiSparseStats(sample) if sample else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Stats that vLLM has carried between processes as a dict."""
        return HiSparseStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Prometheus metrics, see `metrics.METRICS`."""
        return HiSparsePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler role

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Build the coordinator around the managers that vLLM made for our groups."""
        from .planning.report import startup_lines
        from .scheduler.coordinator import HiSparseCoordinator
        from .scheduler.queueing import QueueOrder
        from .scheduler.sampler import SchedulerSampler
        from .scheduler.steady import SteadySlots

        config = self._vllm_config
        self.coordinator = HiSparseCoordinator(
            kv_cache_manager.coordinator.single_type_managers,
            layout_from(config, self._kv_cache_config),
            HiSparseConfig.from_vllm_config(config),
            num_ranks=config.parallel_config.world_size,
            num_reprefillable=kv_cache_manager.coordinator.num_reprefillable_tokens,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
        )
        self._queue = QueueOrder(self.coordinator, kv_cache_manager)
        kv_cache_manager.get_computed_blocks = self._queue.look_up
        steady = SteadySlots(kv_cache_manager, self.coordinator)
        kv_cache_manager.allocate_slots = steady.allocate
        kv_cache_manager.cache_blocks = steady.publish
        self._sampler = SchedulerSampler(self.coordinator)
        for line in startup_lines(config, self.coordinator.layout):
            logger.info("HiSparse: %s", line)

    @property
    def _scheduler(self) -> HiSparseCoordinator:
        assert self.coordinator is not None, "scheduler call before the KV cache manager was bound"
        return self.coordinator

    @property
    def _admissions(self) -> QueueOrder:
        assert self._queue is not None, "scheduler call before the KV cache manager was bound"
        return self._queue

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        self._scheduler.requests[request.request_id] = request
        self._admissions.note_arrival()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Host pages are found by vLLM's own prefix lookup, not as external tokens; None for a request that
        lets others pass.
        """
        return (None if self._admissions.must_wait(request, num_computed_tokens) else 0), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The managers report allocations; the queue moves on."""
        self._admissions.note_admission(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's message. It has to be applied before the forward."""
        self._admissions.end_step()
        scheduler_output.has_sync_kv_loads = True
        return HiSparseMetadata(encode(self._scheduler.plan(scheduler_output)))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Acknowledgements of all ranks."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, HiSparseWorkerMetadata):
            self._scheduler.acknowledge(meta.ack)

    def has_pending_block_frees(self) -> bool:
        """Copies in flight make leases returnable: better to wait for them than to preempt."""
        return self._scheduler.wait_for_copies()

    def has_pending_push_work(self) -> bool:
        """Keep stepping until every transfer is acknowledged, also after the last request."""
        return len(self._scheduler.ledger) > 0

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The managers free the blocks; transfers in flight keep theirs."""
        self._admissions.forget(request.request_id)
        self._scheduler.requests.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished`."""
        return self.request_finished(request, [])

    # ---- worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pick up the runtime that the allocation of the caches has made."""
        from .runtime.binding import current_runtime
        from .runtime.recorder import Recorder
        from .worker.copies import InlineCopies, StreamCopies
        from .worker.sampler import RankSampler
        from .worker.worker import HiSparseWorker

        runtime = current_runtime()
        on_cuda = runtime.device.type == "cuda"
        parallel = self._vllm_config.parallel_config
        self.worker = HiSparseWorker(
            runtime,
            StreamCopies(runtime.device) if on_cuda else InlineCopies(),
            rank=parallel.rank,
            has_dummy_steps=parallel.data_parallel_size > 1,
        )
        self._sampler = RankSampler(runtime, parallel.rank)
        if runtime.config.trace_path is not None and parallel.rank == parallel.data_parallel_index == 0:
            runtime.recorder = Recorder(runtime)

    @property
    def _rank(self) -> HiSparseWorker:
        assert self.worker is not None, "worker call before the KV caches were registered"
        return self.worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Apply the step's message before the forward."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, HiSparseMetadata)
        request_ids = kwargs.get("request_ids") or []
        self._rank.begin_step(meta.payload, request_ids, kwargs.get("scheduler_output"))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """The step is over."""
        self._rank.end_step()

    def shutdown(self) -> None:
        """The engine ends: write what was recorded, and give the host pool back, which is there before the KV
        caches are.
        """
        if self.role is not KVConnectorRole.WORKER:
            return
        from .runtime.host_memory import release_host_memory

        if self.worker is not None and self.worker.runtime.recorder is not None:
            self.worker.runtime.recorder.write()
        release_host_memory()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's acknowledgement."""
        ack = self._rank.take_acknowledgement()
        return None if ack is None else HiSparseWorkerMetadata(ack)
