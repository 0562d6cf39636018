"""A rank's part of the metrics."""

import torch

from vllm_hisparse import ops
from vllm_hisparse.metrics import Sample
from vllm_hisparse.runtime.counters import STAGED
from vllm_hisparse.runtime.runtime import HiSparseRuntime

__all__ = ["RankSampler"]

_ROWS = {
    "hits": ops.Counter.HITS,
    "misses": ops.Counter.MISSES,
    "resident_rows": ops.Counter.RESIDENT,
    "unreadable_rows": ops.Counter.UNREADABLE,
    "overflowed_rows": ops.Counter.OVERFLOW,
}


class RankSampler:
    """Turns a rank's running totals into deltas."""

    def __init__(self, runtime: HiSparseRuntime, rank: int) -> None:
        self._runtime = runtime
        self._rank = str(rank)
        self._row_bytes = torch.tensor(runtime.layout.group_row_bytes)  # [index groups]
        self._seen: dict[str, int] = {}
        self._rows: torch.Tensor | None = None  # the totals of the last sample
        self._num_copied = 0  # pages, by then

    def sample(self) -> Sample:
        """What was counted since the last call; keys without news are left out."""
        runtime = self._runtime
        rows, num_copied = runtime.counters.totals(), runtime.num_spilled_pages + runtime.num_restored_pages
        if rows is self._rows and num_copied == self._num_copied:
            return {}
        self._rows, self._num_copied = rows, num_copied
        loaded = rows[:, ops.Counter.MISSES] - rows[:, ops.Counter.OVERFLOW]
        totals = {key: int(rows[:, counter].sum()) for key, counter in _ROWS.items()}
        totals["host_read_bytes"] = 0 if runtime.config.skip_io else int((loaded * self._row_bytes).sum())
        totals["prefill_read_bytes"] = int(rows[:, STAGED].sum()) * runtime.layout.page_bytes
        totals["spilled_bytes"] = runtime.num_spilled_pages * runtime.layout.host_block_bytes
        totals["restored_bytes"] = runtime.num_restored_pages * runtime.layout.host_block_bytes
        deltas = {key: total - self._seen.get(key, 0) for key, total in totals.items()}
        self._seen = totals
        return {key: {self._rank: delta} for key, delta in deltas.items() if delta}
