import numpy as np
import pytest
import torch

from vllm_hisparse import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_writes", [0, 1, 31, 448, 449, 3000])
def test_words_equal_the_cpu_op(num_writes: int) -> None:
    """As many as a launch takes, one more, and several launches; what follows on the stream sees them."""
    random = np.random.default_rng(num_writes)
    words = torch.from_numpy(random.integers(-(2**31), 2**31, 5000).astype(np.int32))
    got = words.cuda()
    at = random.permutation(5000)[:num_writes].tolist()
    value = random.integers(-(2**31), 2**31, num_writes).tolist()
    ops.write_words(got, at, value)
    after = got + 0
    ops.write_words(words, at, value)
    assert torch.equal(got.cpu(), words)
    assert torch.equal(after.cpu(), words)
