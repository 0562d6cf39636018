"""Until when a producer is sure to keep pages, from what it was told and when."""

import pytest

from vllm_hisparse.peers.deadlines import Heartbeats, renewed_s

END = (
    130.0  # of a lease without heartbeats; each is good for 20 s, and has to be sent a second before the end
)


@pytest.mark.parametrize(
    ("sent", "kept_until"),
    [
        ([], END),
        ([101.0], END),  # a renewal never shortens
        ([101.0, 111.0, 121.0], 141.0),
        ([125.0, 143.5, 162.0, 180.5], 200.5),
        ([129.5], END),  # may have come too late
        ([131.0, 136.0, 141.0], END),  # too late, however many follow
        ([101.0, 125.0], 145.0),  # a gap that the first lease covers
        ([101.0, 125.0, 146.0, 150.0], 145.0),  # and one that nothing covers
        ([126.0, 145.5, 150.0], 146.0),
    ],
)
def test_kept_until(sent: list[float], kept_until: float) -> None:
    heartbeats = Heartbeats(20.0)
    for at in sent:
        heartbeats.sent("engine", ["a", "b"], at)
    assert heartbeats.kept_until("engine", "a", END) == kept_until
    assert heartbeats.kept_until("engine", "c", END) == END
    assert heartbeats.kept_until("another", "a", END) == END


def test_what_is_not_wanted_any_more_is_forgotten() -> None:
    heartbeats = Heartbeats(20.0)
    heartbeats.sent("engine", ["a", "b"], 120.0)
    heartbeats.sent("engine", ["b"], 121.0)
    assert heartbeats.kept_until("engine", "a", END) == END
    assert heartbeats.kept_until("engine", "b", END) == 141.0


def test_a_heartbeat_is_good_for_whole_seconds() -> None:
    """As vLLM counts them: 10 s make 6, not 6.67."""
    assert [renewed_s(lease) for lease in (6, 10, 30)] == [4, 6, 20]
