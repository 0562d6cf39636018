"""A worker rank as a naive model: blocks hold what was written to them, page tables are dictionaries.

Nothing here is shared with the real worker: the rank is the oracle that says whether the scheduler's messages
leave every token readable. A token's rows are stood for by a digest of the whole prefix up to it, so two
requests with the same prefix write the same content and any other mix-up is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from vllm_hisparse.messages import (
    Acknowledgement,
    Copy,
    PageWrite,
    Progress,
    RegionWrite,
    Sampling,
    StepMessage,
)

__all__ = ["Content", "CopyTiming", "Rank", "Span"]

REPEAT_STEPS = 4  # after so many steps a rank says again how far it is

CopyTiming = Literal["early", "late", "split"]
"""When a copy touches memory: all at enqueue, all at completion, or source early and destination late."""


@dataclass(frozen=True)
class Content:
    """What a block holds: `kind` names part, indexer or region; `rows` are one digest a token, in order."""

    kind: str
    rows: tuple[int, ...] = ()

    def written(self, first: int, rows: Sequence[int]) -> Content:
        """This content with `rows` written from row `first` on."""
        old = self.rows + (0,) * (first - len(self.rows))
        return Content(self.kind, old[:first] + tuple(rows) + old[first + len(rows) :])


@dataclass(frozen=True)
class Span:
    """A request in one step: digests of its whole context, of which `[start, len)` are computed now."""

    request_id: str
    digests: list[int]
    start: int
    indexer_blocks: list[int]


@dataclass
class _Transfer:
    """Copies on their way: (is a spill, copy, source contents if read already)."""

    transfer_id: int
    copies: list[tuple[bool, Copy, tuple[Content, ...] | None]] = field(default_factory=list)


class Rank:
    """Memory, tables and the copy stream of one rank. Raises AssertionError for whatever goes wrong."""

    def __init__(
        self, number: int, page_tokens: int, num_parts: int, indexer_tokens: int, timing: CopyTiming
    ) -> None:
        self.number = number
        self.page_tokens = page_tokens
        self.num_parts = num_parts
        self.indexer_tokens = indexer_tokens
        self.timing = timing
        self.device: dict[int, Content] = {}
        self.host: dict[int, tuple[Content, ...]] = {}  # [part]
        self.slots: dict[str, int] = {}
        self.pages: dict[int, dict[int, PageWrite]] = {}  # by slot and page
        self.regions: dict[int, RegionWrite] = {}  # by slot
        self.sampling = Sampling()
        self.copying: deque[_Transfer] = deque()  # in stream order
        self.progress = Progress()
        self.reported = Progress()
        self.num_steps = 0
        self.is_silent = False  # its acknowledgements get lost
        self.fails = False  # the next transfers cannot be enqueued, and leave torn pages behind
        self.writer = self  # of the host pool that this rank reads
        self.readers: list[Rank] = []  # other ranks of the pool that this one writes
        self.is_deaf = False  # does not wait for the writer

    def share(self, writer: Rank) -> None:
        """Read the host pool that `writer` writes."""
        self.writer, self.host = writer, writer.host
        writer.readers.append(self)

    # ---- the message

    def apply(self, message: StepMessage) -> None:
        """One step's message, in the order that `StepMessage` promises."""
        for request_id in message.unbind:
            del self.slots[request_id]
        for request_id, slot in message.bind:
            assert slot not in self.slots.values(), f"slot {slot} has two requests"
            self.slots[request_id] = slot
            self.pages[slot] = {}
            self.regions.pop(slot, None)
        self.run(max((t for t in message.wait if t in self._copying_ids()), default=-1))
        for region in message.regions:
            _check_survivors(self.regions.get(region.slot), region, self.page_tokens)
            self.regions[region.slot] = region
        for write in message.pages:
            self.pages[write.slot][write.page] = write
        if message.transfer_id >= 0:
            self._submit(message)
        if message.sampling is not None:
            assert message.sampling != self.sampling, "what is sampled was said twice"
            self.sampling = message.sampling

    def complete(self, num_transfers: int) -> None:
        """The stream gets through its oldest transfers, unless other ranks of its pool hold it back."""
        for _ in range(min(num_transfers, len(self.copying))):
            if not self._may_run(self.copying[0].transfer_id):
                return
            self._run_oldest()

    def run(self, last: int) -> None:
        """Somebody waits until the stream is through with transfer `last`, and so do those it waits for."""
        while self.copying and self.copying[0].transfer_id <= last:
            if self.writer is not self and not self.is_deaf:
                self.writer.run(self.copying[0].transfer_id)
            self._run_oldest()

    def _may_run(self, transfer_id: int) -> bool:
        if self.writer is not self:
            return self.is_deaf or self.writer.progress.completed >= transfer_id
        return all(reader.progress.enqueued >= transfer_id for reader in self.readers)

    def _copying_ids(self) -> list[int]:
        return [t.transfer_id for t in self.copying]

    def take_acknowledgement(self, misses: dict[int, int]) -> Acknowledgement | None:
        """The rank's progress, if there is news or it is time to repeat it, with the step's `misses` by
        slot, if they are sampled.
        """
        self.num_steps += 1
        misses = misses if self.sampling.misses else {}
        if self.progress == self.reported and not misses and self.num_steps % REPEAT_STEPS:
            return None
        self.reported = self.progress
        return Acknowledgement({self.number: self.progress}, misses)

    def _submit(self, message: StepMessage) -> None:
        transfer = _Transfer(message.transfer_id)
        assert message.transfer_id == self.progress.enqueued + 1, "a transfer got lost"
        self.progress = self.progress._replace(enqueued=message.transfer_id)
        for reader in self.readers:
            reader.run(message.transfer_id - 1)  # whatever it reads of earlier steps, before this one writes
        if self.fails:
            self.progress = self.progress._replace(failed=(*self.progress.failed, message.transfer_id))
            for is_spill, copies in ((True, message.spill), (False, message.restore)):
                for copy in copies:
                    self._write(is_spill, copy, (Content("torn"),) * self.num_parts)
            self.copying.append(transfer)
            return
        for is_spill, copies in ((True, message.spill), (False, message.restore)):
            for copy in copies if self.writer is self or not is_spill else ():
                source = None if self.timing == "late" else self._read(is_spill, copy)
                if self.timing == "early":
                    self._write(is_spill, copy, source)
                transfer.copies.append((is_spill, copy, source))
        self.copying.append(transfer)

    def _run_oldest(self) -> None:
        transfer = self.copying.popleft()
        for is_spill, copy, source in transfer.copies:
            if self.timing != "early":
                self._write(is_spill, copy, self._read(is_spill, copy) if source is None else source)
        self.progress = self.progress._replace(completed=transfer.transfer_id)

    def _read(self, is_spill: bool, copy: Copy) -> tuple[Content, ...]:
        if not is_spill:
            return self.host.get(copy.host_block, (Content("nothing"),) * self.num_parts)
        return tuple(self.device.get(block, Content("nothing")) for block in copy.device_blocks)

    def _write(self, is_spill: bool, copy: Copy, source: tuple[Content, ...] | None) -> None:
        assert source is not None
        if is_spill:
            if self.writer is self:
                self.host[copy.host_block] = source
        else:
            self.device.update(zip(copy.device_blocks, source, strict=True))

    def host_blocks_being_written(self) -> set[int]:
        """Destinations of spills that have not completed."""
        return {copy.host_block for t in self.copying for is_spill, copy, _ in t.copies if is_spill}

    # ---- the forward

    def forward(self, spans: list[Span]) -> None:
        """Write every scheduled token and the slots of hot regions, then read every context back."""
        for span in spans:
            slot = self.slots[span.request_id]
            if (region := self.regions.get(slot)) is not None:
                for block in self._region_blocks(region):
                    self.device[block] = Content(f"region {region.region}")
            for part in range(self.num_parts):
                blocks = {page: w.device_blocks[part] for page, w in self.pages[slot].items()}
                self._write_rows(span, blocks, self.page_tokens, f"part {part}")
            self._write_rows(span, dict(enumerate(span.indexer_blocks)), self.indexer_tokens, "indexer")
        for span in spans:
            self._check(span)

    def _region_blocks(self, region: RegionWrite) -> Iterator[int]:
        return (block for part in region.device_blocks for block in part)

    def _write_rows(self, span: Span, blocks: dict[int, int], tokens: int, kind: str) -> None:
        position = span.start
        while position < len(span.digests):
            page, first = divmod(position, tokens)
            block = blocks.get(page, -1)
            assert block > 0, f"{span.request_id} writes {kind} of page {page}, which is not on the device"
            rows = span.digests[position : (page + 1) * tokens]
            old = self.device.get(block, Content(kind))
            self.device[block] = (old if old.kind == kind else Content(kind)).written(first, rows)
            position += len(rows)

    def _check(self, span: Span) -> None:
        slot = self.slots[span.request_id]
        region = self.regions.get(slot)
        for page in range(-(-len(span.digests) // self.page_tokens)):
            where = f"{span.request_id} page {page}"
            write = self.pages[slot].get(page)
            assert write is not None, f"{where} is in no table"
            on_device = write.device_blocks[0] >= 0
            assert on_device or (region is not None and region.region >= 0), (
                f"{where} is read without a region"
            )
            content = self._read(on_device, Copy(write.device_blocks, write.host_block))
            for part in range(self.num_parts):
                self._compare(content[part], f"part {part}", span, page, self.page_tokens, (where, write))
        for page, block in enumerate(span.indexer_blocks[: -(-len(span.digests) // self.indexer_tokens)]):
            found = self.device.get(block, Content("nothing"))
            self._compare(
                found, "indexer", span, page, self.indexer_tokens, f"{span.request_id} block {page}"
            )
        if region is not None:
            for block in self._region_blocks(region):
                assert self.device[block].kind == f"region {region.region}", (span.request_id, region, block)

    def _compare(self, found: Content, kind: str, span: Span, page: int, tokens: int, where: object) -> None:
        expected = tuple(span.digests[page * tokens : (page + 1) * tokens])
        assert found.kind == kind, (where, f"holds {found.kind}, not {kind}")
        assert found.rows[: len(expected)] == expected, (where, found, expected)


def _check_survivors(old: RegionWrite | None, new: RegionWrite, page_tokens: int) -> None:
    """Slots keep their rows as far as they keep their blocks, and no further."""
    before = old.device_blocks if old is not None and old.region == new.region else ()
    same = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
        for one, other in zip(before, new.device_blocks, strict=False)
    ]
    num_same = min(same, default=0)
    assert new.num_kept == num_same * page_tokens, (old, new)
