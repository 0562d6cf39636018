"""Until when a producer without HiSparse is sure to keep a request's pages; it has no marks of what it lends.

It keeps them for the duration of a lease from the end of the prompt on, and after a heartbeat for two thirds
of one. A heartbeat that comes when the lease has ended changes nothing: the pages may be somebody else's by
then, and whoever reads them gets other bytes without any error.
"""

from collections.abc import Iterable

__all__ = ["Heartbeats", "TooLate", "renewed_s"]

MARGIN_S = 1.0  # longest time from here to a producer, and before it looks


class TooLate(RuntimeError):
    """The producer may have given a request's pages to others."""


def renewed_s(lease_s: int) -> int:
    """Seconds that a heartbeat is good for, with leases of `lease_s`; vLLM's rule."""
    return lease_s * 2 // 3


class Heartbeats:
    """When producers were told that requests are wanted. Heartbeats that were in time make one span."""

    def __init__(self, good_for_s: float) -> None:
        self._good_for_s = good_for_s
        self._spans: dict[str, dict[str, list[tuple[float, float]]]] = {}  # engine -> request -> (first, end)

    def sent(self, engine_id: str, requests: Iterable[str], now: float) -> None:
        """A producer was told of all its requests that are wanted; others are forgotten."""
        known = self._spans.get(engine_id, {})
        self._spans[engine_id] = {r: self._with(known.get(r, []), now) for r in requests}

    def _with(self, spans: list[tuple[float, float]], now: float) -> list[tuple[float, float]]:
        first = now
        if spans and _in_time(now, spans[-1][1]):
            first = spans.pop()[0]
        return [*spans, (first, now + self._good_for_s)]

    def kept_until(self, engine_id: str, request: str, end: float) -> float:
        """Until when a lease lasts that would end at `end` without heartbeats."""
        for first, last in self._spans.get(engine_id, {}).get(request, ()):
            if _in_time(first, end):
                end = max(end, last)
        return end


def _in_time(sent: float, end: float) -> bool:
    return sent < end - MARGIN_S
