"""The stand-ins of the input kernels against the interpreted ones, on random batches."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.launches import same
from vllm_hisparse.cpu.kernels import inputs

MAX_REQS, MAX_TOKENS, MAX_LEN, VOCABULARY, DRAFTS = 6, 64, 40, 30, 3


@dataclass
class Batch:
    """Requests at their places, in distinct rows: prompts, what is computed of them, new tokens."""

    rows: list[int]
    prompts: list[int]
    computed: list[int]
    new: list[int]
    num_logits: list[int]

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def idx_mapping(self) -> torch.Tensor:
        return torch.tensor(self.rows, dtype=torch.int32)

    @property
    def query_start_loc(self) -> torch.Tensor:
        """As long as the runner's, whatever the batch."""
        padding = [0] * (MAX_REQS - self.num_reqs)
        return torch.tensor([0, *self.new, *padding]).cumsum(0).int()

    @property
    def cu_num_logits(self) -> torch.Tensor:
        return torch.tensor([0, *self.num_logits]).cumsum(0).int()

    @property
    def seq_lens(self) -> torch.Tensor:
        lens = [a + b for a, b in zip(self.computed, self.new, strict=True)]
        return torch.tensor([*lens, *([0] * (MAX_REQS - self.num_reqs))], dtype=torch.int32)

    def state(self, values: list[int]) -> torch.Tensor:
        """[MAX_REQS] int32 with the values in the requests' rows."""
        result = torch.full((MAX_REQS,), 5, dtype=torch.int32)
        result[self.rows] = torch.tensor(values, dtype=torch.int32)
        return result


@st.composite
def batches(draw: st.DrawFn, new_sampled: int = 1) -> Batch:
    rows = draw(st.permutations(range(MAX_REQS)))[: draw(st.integers(1, MAX_REQS))]
    result = Batch(rows, [], [], [], [])
    for _ in rows:
        prompt = draw(st.integers(1, 10))
        computed = draw(st.integers(0, 14))
        drafts = draw(st.integers(0, DRAFTS))
        new = draw(st.integers(drafts + 1, 8))
        result.prompts.append(prompt)
        result.computed.append(computed)
        result.new.append(new)
        result.num_logits.append(min(drafts + new_sampled, new))
    return result


def numbers(*shape: int, high: int = VOCABULARY, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


few = settings(max_examples=25)  # the interpreter is slow


@few
@given(batch=batches(), num_lookahead=st.integers(1, 3))
def test_prefill_inputs(batch: Batch, num_lookahead: int) -> None:
    same(
        inputs.prepare_prefill_inputs,
        (batch.num_reqs,),
        input_ids_ptr=torch.full((MAX_TOKENS,), -7, dtype=torch.int32),
        next_prefill_tokens_ptr=torch.full((num_lookahead, MAX_REQS), -7, dtype=torch.int32),
        next_prefill_tokens_stride=MAX_REQS,
        num_lookahead=num_lookahead,
        idx_mapping_ptr=batch.idx_mapping,
        query_start_loc_ptr=batch.query_start_loc,
        all_token_ids_ptr=numbers(MAX_REQS, MAX_LEN, dtype=torch.int32),
        all_token_ids_stride=MAX_LEN,
        prefill_lens_ptr=batch.state(batch.prompts),
        num_computed_tokens_ptr=batch.state(batch.computed),
        BLOCK_SIZE=4,
        LOOKAHEAD_BLOCK=4,
    )


@few
@given(batch=batches())
def test_positions_and_lengths(batch: Batch) -> None:
    left = same(
        inputs.prepare_pos_seq_lens,
        (batch.num_reqs + 1,),
        pos_ptr=torch.full((MAX_TOKENS,), -7),
        seq_lens_ptr=torch.full((MAX_REQS,), -7, dtype=torch.int32),
        idx_mapping_ptr=batch.idx_mapping,
        query_start_loc_ptr=batch.query_start_loc,
        num_computed_tokens_ptr=batch.state(batch.computed),
        max_num_reqs=MAX_REQS,
        BLOCK_SIZE=4,
    )
    assert torch.equal(left["seq_lens_ptr"], batch.seq_lens)


def combined(batch: Batch, num_drafts: int, block_size: int, **launch: int) -> dict[str, torch.Tensor]:
    """What the kernel and its stand-in leave, with draft tensors of `num_drafts` columns."""
    return same(
        inputs.combine_sampled_and_draft_tokens,
        (batch.num_reqs,),
        input_ids_ptr=torch.full((MAX_TOKENS,), -7, dtype=torch.int32),
        idx_mapping_ptr=batch.idx_mapping,
        last_sampled_tokens_ptr=numbers(MAX_REQS, 1),
        query_start_loc_ptr=batch.query_start_loc,
        seq_lens_ptr=batch.seq_lens,
        prefill_len_ptr=batch.state(batch.prompts),
        draft_tokens_ptr=numbers(MAX_REQS, num_drafts),
        draft_tokens_stride=num_drafts,
        cu_num_logits_ptr=batch.cu_num_logits,
        logits_indices_ptr=torch.full((sum(batch.num_logits),), -7),
        BLOCK_SIZE=block_size,
        **launch,
    )


@few
@given(data=st.data(), new_sampled=st.integers(0, 1))
def test_sampled_and_draft_tokens(data: st.DataObject, new_sampled: int) -> None:
    combined(data.draw(batches(new_sampled)), DRAFTS, 4, NUM_NEW_SAMPLED_TOKENS=new_sampled)


def test_no_speculation() -> None:
    """Draft tensors without a column."""
    left = combined(Batch([4, 1], [3, 9], [6, 2], [1, 5], [1, 1]), 0, 1)
    assert left["logits_indices_ptr"].tolist() == [0, 5]


@few
@given(batch=batches())
def test_expanded_mapping(batch: Batch) -> None:
    num_logits = sum(batch.num_logits)
    same(
        inputs.expand_idx_mapping,
        (batch.num_reqs,),
        idx_mapping_ptr=batch.idx_mapping,
        expanded_idx_mapping_ptr=torch.full((num_logits,), -7, dtype=torch.int32),
        expanded_local_pos_ptr=torch.full((num_logits,), -7, dtype=torch.int32),
        cu_num_logits_ptr=batch.cu_num_logits,
        BLOCK_SIZE=4,
    )


@few
@given(batch=batches(), rejected=st.lists(st.integers(0, 2), min_size=MAX_REQS, max_size=MAX_REQS))
def test_numbers_of_sampled_and_rejected(batch: Batch, rejected: list[int]) -> None:
    sampled = [max(n - r, 0) for n, r in zip(batch.num_logits, rejected, strict=False)]
    same(
        inputs.get_num_sampled_and_rejected,
        (batch.num_reqs,),
        num_sampled_ptr=torch.tensor(sampled, dtype=torch.int32),
        num_rejected_ptr=torch.full((batch.num_reqs,), -7, dtype=torch.int32),
        seq_lens_ptr=batch.seq_lens,
        cu_num_logits_ptr=batch.cu_num_logits,
        idx_mapping_ptr=batch.idx_mapping,
        prefill_len_ptr=batch.state(batch.prompts),
    )


@few
@given(
    batch=batches(),
    rejected=st.lists(st.integers(0, 2), min_size=MAX_REQS, max_size=MAX_REQS),
    gone=st.integers(0, MAX_REQS),
    with_counts=st.booleans(),
    with_queries=st.booleans(),
)
def test_update(batch: Batch, rejected: list[int], gone: int, with_counts: bool, with_queries: bool) -> None:
    rejected = [min(r, n) for r, n in zip(rejected, batch.num_logits, strict=False)]
    sampled = [n - r for n, r in zip(batch.num_logits, rejected, strict=False)]
    idx_mapping = batch.idx_mapping
    idx_mapping[gone:] = -1
    same(
        inputs.post_update,
        (batch.num_reqs,),
        idx_mapping_ptr=idx_mapping,
        num_computed_tokens_ptr=batch.state(batch.computed),
        last_sampled_tokens_ptr=numbers(MAX_REQS, 1),
        output_bin_counts_ptr=numbers(MAX_REQS, VOCABULARY, dtype=torch.int32) if with_counts else None,
        output_bin_counts_stride=VOCABULARY if with_counts else 0,
        sampled_tokens_ptr=numbers(batch.num_reqs, DRAFTS + 1, high=4),  # the same token more than once
        sampled_tokens_stride=DRAFTS + 1,
        num_sampled_ptr=torch.tensor(sampled, dtype=torch.int32),
        num_rejected_ptr=torch.tensor(rejected, dtype=torch.int32),
        query_start_loc_ptr=batch.query_start_loc if with_queries else None,
        all_token_ids_ptr=numbers(MAX_REQS, MAX_LEN, dtype=torch.int32),
        all_token_ids_stride=MAX_LEN,
        total_len_ptr=batch.state([a + b for a, b in zip(batch.computed, batch.new, strict=True)]),
        num_warps=1,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mapping_may_have_either_type(dtype: torch.dtype) -> None:
    batch = Batch([4, 1], [3, 9], [6, 2], [1, 5], [1, 1])
    same(
        inputs.prepare_pos_seq_lens,
        (3,),
        pos_ptr=torch.full((MAX_TOKENS,), -7),
        seq_lens_ptr=torch.full((MAX_REQS,), -7, dtype=torch.int32),
        idx_mapping_ptr=batch.idx_mapping.to(dtype),
        query_start_loc_ptr=batch.query_start_loc,
        num_computed_tokens_ptr=batch.state(batch.computed),
        max_num_reqs=MAX_REQS,
        BLOCK_SIZE=4,
    )
