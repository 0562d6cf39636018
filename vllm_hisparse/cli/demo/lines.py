"""The demo without a terminal: a line when something changes, and one now and then."""

from collections import Counter

from rich.console import Console

from vllm_hisparse.cli.demo.frames import Finished, RequestFrame, Started, Step
from vllm_hisparse.cli.demo.progress import Progress

__all__ = ["Lines"]

STEPS_BETWEEN = 120


class Lines:
    """Prints what the latest frame brought. Call `show` after every frame."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._seen: dict[tuple[str, str], tuple[str, str]] = {}  # (mode, request) -> (phase, residency)

    def show(self, frame: object) -> None:
        """Print the frame, if it says something new."""
        run = self._progress.run
        if isinstance(frame, Started):
            pool = frame.pool
            host = f", host pool of {pool.num_host_blocks} blocks" if pool.num_host_blocks else ""
            self._print(
                f"ready after {frame.seconds:.1f} s: KV pool of {pool.num_blocks} blocks x "
                f"{pool.block_bytes} B = {pool.num_bytes} B{host}"
            )
        elif isinstance(frame, Finished):
            self._print(
                f"done: {run.num_steps} steps in {frame.seconds:.1f} s, {frame.num_preemptions} preemptions, "
                f"{run.mean_decoding:.2f} requests decoding per step"
            )
        elif isinstance(frame, Step):
            news = [r for r in frame.requests if self._is_new(r)]
            if news or frame.index % STEPS_BETWEEN == 0:
                said = "; ".join(_request(r) for r in frame.requests)
                self._print(f"step {frame.index}: {said}; {frame.num_free_blocks} blocks free")

    def _is_new(self, request: RequestFrame) -> bool:
        key = (self._progress.current.value, request.name)
        state = (request.phase.value, request.residency)
        seen, self._seen[key] = self._seen.get(key), state
        return seen != state

    def _print(self, text: str) -> None:
        self._console.print(
            f"{self._progress.run.title}: {text}", highlight=False, markup=False, soft_wrap=True
        )


def _request(request: RequestFrame) -> str:
    said = f"{request.name} {request.phase.value}, {request.num_new_tokens} new tokens"
    if not request.residency:
        return said
    pages = ", ".join(f"{count} {state}" for state, count in Counter(request.pages).items())
    return f"{said}, {request.residency} ({pages})"
