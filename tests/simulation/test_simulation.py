"""The simulator's arithmetic by hand, and short runs of every policy."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from vllm_hisparse.messages import Binding, Copy, PageWrite, Progress, RegionWrite, StepMessage
from vllm_hisparse.simulation.engine import EngineSize
from vllm_hisparse.simulation.hardware import MISSES, Hardware, miss_share
from vllm_hisparse.simulation.in_tree import in_tree_geometry
from vllm_hisparse.simulation.load import AgenticLoad, Turn
from vllm_hisparse.simulation.model import GLM_5_2, PAGE_TOKENS
from vllm_hisparse.simulation.residency import POLICIES, Outcome, Simulation
from vllm_hisparse.simulation.worker import ModelledRank
from vllm_hisparse.testing.logs import only_errors

HARDWARE = Hardware()
# Two sessions of four do not fit the device as a whole; all of them fit with their pages on the host.
SMALL = EngineSize(device_gib=1.2, host_gib=12, max_requests=8, max_model_len=16384, max_step_tokens=2048)
LOAD = AgenticLoad(
    num_sessions=4, num_turns=3, first_tokens=9000, growth_tokens=300, output_tokens=40, stagger_s=0.5
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with only_errors():
        yield


def test_glm() -> None:
    assert (GLM_5_2.token_bytes, GLM_5_2.token_key_bytes) == (51_168, 2_772)
    assert len(GLM_5_2.group_layers) == 21
    assert sum(GLM_5_2.group_layers) == 78
    assert set(GLM_5_2.group_layers) == {3, 4}


def test_misses_pass_through_the_measured_points_and_fall() -> None:
    for ratio, share in MISSES:
        assert miss_share(ratio) == pytest.approx(share)
    ratios = [1 + step / 10 for step in range(100)]
    shares = [miss_share(ratio) for ratio in ratios]
    assert shares == sorted(shares, reverse=True)
    assert HARDWARE.missed_rows(GLM_5_2, 0.0, 0) == 0
    assert HARDWARE.missed_rows(GLM_5_2, 1.0, 4096) == pytest.approx(2048 * 0.117)
    # Half of the pages on the device: half of the selected rows, and a region that is four times those.
    assert HARDWARE.missed_rows(GLM_5_2, 0.5, 4096) == pytest.approx(1024 * 0.053)


def test_time_of_a_decode_step() -> None:
    one = HARDWARE.decode_s(GLM_5_2, 1, 74_160)
    assert one == pytest.approx(0.019 + 0.0185 * 8 / 256 + (2048 * 51_168 + 74_160 * 2_772) / 4.8e12)
    assert HARDWARE.decode_s(GLM_5_2, 0, 0) == 0
    assert HARDWARE.decode_s(GLM_5_2, 64, 64 * 74_160) < 64 * one


def test_a_turn_begins_with_the_one_before_it() -> None:
    load = AgenticLoad()
    first, second = load.prompt(Turn(3, 0)), load.prompt(Turn(3, 1))
    assert len(first) == 74_160
    assert len(second) == load.num_prompt_tokens(Turn(3, 1)) == 74_913
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + 220] == [1] * 220
    assert load.num_new_tokens(Turn(3, 1)) == 753 - 219
    assert load.after(Turn(3, 12), num_started=70) == Turn(70, 0)


def test_a_rank_counts_pages_and_copies() -> None:
    rank = ModelledRank(GLM_5_2, HARDWARE)
    page_bytes = GLM_5_2.token_bytes * PAGE_TOKENS
    on_device, on_host = PageWrite(0, 0, (5,), -1), PageWrite(0, 1, (-1,), 7)
    rank.apply(StepMessage(bind=(Binding("r", 0),), pages=(on_device, on_host)), now=0.0)
    rank.apply(StepMessage(regions=(RegionWrite(0, 1, 4096, 0, ((9,),)),)), now=0.0)
    assert rank.prefill_s("r") == pytest.approx(page_bytes / 48e9)
    assert rank.decode_s("r", 2 * PAGE_TOKENS) == pytest.approx(1024 * 0.053 * GLM_5_2.token_bytes / 48e9)
    rank.apply(StepMessage(transfer_id=4, spill=(Copy((5,), 8),) * 10), now=1.0)
    ack = rank.acknowledge(1.0)
    assert ack is not None
    assert ack.progress == {0: Progress(enqueued=4)}
    assert ack.misses == {0: int(1024 * 0.053 * 21)}
    assert rank.next_completion == pytest.approx(1.0 + 10 * page_bytes / 44e9)
    ack = rank.acknowledge(2.0)
    assert ack is not None
    assert ack.progress == {0: Progress(4, 4)}
    assert rank.acknowledge(3.0) is None


def test_in_tree_blocks() -> None:
    """A part for each index group, in blocks of five layers' pages: the keys' 177,408 bytes, rounded up."""
    geometry = in_tree_geometry(GLM_5_2.shape, GLM_5_2.group_layers)
    assert geometry.block_stride_bytes == 5 * 64 * 656
    assert geometry.part_layers == GLM_5_2.group_layers


def run(policy: str, seconds: float = 60.0) -> Outcome:
    return Simulation(policy, SMALL, LOAD, HARDWARE).run(seconds)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves(policy: str) -> None:
    outcome = run(policy)
    assert outcome.seconds >= 60
    assert outcome.num_turns > 5
    assert 0 < outcome.mean_decoding <= LOAD.num_sessions
    assert (outcome.to_host_bytes > 0) is (policy != "vllm")
    assert outcome.course[-1][0] >= 60


def test_hisparse_decodes_more_at_a_time_and_runs_are_repeatable() -> None:
    first, second, plain = run("hisparse"), run("hisparse"), run("vllm")
    assert first == second
    assert first.mean_decoding > plain.mean_decoding
    assert first.recomputed_tokens < plain.recomputed_tokens


def test_the_warm_up_does_not_count() -> None:
    whole = run("vllm", 30.0)
    later = Simulation("vllm", SMALL, LOAD, HARDWARE, warmup_s=15.0).run(30.0)
    assert later.seconds < whole.seconds
    assert later.course == whole.course
    assert later.num_turns < whole.num_turns
    assert replace(SMALL, num_device_blocks=7).num_plain_blocks == 7


def test_every_policy_has_a_colour() -> None:
    """A picture is drawn when everything has run."""
    from vllm_hisparse.cli.residency_plot import COLOURS

    assert set(COLOURS) == set(POLICIES)


def test_requests_that_find_their_prefix_pass_where_keys_do_not_fit() -> None:
    """Sixteen sessions: the keys of all do not fit the device."""
    size, load = replace(SMALL, max_requests=16), replace(LOAD, num_sessions=16, num_turns=6)
    passing = Simulation("hisparse", size, load, HARDWARE, 20.0).run(80.0)
    in_order = Simulation("hisparse-fcfs", size, load, HARDWARE, 20.0).run(80.0)
    assert passing.recomputed_tokens * 4 < in_order.recomputed_tokens
    assert passing.num_turns > 2 * in_order.num_turns
