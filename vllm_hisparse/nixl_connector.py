"""Prompts computed by other engines: HiSparseNixlConnector, beside HiSparseConnector below MultiConnector.

A consumer (`kv_role` kv_consumer) reads the pages of a prompt from the engine that computed it, which may be
vLLM with its own NixlConnector. A producer (kv_producer) offers its pages the way NixlConnector does, whose
scheduler half, handshake and leases are used as they are.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector, NixlConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from .config import NIXL_CONNECTOR, nixl_options, user_error
from .peers.messages import PeerMessage
from .planning.layout import Layout

if TYPE_CHECKING:
    from .peers.borrowing import Borrower
    from .peers.marks import Marks
    from .peers.reader import Reader
    from .runtime.runtime import HiSparseRuntime
    from .scheduler.coordinator import HiSparseCoordinator

__all__ = ["HiSparseNixlConnector"]

_NOTHING = PeerMessage()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerMessage)
_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class HiSparseNixlMetadata(KVConnectorMetadata):
    """A step's message to the reading side, encoded, and NixlConnector's to the producing side."""

    payload: bytes = b""
    lending: NixlConnectorMetadata | None = None


class HiSparseNixlConnector(KVConnectorBase_V1, SupportsHMA):
    """One instance a role; each uses one half of the methods."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if vllm_config.attention_config.hisparse_config is None:
            raise user_error(
                got=f"{NIXL_CONNECTOR} without HiSparseConnector",
                need="both below MultiConnector, HiSparseConnector first,",
                because="it moves pages that HiSparse manages; without HiSparse, use vLLM's NixlConnector",
            )
        self._options = nixl_options(transfer.kv_connector_extra_config or {})
        self._is_producer = transfer.kv_role == "kv_producer"
        self._nixl: NixlConnector | None = None  # vLLM's: the scheduler's always, the worker's of a producer
        self._borrower: Borrower | None = (
            None  # scheduler role of a consumer, once the cache manager is bound
        )
        self._coordinator: HiSparseCoordinator | None = None  # scheduler role, likewise
        self.reader: Reader | None = None  # worker role of a consumer, once the KV caches are registered
        self._marks: Marks | None = None  # worker role of a producer, likewise

    def _make_nixl(self, role: KVConnectorRole, layout: Layout) -> NixlConnector:
        from .peers.lending import lent_kv_cache_config

        return NixlConnector(self._vllm_config, role, lent_kv_cache_config(self._kv_cache_config, layout))

    # ---- scheduler role

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Join the coordinator, which HiSparseConnector has made just before."""
        from .peers.borrowing import Borrower
        from .scheduler.managers import join

        self._coordinator = join(kv_cache_manager)
        self._nixl = self._make_nixl(KVConnectorRole.SCHEDULER, self._coordinator.layout)
        if not self._is_producer:
            self._borrower = Borrower(self._coordinator)

    @property
    def _scheduler(self) -> NixlConnector:
        assert self._nixl is not None, "scheduler call before the KV cache manager was bound"
        return self._nixl

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Answer consumers' handshakes from now on."""
        if self._is_producer:
            self._scheduler.set_xfer_handshake_metadata_pp_aware(metadata)

    def on_new_request(self, request: Request) -> None:
        """A request arrived. As long as it waits for an import, the producer hears of it."""
        if self._borrower is not None:
            self._borrower.came(request)
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of the prompt that another engine has computed; they come while others run."""
        params = request.kv_transfer_params
        if self._borrower is not None and self._borrower.stands_back(request.request_id):
            return None, False
        if self._borrower is None or not params or not params.get("do_remote_prefill"):
            return 0, False
        count, _ = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        if not count or not self._borrower.choose_landing(request, num_computed_tokens + count):
            return 0, False
        return count, True

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: pages and indexer keys."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request holds its blocks: the import may start."""
        params = request.kv_transfer_params
        if self._borrower is None:
            self._scheduler.update_state_after_alloc(request, blocks, 0)
        elif params and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            self._borrower.start(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's jobs, and what became of pages that are lent."""
        meta = self._scheduler.build_connector_meta(scheduler_output)
        assert isinstance(meta, NixlConnectorMetadata)
        if self._borrower is None:
            return HiSparseNixlMetadata(lending=meta)
        message = self._borrower.take_message(meta)
        return HiSparseNixlMetadata(b"" if message == _NOTHING else _encoder.encode(message))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Imports that have ended on every rank."""
        self._scheduler.update_connector_output(connector_output)
        if self._borrower is not None:
            for request_id in connector_output.finished_recving or ():
                self._borrower.ended(request_id, request_id in connector_output.failed_recving)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM asks for all groups instead."""
        raise NotImplementedError("HiSparse has several KV groups")

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A consumer's import ends with its request; a producer's pages are lent until they are read."""
        params = request.kv_transfer_params
        if self._borrower is not None:
            failed = request.status is RequestStatus.FINISHED_ERROR
            self._borrower.finished(request.request_id, failed)
            if params and params.get("do_remote_prefill"):  # never admitted
                params["do_remote_prefill"] = False
                self._borrower.release(request.request_id, params)
            return self._scheduler.request_finished_all_groups(request, ())
        if not params or not params.get("do_remote_decode") or request.status not in _COMPLETE:
            return self._scheduler.request_finished_all_groups(request, ())
        return self._lend(request)

    def _lend(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        from .peers.lending import HOST_GROUP, lent_blocks

        assert self._coordinator is not None
        blocks = lent_blocks(self._coordinator, request.request_id, request.num_computed_tokens)
        keeps, params = self._scheduler.request_finished_all_groups(request, blocks)
        assert keeps and params is not None, "a request that has computed something has blocks"
        return keeps, {**params, HOST_GROUP: len(blocks) - 1}

    # ---- worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register both pools with NIXL: to offer them, or to read into them."""
        from .runtime.binding import current_runtime

        runtime = current_runtime()
        if not self._is_producer:
            self.reader = self._make_reader(runtime)
            return
        from .peers.lending import lent_caches
        from .peers.marks import Marks

        self._marks = Marks(runtime.layout.num_host_blocks, runtime.layout.page_tokens)
        self._nixl = self._make_nixl(KVConnectorRole.WORKER, runtime.layout)
        self._nixl.register_kv_caches(lent_caches(runtime.memory, self._marks))

    def _make_reader(self, runtime: "HiSparseRuntime") -> "Reader":
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        from .peers.links import Agent, Links
        from .peers.reader import Reader
        from .peers.wire import compatibility_hash
        from .worker.copies import InlineCopies, StreamCopies

        config = self._vllm_config
        agent = Agent(runtime.memory)
        num_ranks = config.parallel_config.tensor_parallel_size
        rank = get_tensor_model_parallel_rank()
        lease_s = self._options.kv_lease_duration
        links = Links(agent, runtime.layout, rank, num_ranks, compatibility_hash(config), lease_s)
        on_cuda = runtime.device.type == "cuda"
        return Reader(
            agent,
            links,
            runtime.write_imported,
            runtime.fence,
            StreamCopies(runtime.device) if on_cuda else InlineCopies(),
            writes_host=runtime.memory.turns.is_writer,
            timeout_s=self._options.import_timeout_s,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take the step's jobs."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, HiSparseNixlMetadata)
        if self.reader is not None:
            self.reader.accept(_decoder.decode(meta.payload) if meta.payload else _NOTHING)
        else:
            assert self._nixl is not None and self._marks is not None and meta.lending is not None
            self._marks.update(meta.lending.reqs_in_batch, meta.lending.reqs_not_processed)
            self._nixl.bind_connector_metadata(meta.lending)
            self._nixl.start_load_kv(forward_context, **kwargs)
            self._nixl.clear_connector_metadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Imports that have ended on this rank, pages that have been read or whose lease has ended."""
        if self.reader is None:
            assert self._nixl is not None and self._marks is not None
            results = self._nixl.get_transfer_results(finished_req_ids)
            self._marks.update((), results.finished_sending)
            return results
        ended, failed = self.reader.poll()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What a producer's rank answers consumers."""
        return self._nixl.get_handshake_metadata() if self._nixl is not None else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Pages are lent where they lie."""

    def shutdown(self) -> None:
        """The engine ends."""
        if self.reader is not None:
            self.reader.close()
        if self._nixl is not None:
            self._nixl.shutdown()
