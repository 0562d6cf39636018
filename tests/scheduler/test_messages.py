"""Messages both ways."""

import msgspec
import pytest

from vllm_hisparse.connector import HiSparseWorkerMetadata
from vllm_hisparse.messages import (
    Acknowledgement,
    Binding,
    Copy,
    PageWrite,
    Progress,
    RegionWrite,
    Sampling,
    StepMessage,
    decode,
    encode,
)

FULL = StepMessage(
    unbind=("a", "b"),
    bind=(Binding("c", 3),),
    wait=(7, 8),
    regions=(RegionWrite(3, 1, 16, 8, ((4, 5), (6, 9))), RegionWrite(2, -1, 0, 0, ())),
    pages=(PageWrite(3, 0, (11, 12), -1), PageWrite(3, 1, (-1, -1), 21)),
    transfer_id=9,
    spill=(Copy((11, 12), 22),),
    restore=(Copy((13, 14), 23),),
    sampling=Sampling(misses=True),
)


def test_the_empty_message_has_no_bytes() -> None:
    assert StepMessage().is_empty
    assert encode(StepMessage()) == b""
    assert decode(b"") == StepMessage()


def test_a_full_message_survives() -> None:
    assert not FULL.is_empty
    assert decode(encode(FULL)) == FULL
    assert isinstance(decode(encode(FULL)).pages[0], PageWrite)


@pytest.mark.parametrize("field", StepMessage.__struct_fields__)
def test_each_field_alone_makes_a_message(field: str) -> None:
    message = StepMessage(**{field: getattr(FULL, field)})
    assert not message.is_empty
    assert decode(encode(message)) == message


def test_other_bytes_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode([["a"], "no bindings"]))


def test_ranks_acknowledgements_add_up() -> None:
    """Progress by rank, the furthest of each; misses are the same on every rank."""
    one = Acknowledgement({0: Progress(2, 1)}, {0: 5})
    other = Acknowledgement({0: Progress(1, 1), 1: Progress(3, 0, (2,))}, {0: 5, 3: 2})
    total = HiSparseWorkerMetadata(one).aggregate(HiSparseWorkerMetadata(other))
    assert isinstance(total, HiSparseWorkerMetadata)
    expected = Acknowledgement({0: Progress(2, 1), 1: Progress(3, 0, (2,))}, {0: 5, 3: 2})
    assert total.ack == expected
    assert other.plus(one) == expected
