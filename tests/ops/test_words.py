"""Single words of the tables."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse import ops

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(writes=st.dictionaries(st.integers(0, 39), INT32), first=INT32)
def test_words_equal_the_reference(writes: dict[int, int], first: int) -> None:
    got = torch.full((40,), first, dtype=torch.int32)
    want = got.clone()
    ops.write_words(got, list(writes), list(writes.values()))
    ops.reference.write_words(want, list(writes), list(writes.values()))
    assert torch.equal(got, want)
    assert got.tolist() == [writes.get(index, first) for index in range(40)]
