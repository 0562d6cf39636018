"""Counting acknowledgements."""

import pytest

from vllm_hisparse.messages import Acknowledgement
from vllm_hisparse.scheduler.regions import Cut
from vllm_hisparse.scheduler.transfers import Transfer, TransferLedger


def submitted(ledger: TransferLedger) -> Transfer:
    transfer = ledger.open(epoch=0)
    assert transfer.is_empty
    transfer.cuts.append(Cut([], None))
    ledger.submit(transfer)
    return transfer


def test_a_phase_is_reached_on_the_last_rank() -> None:
    ledger = TransferLedger(num_ranks=2)
    first, second = submitted(ledger), submitted(ledger)
    assert (first.transfer_id, second.transfer_id, len(ledger)) == (0, 1, 2)
    assert ledger.acknowledge(Acknowledgement({0: 2, 1: 1}, {0: 1})) == ([first], [])
    assert ledger.acknowledge(Acknowledgement({1: 1}, {1: 2})) == ([second], [second])  # out of order
    assert 1 not in ledger
    assert 0 in ledger
    assert ledger.acknowledge(Acknowledgement({}, {0: 1})) == ([], [first])
    assert len(ledger) == 0


@pytest.mark.parametrize("ack", [Acknowledgement({5: 1}), Acknowledgement({}, {5: 1})])
def test_an_unknown_transfer(ack: Acknowledgement) -> None:
    ledger = TransferLedger(num_ranks=1)
    submitted(ledger)
    with pytest.raises(RuntimeError, match="transfer 5, which is not pending"):
        ledger.acknowledge(ack)


def test_more_acknowledgements_than_ranks() -> None:
    ledger = TransferLedger(num_ranks=2)
    submitted(ledger)
    ledger.acknowledge(Acknowledgement({0: 2}))
    with pytest.raises(RuntimeError, match="transfer 0: num_enqueued is 3, but there are 2 ranks"):
        ledger.acknowledge(Acknowledgement({0: 1}))


def test_a_completed_transfer_is_unknown() -> None:
    ledger = TransferLedger(num_ranks=1)
    submitted(ledger)
    ledger.acknowledge(Acknowledgement({0: 1}, {0: 1}))
    with pytest.raises(RuntimeError, match="transfer 0, which is not pending"):
        ledger.acknowledge(Acknowledgement({}, {0: 1}))
