"""Every rank's progress, and what it adds up to."""

from types import SimpleNamespace

import pytest

from vllm_hisparse.messages import Acknowledgement, Progress
from vllm_hisparse.scheduler import transfers
from vllm_hisparse.scheduler.regions import Cut
from vllm_hisparse.scheduler.transfers import OVERDUE_S, OVERDUE_STEPS, Transfer, TransferLedger
from vllm_hisparse.testing.logs import errors_logged


def submitted(ledger: TransferLedger) -> Transfer:
    transfer = ledger.open(epoch=0)
    assert transfer.is_empty
    transfer.cuts.append(Cut([], None))
    ledger.submit(transfer)
    return transfer


def report(rank: int, enqueued: int = -1, completed: int = -1, *failed: int) -> Acknowledgement:
    return Acknowledgement({rank: Progress(enqueued, completed, failed)})


def test_a_phase_is_reached_on_the_last_rank() -> None:
    ledger = TransferLedger(num_ranks=2)
    first, second = submitted(ledger), submitted(ledger)
    assert (first.transfer_id, second.transfer_id, len(ledger)) == (0, 1, 2)
    assert ledger.acknowledge(report(0, 1, 0)) == ([], [])
    assert ledger.acknowledge(report(1, 0)) == ([first], [])
    assert ledger.acknowledge(report(1, 1, 1)) == ([second], [first])
    assert 0 not in ledger
    assert 1 in ledger
    assert ledger.acknowledge(report(0, 1, 1)) == ([], [second])
    assert len(ledger) == 0


def test_a_repeated_report_counts_once() -> None:
    """One rank that says a thing twice is not two ranks."""
    ledger = TransferLedger(num_ranks=2)
    submitted(ledger)
    for _ in range(3):
        assert ledger.acknowledge(report(0, 0, 0)) == ([], [])
    twice = report(0, 0, 0).plus(report(0, 0, 0))
    assert ledger.acknowledge(twice) == ([], [])
    enqueued, completed = ledger.acknowledge(report(1, 0, 0))
    assert enqueued == completed != []
    assert ledger.acknowledge(report(1, 0, 0)) == ([], [])  # also after it has ended


def test_a_late_report_takes_nothing_back() -> None:
    ledger = TransferLedger(num_ranks=1)
    first, second = submitted(ledger), submitted(ledger)
    assert ledger.acknowledge(report(0, 1, 0)) == ([first, second], [first])
    assert ledger.acknowledge(report(0, 0)) == ([], [])
    assert ledger.acknowledge(report(0, 1, 1)) == ([], [second])


def test_a_lost_report_is_made_up_for_by_the_next() -> None:
    ledger = TransferLedger(num_ranks=2)
    transfers = [submitted(ledger) for _ in range(3)]
    ledger.acknowledge(report(0, 2, 2))
    assert ledger.acknowledge(report(1, 2, 1)) == (transfers, transfers[:2])


def test_a_failure_on_one_rank_is_the_transfers() -> None:
    ledger = TransferLedger(num_ranks=2)
    first, second = submitted(ledger), submitted(ledger)
    ledger.acknowledge(report(0, 1, 0, 0))
    assert (first.has_failed, second.has_failed) == (True, False)
    assert ledger.acknowledge(report(1, 1, 1)) == ([first, second], [first])
    assert ledger.acknowledge(report(0, 1, 1, 0).plus(report(0, 1, 0, 0))) == ([], [second])
    assert ledger.acknowledge(report(0, 0, -1, 0)) == ([], [])  # late


@pytest.mark.parametrize(
    ("ack", "message"),
    [
        (report(2, 0), "rank 2; there are 2 ranks"),
        (report(-1, 0), "rank -1; there are 2 ranks"),
        (report(1, 5), "rank 1: transfer 5 is enqueued, but the last one sent is 2"),
        (report(1, 1, 2), "rank 1: transfer 2 is completed, but 1 is the last one enqueued"),
        (report(0, 2, 0, 1), r"rank 0: of the transfers up to 1, \[1\] have failed, but it was \[0\] before"),
        (report(0, 2, 0), r"rank 0: of the transfers up to 1, \[\] have failed, but it was \[0\] before"),
        (report(0, 0), r"rank 0: of the transfers up to 0, \[\] have failed, but it was \[0\] before"),
        (report(0, 2, 0, 0, 1), r"rank 0: of the transfers up to 1, \[0, 1\] have failed, but"),
        (report(1, 1, 0, 2), r"rank 1: transfers \(2,\) have failed, but 1 is the last one tried"),
    ],
)
def test_a_report_that_cannot_be_true(ack: Acknowledgement, message: str) -> None:
    """Rank 0 has said that transfer 0 has failed and transfer 1 is enqueued. The report changes nothing."""
    ledger = TransferLedger(num_ranks=2)
    first, _, third = (submitted(ledger) for _ in range(3))
    ledger.acknowledge(report(0, 1, 0, 0))
    with pytest.raises(RuntimeError, match=message):
        ledger.acknowledge(report(1, 0, 0).plus(ack) if 1 not in ack.progress else ack)
    assert not third.has_failed
    assert ledger.acknowledge(report(1, 0)) == ([first], [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The ledger's clock; `now` can be set."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(transfers, "time", clock)
    return clock


def test_a_rank_that_does_not_answer_is_named_once(clock: SimpleNamespace) -> None:
    ledger = TransferLedger(num_ranks=3)
    submitted(ledger)
    ledger.acknowledge(report(1, 0, 0))
    clock.now = OVERDUE_S - 1
    for _ in range(OVERDUE_STEPS):
        ledger.note_step()
    assert not ledger.is_overdue
    clock.now = OVERDUE_S
    with errors_logged() as errors:
        for _ in range(3):
            ledger.note_step()
    assert ledger.is_overdue
    (error,) = errors
    assert "transfer 0 (0 pages to the host, 0 back) has not been completed by ranks [0, 2]" in error
    ledger.acknowledge(report(0, 0, 0).plus(report(2, 0, 0)))
    assert not ledger.is_overdue


def test_a_paused_engine_is_not_overdue(clock: SimpleNamespace) -> None:
    """Time alone says nothing: no step, no report."""
    ledger = TransferLedger(num_ranks=1)
    submitted(ledger)
    clock.now = 1000.0
    for _ in range(OVERDUE_STEPS - 1):
        ledger.note_step()
    assert not ledger.is_overdue
