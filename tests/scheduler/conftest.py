"""Rigs of vLLM's scheduler with our connector; see `vllm_hisparse/testing/scheduler.py`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_hisparse.testing.engine_config import EngineOptions
from vllm_hisparse.testing.logs import only_errors
from vllm_hisparse.testing.ranks import CopyTiming
from vllm_hisparse.testing.scheduler import SchedulerRig

MakeRig = Callable[..., SchedulerRig]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """vLLM reports every scheduler that is built and every reset that fails."""
    with only_errors():
        yield


@pytest.fixture
def make_rig(tmp_path: Path) -> MakeRig:
    """A rig with `EngineOptions` by keyword."""

    def make(timing: CopyTiming = "late", **options: Any) -> SchedulerRig:
        rig = SchedulerRig(EngineOptions(**options), tmp_path, timing)
        rig.watch_refusals = True
        return rig

    return make
