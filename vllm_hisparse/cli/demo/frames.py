"""What an engine process tells the demo: JSON, one frame a line."""

from enum import Enum

import msgspec

from vllm_hisparse.scheduler.snapshot import CellKind

__all__ = [
    "Cell",
    "Finished",
    "Frame",
    "Mode",
    "Output",
    "Phase",
    "Pool",
    "Refused",
    "RequestFrame",
    "Started",
    "Step",
]


class Mode(str, Enum):
    """The three runs, in this order."""

    PLAIN = "plain"
    HISPARSE = "hisparse"
    REFERENCE = "reference"


class Phase(str, Enum):
    """What a request did in a step."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Pool(msgspec.Struct, frozen=True):
    """The engine's pools as it allocated them. A host block is 0 bytes without HiSparse."""

    num_blocks: int
    block_bytes: int
    budget_bytes: int
    beside_bytes: int = 0  # device memory that HiSparse needs besides: staging, resolver state, tables
    num_host_blocks: int = 0
    host_block_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All device blocks."""
        return self.num_blocks * self.block_bytes


class RequestFrame(msgspec.Struct, frozen=True):
    """One request after a step."""

    name: str
    phase: Phase
    prompt_tokens: int
    tokens: tuple[int, ...]  # the last ones
    num_new_tokens: int
    num_preemptions: int
    pages: tuple[str, ...] = ()  # lower-case states from the start of the context; plain vLLM has none
    residency: str = ""
    hot_rows: int = 0


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """One device block and the name of a request that uses it."""

    kind: CellKind
    name: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready and waits for the word."""

    pool: Pool
    versions: dict[str, str]
    seconds: float


class Step(msgspec.Struct, frozen=True, tag=True):
    """An engine step is over. Totals count since the start of the run."""

    index: int  # from 1
    num_decoding: int  # requests that got a token
    requests: tuple[RequestFrame, ...]
    cells: tuple[Cell, ...]
    num_free_blocks: int
    num_used_host_blocks: int = 0
    spilled_pages: int = 0
    hits: int = 0
    misses: int = 0
    host_rows_read: int = 0


class Output(msgspec.Struct, frozen=True):
    """What a request produced. Log-probabilities are `float.hex`: equal strings are equal bits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, str], ...], ...]  # of the best tokens of each step, by token id


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""

    outputs: dict[str, Output]
    num_preemptions: int  # vLLM's own counter
    seconds: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This machine or installation cannot run the demo."""

    message: str


Frame = Started | Step | Finished | Refused
