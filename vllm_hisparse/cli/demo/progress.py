"""What the demo has seen of its three runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_hisparse.cli.demo.frames import Finished, Frame, Mode, Phase, Started, Step

__all__ = ["TITLES", "Progress", "RunProgress"]

TITLES = {Mode.PLAIN: "plain vLLM", Mode.HISPARSE: "HiSparse", Mode.REFERENCE: "full residency"}


@dataclass
class RunProgress:
    """One run. `add` is the only thing that changes it."""

    mode: Mode
    started: Started | None = None
    latest: Step | None = None
    finished: Finished | None = None
    phases: dict[str, list[Phase]] = field(default_factory=dict)  # by request, one a step
    num_tokens: int = 0
    max_host_only: int = 0  # most pages at a time that only the host had, of all requests

    @property
    def title(self) -> str:
        """Name for people."""
        return TITLES[self.mode]

    @property
    def num_steps(self) -> int:
        """Engine steps so far."""
        return self.latest.index if self.latest else 0

    @property
    def mean_decoding(self) -> float:
        """Mean number of requests that got a token in a step, over all steps with an unfinished request."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def num_preemptions(self) -> int:
        """vLLM's counter once the run is over; until then what its requests say."""
        if self.finished:
            return self.finished.num_preemptions
        return sum(r.num_preemptions for r in self.latest.requests) if self.latest else 0

    @property
    def hit_rate(self) -> float:
        """Share of the rows wanted from host-only pages that were in the hot region; 0 without any."""
        wanted = self.latest.hits + self.latest.misses if self.latest else 0
        return self.latest.hits / wanted if self.latest and wanted else 0.0

    def add(self, frame: Frame) -> None:
        """Take note of the run's next frame."""
        if isinstance(frame, Started):
            self.started = frame
        elif isinstance(frame, Finished):
            self.finished = frame
        elif isinstance(frame, Step):
            self.latest = frame
            self.num_tokens += frame.num_decoding
            for request in frame.requests:
                self.phases.setdefault(request.name, []).append(request.phase)
            pages = Counter(state for request in frame.requests for state in request.pages)
            self.max_host_only = max(self.max_host_only, pages["host"] + pages["landing"])


@dataclass
class Progress:
    """All runs, and the one that is going on or was the last."""

    runs: dict[Mode, RunProgress] = field(default_factory=lambda: {mode: RunProgress(mode) for mode in Mode})
    current: Mode = Mode.PLAIN

    @property
    def run(self) -> RunProgress:
        """The current run."""
        return self.runs[self.current]

    def add(self, mode: Mode, frame: Frame) -> None:
        """Take note of the next frame of `mode`, which is the current run from now on."""
        self.current = mode
        self.runs[mode].add(frame)

    def span(self, num_columns: int, min_steps: int) -> int:
        """Engine steps of a column: the longest run, or `min_steps`, fits."""
        return -(-max(min_steps, *(run.num_steps for run in self.runs.values())) // num_columns)

    def columns(self, mode: Mode, name: str, num_columns: int, min_steps: int) -> Sequence[Phase | None]:
        """The request's phases in `num_columns` equal spans of steps, the same span for every run.

        A span shows what the request did most of the time; None where the run has not been yet.
        """
        span = self.span(num_columns, min_steps)
        phases = self.runs[mode].phases.get(name, [])
        parts = (phases[i * span : (i + 1) * span] for i in range(num_columns))
        return [Counter(part).most_common(1)[0][0] if part else None for part in parts]
