"""Prompts computed for another engine: their pages stay as they were until that engine has read them."""

from typing import Any

import pytest

from vllm_hisparse.testing.scheduler import SchedulerRig

PRODUCER = {"nixl_role": "kv_producer", "low": 0.2, "high": 0.5, "max_model_len": 96}
LEND = {"do_remote_decode": True, "do_remote_prefill": False}


def check_lent(rig: SchedulerRig, request_id: str, prompt: range, expected: list[int]) -> tuple[int, int]:
    """Every page is whole on the tier that it is offered on, on every rank. Returns (pages on the device, on
    the host).
    """
    params = rig.lent[request_id]
    keys, *parts, host = params["remote_block_ids"]
    assert params["hisparse_host_group"] == 1 + len(parts)
    size = rig.options.page_tokens
    assert len(keys) == len(host) == -(-len(prompt) // size)
    for page, host_block in enumerate(host):
        rows = tuple(expected[page * size : (page + 1) * size])
        for rank in rig.ranks:
            assert rank.device[keys[page]].rows[: len(rows)] == rows
            if host_block >= 0:
                content = rank.host[host_block]
                assert all(part[page] == -1 for part in parts)
            else:
                content = tuple(rank.device[part[page]] for part in parts)
            for number, part_content in enumerate(content):
                assert part_content.kind == f"part {number}"
                assert part_content.rows[: len(rows)] == rows
    on_host = sum(block >= 0 for block in host)
    return len(host) - on_host, on_host


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("length", [62, 64])
def test_lent_pages_outlive_pressure(make_rig: Any, length: int, num_parts: int) -> None:
    rig = make_rig(num_device_blocks=34 + 20 * num_parts, num_parts=num_parts, num_ranks=2, **PRODUCER)
    prompt = range(length)
    rig.add("other", range(300, 350), max_tokens=30)
    rig.add("a", prompt, 1, dict(LEND))
    expected = rig.prompt_digests("a")
    while "a" not in rig.lent:
        rig.step()
    tiers = check_lent(rig, "a", prompt, expected)
    assert rig.coordinator.records["a"].region is None
    assert rig.coordinator.records["a"].slot < 0
    rig.add("more", range(400, 450), max_tokens=20)
    for _ in range(20):
        rig.step(0, 1)
        assert check_lent(rig, "a", prompt, expected) == tiers
    rig.read = {"a"}
    rig.run()
    assert tiers[1] > 0, "the workload has nothing on the host"
    assert rig.coordinator.leases.counters.lent == -(-length // 4)


def test_more_lent_requests_than_slots(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=120, max_requests=2, **PRODUCER)
    for number in range(5):
        rig.add(f"r{number}", range(number * 40, number * 40 + 30), 1, dict(LEND))
    while len(rig.lent) < 5:
        rig.step()
    rig.read = set(rig.lent)
    rig.run()


def test_an_aborted_prompt_is_not_lent(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=60, **PRODUCER)
    rig.add("a", range(60), 1, dict(LEND))
    rig.step()
    rig.abort("a")
    rig.run()
    assert not rig.lent
