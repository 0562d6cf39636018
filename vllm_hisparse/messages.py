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
    "Progress",
    "RegionWrite",
    "Sampling",
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
    num_kept: int  # of these, the first so many keep their blocks and rows; the others start empty
    device_blocks: tuple[tuple[int, ...], ...]  # [part][block], in slot order


class Copy(NamedTuple):
    """One page between device and host; the direction is that of the list it is in."""

    device_blocks: tuple[int, ...]  # one a part
    host_block: int


class Sampling(NamedTuple):
    """What the workers sample of the selections now and then, which is work on the device."""

    misses: bool = False  # rows read from the host
    heat: bool = False  # pages that are touched most


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
    sampling: Sampling | None = None  # from this step on; None: as before. At first there is none

    @property
    def is_empty(self) -> bool:
        """Whether the workers have nothing to do."""
        return self == _EMPTY


class Progress(NamedTuple):
    """How far one rank has come with its transfers, in full and never as a delta.

    Transfers are enqueued and end in the order of their ids, so two numbers say it all. A report that comes
    twice says nothing new, one that is lost is made up for by the next, and no rank can be counted twice.
    """

    enqueued: int = -1  # the last transfer whose copies are on the rank's stream, or could not be put there
    completed: int = -1  # the last transfer whose copies have ended
    failed: tuple[int, ...] = ()  # since start, ascending: transfers whose copies could not all be enqueued

    def joined(self, other: "Progress") -> "Progress":
        """What two reports of the same rank say together."""
        return Progress(
            max(self.enqueued, other.enqueued),
            max(self.completed, other.completed),
            max(self.failed, other.failed, key=len),
        )


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True):
    """Workers to scheduler: every rank's progress, and what it has sampled."""

    progress: dict[int, Progress] = {}  # by rank
    misses: dict[int, int] = {}  # request slot -> rows read from the host in a step, sampled
    heat: dict[int, tuple[int, ...]] = {}  # request slot -> pages that selections touch most, sampled

    def plus(self, other: "Acknowledgement") -> "Acknowledgement":
        """What both say."""
        progress = dict(self.progress)
        for rank, reported in other.progress.items():
            progress[rank] = progress.get(rank, Progress()).joined(reported)
        # Every rank resolves the same selections.
        return Acknowledgement(progress, {**self.misses, **other.misses}, {**self.heat, **other.heat})


_EMPTY = StepMessage()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)


def encode(message: StepMessage) -> bytes:
    """The message's bytes; the empty message has none."""
    return b"" if message.is_empty else _encoder.encode(message)


def decode(payload: bytes) -> StepMessage:
    """Inverse of `encode`. Raises msgspec.ValidationError for bytes that are no message."""
    return _decoder.decode(payload) if payload else _EMPTY
