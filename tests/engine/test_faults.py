"""Planted faults: each must change outputs, or the identity tests would prove nothing.

The faults are patched in here; the product has no switches for them. None of them disturbs the bookkeeping,
so the engine runs to the end and every lease still balances.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.planted import Deaf
from tests.engine.workload import ENGINE_ARGS, ModelPath, Reference, differences, prompts
from vllm_hisparse import ops
from vllm_hisparse.messages import Copy, PageWrite
from vllm_hisparse.runtime.runtime import HiSparseRuntime
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, hisparse, hisparse_engine
from vllm_hisparse.testing.models import SEPARATE

pytestmark = pytest.mark.engine

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """A fault, and how to tell that the engine came to the place where it is planted."""

    name: str
    plant: Plant
    happened: Callable[[HiSparseEngine], bool]
    copies: type[LateCopies] | None = None
    delay: int = 3


def no_spill(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HiSparseRuntime, "spill", lambda self, copies: None)


def no_fetch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "fetch_selected", lambda *args, **kwargs: None)


def no_delta(patch: pytest.MonkeyPatch) -> None:
    write_pages = HiSparseRuntime.write_pages

    def without_lost(self: HiSparseRuntime, writes: Sequence[PageWrite]) -> None:
        resident = self.tables.resident[0]
        lost = [w for w in writes if w.device_blocks[0] < 0 <= resident[w.slot, w.page]]
        if kept := tuple(w for w in writes if w not in lost):
            write_pages(self, kept)

    patch.setattr(HiSparseRuntime, "write_pages", without_lost)


def no_restore(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HiSparseRuntime, "restore", lambda self, copies: None)


def swapped_copies(patch: pytest.MonkeyPatch) -> None:
    spill = HiSparseRuntime.spill

    def swapped(self: HiSparseRuntime, copies: tuple[Copy, ...]) -> None:
        hosts = [copy.host_block for copy in reversed(copies)]
        spill(self, tuple(c._replace(host_block=host) for c, host in zip(copies, hosts, strict=True)))

    patch.setattr(HiSparseRuntime, "spill", swapped)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The fault is in the copies."""


def was_spilled(engine: HiSparseEngine) -> bool:
    return engine.pages["spilled"] > 0 and engine.rows["misses"] > 0


def was_restored(engine: HiSparseEngine) -> bool:
    return engine.pages["restored"] > 0


def was_waited_for(engine: HiSparseEngine) -> bool:
    copies = engine.worker._copies
    return isinstance(copies, LateCopies) and copies.num_waited > 0


FAULTS = [
    Fault("no-spill", no_spill, was_spilled),
    Fault("no-fetch", no_fetch, was_spilled),
    Fault("no-delta", no_delta, lambda engine: engine.pages["lost"] > 0),
    Fault("no-restore", no_restore, was_restored),
    Fault("copy-to-the-wrong-block", swapped_copies, was_spilled),
    Fault("no-wait", nothing, was_waited_for, copies=Deaf),
]


def run(model_path: ModelPath, fault: Fault) -> list[Any]:
    """Completions of requests half of which end early, so that pages leave and return."""
    with hisparse_engine(
        model_path(SEPARATE),
        dtype="bfloat16",
        num_gpu_blocks_override=26,
        kv_transfer_config=hisparse(low_watermark=0.3, high_watermark=0.35),
        **ENGINE_ARGS,
    ) as engine:
        if fault.copies is not None:
            engine.use_copies(fault.copies(fault.delay))
        completions = engine.run(prompts((44, 8), count=6))
        engine.finish()
        assert fault.happened(engine)
    return completions


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_outputs(
    fault: Fault, model_path: ModelPath, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(SEPARATE, "bfloat16")
    fault.plant(monkeypatch)
    assert differences(run(model_path, fault), expected) != []


@pytest.mark.parametrize("copies", [None, LateCopies], ids=["inline", "late"])
def test_without_a_fault_nothing_changes(
    copies: type[LateCopies] | None, model_path: ModelPath, reference: Reference
) -> None:
    expected = reference(SEPARATE, "bfloat16")
    control = Fault("none", nothing, was_restored, copies=copies)
    assert differences(run(model_path, control), expected) == []


def failing_copies(patch: pytest.MonkeyPatch, num_failures: int) -> None:
    """The first copies in either direction write a torn page and fail."""
    for name in ("spill", "restore"):
        copy = getattr(HiSparseRuntime, name)
        left = iter(range(num_failures))

        def fail(
            self: HiSparseRuntime, copies: tuple[Copy, ...], copy: Any = copy, left: Iterator[int] = left
        ) -> None:
            if next(left, None) is None:
                copy(self, copies)
            else:
                copy(self, copies[:1])
                raise RuntimeError("no copies today")

        patch.setattr(HiSparseRuntime, name, fail)


def test_copies_that_fail_change_nothing(
    model_path: ModelPath, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages stay where they are, and are tried again."""
    expected = reference(SEPARATE, "bfloat16")
    failing_copies(monkeypatch, 5)
    fault = Fault("failing", nothing, lambda engine: engine.pages["failed"] > 10)
    assert differences(run(model_path, fault), expected) == []


def test_copies_that_keep_failing_end_the_engine(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_copies(monkeypatch, 1000)
    with pytest.raises(RuntimeError, match="no copies today"):
        run(model_path, Fault("failing", nothing, was_spilled))
