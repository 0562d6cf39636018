"""Sizes of a step's batch rows, on the host and without asking the device."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["StepShape"]


class StepShape:
    """Tokens of each batch row. Worked out when somebody asks; most steps of decodes never do."""

    def __init__(self, scheduler_output: SchedulerOutput | None, request_ids: Sequence[str]) -> None:
        self._output = scheduler_output
        self._request_ids = request_ids

    @cached_property
    def queries(self) -> list[int]:
        """Tokens that the step computes."""
        assert self._output is not None, "no step has begun"
        return [self._output.num_scheduled_tokens[request_id] for request_id in self._request_ids]

    def decode_rows(self, max_tokens: int) -> tuple[list[int], list[int]]:
        """(query rows, batch row of each) of the batch rows that compute at most `max_tokens` tokens."""
        starts = accumulate(self.queries, initial=0)
        found = [
            (start + i, row)
            for row, (start, num_tokens) in enumerate(zip(starts, self.queries, strict=False))
            if num_tokens <= max_tokens
            for i in range(num_tokens)
        ]
        return [query for query, _ in found], [row for _, row in found]

    @cached_property
    def contexts(self) -> list[int]:
        """Tokens of context, the step's included. Exact for prefills; drafts may make a decode's shorter."""
        assert self._output is not None, "no step has begun"
        cached = self._output.scheduled_cached_reqs
        known = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        known.update((r.req_id, r.num_computed_tokens) for r in self._output.scheduled_new_reqs)
        return [known[r] + n for r, n in zip(self._request_ids, self.queries, strict=True)]
