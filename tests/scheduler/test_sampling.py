"""What the workers are asked to sample: heat only if pages may have to leave, misses only for regions.

The pool has 40 blocks beside the null block, a page takes one resident and one indexer block.
"""

from typing import Any

from vllm_hisparse.messages import Sampling
from vllm_hisparse.testing.scheduler import SchedulerRig

POOL = {"num_device_blocks": 41, "low": 0.2, "high": 0.5}
NEITHER, HEAT, BOTH = Sampling(), Sampling(heat=True), Sampling(misses=True, heat=True)


def step(rig: SchedulerRig) -> Sampling | None:
    sampling = rig.submit().sampling
    rig.collect()
    return sampling


def test_above_high_nothing_is_sampled(make_rig: Any) -> None:
    rig = make_rig(**POOL | {"num_device_blocks": 201})
    rig.add("a", range(60), max_tokens=20)
    rig.run()
    assert all(message.sampling is None for message in rig.messages)


def test_a_change_is_said_once(make_rig: Any) -> None:
    """Free blocks are 32, 24, 16, 10, then 8; with token 64 the request gives up pages for a region."""
    rig = make_rig(**POOL)
    rig.add("a", range(60), max_tokens=20)
    assert [step(rig) for _ in range(4)] == [None, None, HEAT, None]
    assert [step(rig) for _ in range(5)] == [None] * 4 + [BOTH]
    rig.run()
    rig.add("b", range(100, 110), max_tokens=4)
    rig.run()
    assert [m.sampling for m in rig.messages if m.sampling is not None] == [HEAT, BOTH, NEITHER]


def test_heat_is_sampled_while_a_request_waits(make_rig: Any) -> None:
    """The pool never gets below high: what b lacks comes from the pages of a."""
    rig = make_rig(**POOL | {"low": 0.0, "high": 0.1})
    rig.add("a", range(64), max_tokens=28)
    assert [step(rig) for _ in range(5)] == [None] * 5
    rig.add("b", range(100, 120), max_tokens=2)
    assert step(rig) == HEAT
    assert rig.coordinator.pool.get_num_free_blocks() > rig.coordinator.pressure.high
    rig.run()
