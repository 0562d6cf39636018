"""What an engine in this process does in each step, seen from outside: its scheduler and its graphs."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class RoundCutOff(Exception):
    """A round has taken longer than its limit."""


@dataclass(frozen=True)
class Step:
    """A step as it was scheduled."""

    at: float  # seconds of time.perf_counter
    cpu: float  # seconds that the engine's thread has computed
    waits: int  # times that it has given up its core
    tokens: tuple[int, ...]  # of each request


class Schedule:
    """When each step was scheduled and of what, seen at vLLM's scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[Step] = []
        self.deadline = float("inf")  # of time.perf_counter
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            if time.perf_counter() > self.deadline:
                raise RoundCutOff
            output = schedule(*args, **kwargs)
            tokens = tuple(output.num_scheduled_tokens.values())
            waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            self.steps.append(Step(time.perf_counter(), time.thread_time(), waits, tokens))
            return output

        scheduler.schedule = watched

    def take(self) -> list[Step]:
        steps, self.steps = self.steps, []
        return steps


class GraphTimes:
    """How long the GPU takes for each CUDA graph: a decode step's forward is one, where vLLM has it whole."""

    def __init__(self) -> None:
        import torch

        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        replay = torch.cuda.CUDAGraph.replay

        def watched(graph: torch.cuda.CUDAGraph) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay(graph)
            end.record()
            self._spans.append((begin, end))

        torch.cuda.CUDAGraph.replay = watched  # type: ignore[method-assign]

    def take_ms(self) -> list[float]:
        """Of every graph since the last call, once the GPU is done with them."""
        import torch

        torch.cuda.synchronize()
        spans, self._spans = self._spans, []
        return [begin.elapsed_time(end) for begin, end in spans]
