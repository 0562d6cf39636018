"""Which bytes of a producer go where: pages as pairs of address ranges. Integers in, integers out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_hisparse.planning.layout import Layout

from .marks import row_bytes, row_of
from .messages import ImportJob, PageImport
from .wire import DEVICE_REGION, MARKS_REGION, Region, RemoteRank, device_region, host_region

__all__ = ["AddressBook", "Ranges", "Unreadable"]

ABSENT = -1  # in place of a block that is not there


class Unreadable(RuntimeError):
    """The producer's memory is not what it takes to read this engine's pages from it."""


@dataclass
class Ranges:
    """Pairs of equally long ranges, sorted by the kinds of memory on both sides."""

    pairs: dict[tuple[str, str], list[tuple[int, int, int]]] = field(default_factory=dict)

    def add(self, local: str, remote: str, to: int, source: int, num_bytes: int) -> None:
        """One pair: `num_bytes` at address `source` of `remote` memory go to address `to` of `local`."""
        self.pairs.setdefault((local, remote), []).append((to, source, num_bytes))

    def split(self) -> Iterable[tuple[str, str, np.ndarray, np.ndarray]]:
        """(local memory, remote memory, local ranges, remote ranges), ranges uint64 [n, 2]: address, size."""
        for (local, remote), pairs in self.pairs.items():
            table = np.array(pairs, dtype=np.uint64)  # [n, 3]
            yield local, remote, table[:, [0, 2]], table[:, [1, 2]]


class AddressBook:
    """Addresses of this engine's pools against those of one rank of a producer.

    Raises Unreadable unless the producer has the same pages and layers.
    """

    def __init__(
        self, layout: Layout, device_base: int, host_base: int, memory: str, remote: RemoteRank
    ) -> None:
        """`device_base`, `host_base`: addresses of the pools; `memory`: of the device pool, DRAM or VRAM."""
        self._layout = layout
        self._device_base = device_base
        self._host_base = host_base
        self._memory = memory
        if remote.page_tokens != layout.page_tokens:
            raise Unreadable(
                f"got blocks of {remote.page_tokens} tokens from the producer; need {layout.page_tokens}, "
                "this engine's --block-size, because pages are read whole"
            )
        page, key_page = layout.page_bytes, layout.geometry.shape.indexer_page_bytes
        self._hosts: list[Region] = []
        self._marks: Region | None = None
        if not any(name.startswith(DEVICE_REGION) for name in remote.regions):
            self._layers = [self._region(remote, name, page) for name in layout.layers]
            self._indexers = [self._region(remote, name, key_page) for name in layout.indexer_layers]
            return
        whole = remote.regions.get(device_region(layout))
        if whole is None or whole.stride_bytes != layout.block_stride_bytes:
            raise Unreadable(
                "got a producer with HiSparse whose device blocks are laid out differently; need the same "
                "layers and block size because its blocks are read as this engine's"
            )
        places = zip(layout.layer_offset, layout.layer_part, strict=True)
        self._layers = [_inside(whole, offset, page, 1 + part) for offset, part in places]
        self._indexers = [_inside(whole, offset, key_page, 0) for offset in layout.indexer_offset]
        for group, group_row_bytes in enumerate(layout.group_row_bytes):
            self._hosts.append(self._region(remote, host_region(group), layout.page_tokens * group_row_bytes))
        self._marks = self._region(remote, MARKS_REGION, row_bytes(layout.page_tokens))

    def _region(self, remote: RemoteRank, name: str, block_bytes: int) -> Region:
        region = remote.regions.get(name)
        if region is None or region.block_bytes != block_bytes:
            got = "none" if region is None else f"one of {region.block_bytes} bytes a block"
            raise Unreadable(
                f"got {got} as the producer's region of {name}; need {block_bytes} bytes a block because "
                "both engines have to store the same layers the same way"
            )
        return region

    @property
    def has_marks(self) -> bool:
        """Whether the producer marks requests whose pages it lends."""
        return self._marks is not None

    def add_mark(self, ranges: Ranges, request_id: str, to: int) -> None:
        """Range of the producer's row of marks that has the request's, to go to address `to` of the host."""
        region = self._marks
        assert region is not None
        source = region.base + row_of(request_id, region.num_blocks) * region.stride_bytes
        ranges.add("DRAM", region.memory, to, source, region.block_bytes)

    def is_on_host(self, job: ImportJob, page: int) -> bool:
        """Whether the producer has the page in its host pool."""
        return bool(self._hosts) and job.remote_blocks[self._hosts[0].group][page] != ABSENT

    def add_page(
        self, ranges: Ranges, job: ImportJob, page: PageImport, device_blocks: Sequence[int]
    ) -> None:
        """Ranges of a page's rows. `device_blocks`: where they go on the device; empty for the host."""
        if not self.is_on_host(job, page.page):
            self._from_layers(ranges, job, page.page, device_blocks)
        elif device_blocks:
            self._rows_from_host(ranges, job, page.page, device_blocks)
        else:
            self._host_to_host(ranges, job, page.page, page.host_block)

    def add_keys(self, ranges: Ranges, job: ImportJob, page: int, block: int) -> None:
        """Ranges of a page's indexer keys."""
        layout = self._layout
        for region, offset in zip(self._indexers, layout.indexer_offset, strict=True):
            to = self._device_base + block * layout.indexer_stride_bytes + offset
            ranges.add(self._memory, region.memory, to, _address(region, job, page), region.block_bytes)

    def _from_layers(self, ranges: Ranges, job: ImportJob, page: int, blocks: Sequence[int]) -> None:
        for layer, region in enumerate(self._layers):
            to = self._layer_page(layer, blocks)
            ranges.add(self._memory, region.memory, to, _address(region, job, page), region.block_bytes)

    def _host_to_host(self, ranges: Ranges, job: ImportJob, page: int, block: int) -> None:
        for region, start in zip(self._hosts, self._layout.group_host_offset, strict=True):
            to = self._host_base + start + block * region.block_bytes
            ranges.add("DRAM", region.memory, to, _address(region, job, page), region.block_bytes)

    def _rows_from_host(self, ranges: Ranges, job: ImportJob, page: int, blocks: Sequence[int]) -> None:
        """Row by row: the host has a group's layers side by side. For a request's last page only."""
        layout = self._layout
        for layer, group in enumerate(layout.layer_group):
            region = self._hosts[group]
            source = _address(region, job, page) + layout.host_offset[layer] - layout.group_host_offset[group]
            to = self._layer_page(layer, blocks)
            for row in range(layout.page_tokens):
                at = source + row * layout.host_row_stride[layer]
                ranges.add(self._memory, region.memory, to + row * layout.row_bytes, at, layout.row_bytes)

    def _layer_page(self, layer: int, blocks: Sequence[int]) -> int:
        layout = self._layout
        block = blocks[layout.layer_part[layer]]
        return self._device_base + block * layout.block_stride_bytes + layout.layer_offset[layer]


def _inside(whole: Region, offset: int, num_bytes: int, group: int) -> Region:
    """A part of every block of a region, as a region that counts blocks by another list."""
    return replace(whole, base=whole.base + offset, block_bytes=num_bytes, group=group)


def _address(region: Region, job: ImportJob, page: int) -> int:
    blocks = job.remote_blocks[region.group]
    block = blocks[page] if page < len(blocks) else ABSENT
    if not 0 <= block < region.num_blocks:
        raise Unreadable(
            f"got block {block} for page {page} of {job.remote_request_id}; need one below "
            f"{region.num_blocks} because that is what the producer has"
        )
    return region.base + block * region.stride_bytes
