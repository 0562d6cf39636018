"""The consuming side's scheduler half: which prompts are imported, and a job for each that is admitted."""

import time
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata
from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator

from .addresses import ABSENT
from .lending import HOST_GROUP
from .messages import ImportJob, PageImport, Peer, PeerMessage

__all__ = ["Borrower"]

logger = init_logger("vllm.vllm_hisparse")
MAX_READERS = 10_000  # the latest are known, for clients that repeat a request
NEEDED = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "tp_size",
)


class Borrower:
    """Imports of one engine. vLLM's scheduler is its only caller."""

    def __init__(self, coordinator: HiSparseCoordinator) -> None:
        self._coordinator = coordinator
        self._readers: dict[tuple[str, str], str] = {}  # (engine, its request) -> request that it is told of
        self._came: dict[str, float] = {}  # request with a prompt elsewhere -> time.monotonic() then
        (self._indexer,) = (m for m in coordinator.on_device if m not in coordinator.resident)
        self._running: set[str] = set()  # requests whose jobs have not ended
        self._jobs: list[ImportJob] = []
        self._cancelled: list[str] = []
        self._failed: set[str] = set()  # requests that vLLM has not looked at again

    def came(self, request: Request) -> None:
        """A request is new to this engine."""
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._came[request.request_id] = time.monotonic()

    def choose_landing(self, request: Request, num_tokens: int) -> bool:
        """Whether the prompt, with `num_tokens` tokens to have, can be imported; where to is settled then."""
        params = request.kv_transfer_params or {}
        missing = [key for key in NEEDED if params.get(key) is None]
        if missing or max(params.get("pp_size", 1), params.get("dcp_size", 1)) > 1:
            logger.warning(
                "HiSparse: %s is computed here: its kv_transfer_params lack %s, or the producer is pipeline "
                "or context parallel",
                request.request_id,
                missing,
            )
            return False
        if not self._is_first(request.request_id, params):
            logger.warning(
                "HiSparse: %s is computed here: another request came with the same kv_transfer_params, and a "
                "producer keeps pages until they were read once",
                request.request_id,
            )
            return False
        num_pages = -(-num_tokens // self._coordinator.layout.page_tokens)
        if any(len(blocks) < num_pages for blocks in params["remote_block_ids"]):
            logger.warning(
                "HiSparse: %s is computed here: the producer does not have all of it", request.request_id
            )
            return False
        imports = self._coordinator.imports
        return imports.choose(request.request_id, num_tokens, _pages_on_host(params)) is not None

    def start(self, request: Request, num_tokens: int) -> None:
        """vLLM has admitted the request, with `num_tokens` tokens to come; none: the producer is told."""
        params = request.kv_transfer_params
        assert params is not None
        request_id = request.request_id
        if not num_tokens:
            self.release(request_id, params)
            return
        self._claim(request_id, params)
        record = self._coordinator.records[request_id]
        known = self._coordinator.imports[request_id]
        on_host = set(known.host_pages)
        pages = tuple(
            PageImport(page, (), self._coordinator.source.host_block(request_id, page).block_id)
            if page in on_host
            else PageImport(page, self._device_blocks(request_id, page), ABSENT)
            for page in range(known.first_page, len(record.pages))
        )
        blocks = self._indexer.req_to_blocks[request_id]
        self._running.add(request_id)
        self._jobs.append(
            ImportJob(
                request_id,
                _peer(params),
                params["remote_request_id"],
                tuple(tuple(blocks) for blocks in params["remote_block_ids"]),
                pages,
                tuple((p, blocks[p].block_id) for p in range(known.first_key_page, len(record.pages))),
                tuple(zip(*record.region.block_ids, strict=True)) if on_host and record.region else (),
                time.monotonic() - self._came[request_id],
            )
        )

    def _device_blocks(self, request_id: str, page: int) -> tuple[int, ...]:
        return tuple(m.req_to_blocks[request_id][page].block_id for m in self._coordinator.resident)

    def release(self, request_id: str, params: Mapping[str, Any]) -> None:
        """Tell the producer that its pages are not wanted, unless another request reads them."""
        if all(params.get(key) is not None for key in NEEDED) and self._is_first(request_id, params):
            self._claim(request_id, params)
            self._jobs.append(ImportJob(request_id, _peer(params), params["remote_request_id"]))

    def _is_first(self, request_id: str, params: Mapping[str, Any]) -> bool:
        return self._readers.get(_source(params), request_id) == request_id

    def _claim(self, request_id: str, params: Mapping[str, Any]) -> None:
        self._readers[_source(params)] = request_id
        if len(self._readers) > MAX_READERS:
            del self._readers[next(iter(self._readers))]

    def finished(self, request_id: str, failed: bool) -> None:
        """The request has ended, whatever state its import is in; because of it, if it `failed`."""
        self._coordinator.imports.cancel(request_id, failed)
        self._failed.discard(request_id)
        self._came.pop(request_id, None)
        if request_id in self._running:
            self._cancelled.append(request_id)

    def ended(self, request_id: str, failed: bool) -> None:
        """Every rank's job has ended."""
        self._running.discard(request_id)
        if failed:
            self._failed.add(request_id)
            self._coordinator.imports.cancel(request_id, failed=True)
        else:
            self._coordinator.imports.arrived(request_id)

    def stands_back(self, request_id: str) -> bool:
        """Whether vLLM is to look at the request in the next step again; once after its import has failed.

        It still stands among those that hold blocks, at their head perhaps, and may need more blocks now to
        compute its prompt than there are before they have run. Skipped, it goes to those that hold none.
        """
        stands_back = request_id in self._failed
        self._failed.discard(request_id)
        return stands_back

    def take_message(self, meta: NixlConnectorMetadata) -> PeerMessage:
        """What the workers have to do. `meta`: of vLLM's scheduler half, which keeps track of heartbeats."""
        jobs, self._jobs = self._jobs, []
        cancelled, self._cancelled = [r for r in self._cancelled if r in self._running], []
        heartbeats = tuple(
            (Peer(engine_id, info.host, info.port, info.tp_size), tuple(sorted(info.req_ids)))
            for engine_id, info in meta.heartbeat_by_engine.items()
        )
        return PeerMessage(tuple(jobs), tuple(cancelled), heartbeats)


def _source(params: Mapping[str, Any]) -> tuple[str, str]:
    return params["remote_engine_id"], params["remote_request_id"]


def _peer(params: Mapping[str, Any]) -> Peer:
    address = params["remote_host"], params["remote_port"]
    return Peer(params["remote_engine_id"], *address, params["tp_size"])


def _pages_on_host(params: Mapping[str, Any]) -> list[int]:
    group = params.get(HOST_GROUP)
    blocks = () if group is None else params["remote_block_ids"][group]
    return [page for page, block in enumerate(blocks) if block != ABSENT]
