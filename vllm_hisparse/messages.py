"""What scheduler and workers tell each other: integers and tuples, no tensors.

A request is named once, when it is bound to a request slot; afterwards both sides speak of the slot.
Everything is a delta, and a step in which nothing changed sends the empty message, zero bytes.
"""

from typing import NamedTuple

import msgspec

__all__ = [
    "Acknowledgement",
    "Binding",
    "Copy",
    "PageWrite",
    "RegionWrite",
    "StepMessage",
    "decode",
    "encode",
]


class Binding(NamedTuple):
    """A request takes a request slot; the slot's tables start empty."""

    request_id: str
    slot: int


class PageWrite(NamedTuple):
    """New table entries of one page.

    A device block of -1: not readable on the device. A host block of -1: no host copy.
    """

    slot: int
    page: int
    device_blocks: tuple[int, ...]  # one a part
    host_block: int


class RegionWrite(NamedTuple):
    """The hot region of a slot from this step on; `region` -1 takes it away."""

    slot: int
    region: int
    num_rows: int  # usable slots
    device_blocks: tuple[tuple[int, ...], ...]  # [part][block], in slot order


class Copy(NamedTuple):
    """One page between device and host; the direction is that of the list it is in."""

    device_blocks: tuple[int, ...]  # one a part
    host_block: int


class StepMessage(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Scheduler to workers, once a step. Applied in the order of the fields, before the step's forward."""

    unbind: tuple[str, ...] = ()  # requests that are gone (finished, aborted, preempted)
    bind: tuple[Binding, ...] = ()
    wait: tuple[
        int, ...
    ] = ()  # transfer ids whose copies the compute stream has to wait for: their blocks are in use again
    regions: tuple[RegionWrite, ...] = ()
    pages: tuple[PageWrite, ...] = ()
    transfer_id: int = -1  # names the copies and returned regions of this message; -1: nothing to acknowledge
    spill: tuple[Copy, ...] = ()  # device to host
    restore: tuple[Copy, ...] = ()  # host to device

    @property
    def is_empty(self) -> bool:
        """Whether the workers have nothing to do."""
        return self == _EMPTY


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True):
    """Workers to scheduler: how many ranks have enqueued and completed each transfer since the last
    acknowledgement.
    """

    enqueued: dict[int, int] = {}
    completed: dict[int, int] = {}
    misses: dict[int, int] = {}  # request slot -> rows read from the host in a step, sampled
    heat: dict[int, tuple[int, ...]] = {}  # request slot -> pages that selections touch most, sampled

    def plus(self, other: "Acknowledgement") -> "Acknowledgement":
        """Counts of both ranks, summed by transfer id."""
        return Acknowledgement(
            _sum(self.enqueued, other.enqueued),
            _sum(self.completed, other.completed),
            {**self.misses, **other.misses},  # every rank resolves the same selections
            {**self.heat, **other.heat},
        )


def _sum(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in a.keys() | b.keys()}


_EMPTY = StepMessage()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)


def encode(message: StepMessage) -> bytes:
    """The message's bytes; the empty message has none."""
    return b"" if message.is_empty else _encoder.encode(message)


def decode(payload: bytes) -> StepMessage:
    """Inverse of `encode`. Raises msgspec.ValidationError for bytes that are no message."""
    return _decoder.decode(payload) if payload else _EMPTY
