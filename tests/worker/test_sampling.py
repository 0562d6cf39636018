"""A rank samples what the scheduler asks for, and nothing else."""

from collections import Counter
from typing import Any

import pytest

from vllm_hisparse.messages import Acknowledgement, Binding, Sampling, StepMessage, encode
from vllm_hisparse.worker.copies import InlineCopies
from vllm_hisparse.worker.worker import HEAT_SAMPLE_STEPS, MISS_SAMPLE_STEPS, HiSparseWorker

STEPS = 4 * HEAT_SAMPLE_STEPS


class Runtime:
    """Counts samples; takes everything else."""

    def __init__(self) -> None:
        self.num_samples: Counter[str] = Counter()

    def sample_misses(self) -> dict[int, int]:
        self.num_samples["misses"] += 1
        return {0: self.num_samples["misses"]}

    def sample_heat(self) -> dict[int, tuple[int, ...]]:
        self.num_samples["heat"] += 1
        return {0: (self.num_samples["heat"],)}

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@pytest.fixture
def worker() -> HiSparseWorker:
    runtime: Any = Runtime()
    worker = HiSparseWorker(runtime, InlineCopies(), rank=0, has_dummy_steps=False)
    step(worker, StepMessage(bind=(Binding("a", 0),)))
    return worker


def step(worker: HiSparseWorker, message: StepMessage) -> Acknowledgement | None:
    worker.begin_step(encode(message), ["a"])
    worker.end_step()
    return worker.take_acknowledgement()


def run(worker: HiSparseWorker, sampling: Sampling | None = None) -> list[Acknowledgement]:
    """Acknowledgements of `STEPS` steps, the first of which may say what to sample from then on."""
    acks = [step(worker, StepMessage(sampling=sampling if n == 0 else None)) for n in range(STEPS)]
    return [ack for ack in acks if ack is not None]


def num_samples(worker: HiSparseWorker) -> dict[str, int]:
    counted: Any = worker.runtime
    return dict(counted.num_samples)


def test_nothing_is_sampled_until_it_is_asked_for(worker: HiSparseWorker) -> None:
    acks = run(worker)
    assert num_samples(worker) == {}
    assert acks and not any(ack.heat or ack.misses for ack in acks), "progress is repeated all the same"


def test_each_is_sampled_from_when_it_is_asked_for_until_it_is_not(worker: HiSparseWorker) -> None:
    run(worker, Sampling(heat=True))
    assert num_samples(worker) == {"heat": STEPS // HEAT_SAMPLE_STEPS}
    run(worker)
    assert num_samples(worker) == {"heat": 2 * STEPS // HEAT_SAMPLE_STEPS}
    run(worker, Sampling(misses=True))
    expected = {"heat": 2 * STEPS // HEAT_SAMPLE_STEPS, "misses": STEPS // MISS_SAMPLE_STEPS}
    assert num_samples(worker) == expected
    run(worker, Sampling())
    assert num_samples(worker) == expected


def test_misses_of_another_time_are_not_reported(worker: HiSparseWorker) -> None:
    """On a device a sample is of the step before the last sample: maybe of a slot's former owner."""
    for first in (1, 1 + STEPS // MISS_SAMPLE_STEPS):
        step(worker, StepMessage(sampling=Sampling(misses=True)))
        acks = run(worker, Sampling(misses=True, heat=True))
        assert next(ack.misses[0] for ack in acks if ack.misses) == first + 1
        assert num_samples(worker)["misses"] == first - 1 + STEPS // MISS_SAMPLE_STEPS
        step(worker, StepMessage(sampling=Sampling()))
