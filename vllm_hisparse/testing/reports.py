"""What goes between scheduler and ranks in a step, with one connector or several below a MultiConnector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

__all__ = ["step_metadata", "step_result"]


def step_metadata(output: Any) -> tuple[Any, ...]:
    """Each connector's metadata in a SchedulerOutput."""
    meta = output.kv_connector_metadata
    return meta.metadata if isinstance(meta, MultiKVConnectorMetadata) else (meta,)


def step_result(
    sampled: dict[str, list[int]],
    reports: Sequence[Sequence[Any]],
    received: set[str],
    failed: set[str],
    sent: set[str],
) -> ModelRunnerOutput:
    """A step's result from `reports`, [rank][connector], and requests whose loads have ended, of these the
    failed ones, and whose pages another engine has read.
    """
    columns = [_aggregate(column) for column in zip(*reports, strict=True)]
    is_empty = all(column is None for column in columns)
    meta = columns[0] if len(columns) == 1 else MultiKVConnectorWorkerMetadata(tuple(columns))
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
        sampled_token_ids=[list(tokens) for tokens in sampled.values()],
        kv_connector_output=KVConnectorOutput(
            kv_connector_worker_meta=None if is_empty else meta,
            finished_recving=received or None,
            failed_recving=failed,
            finished_sending=sent or None,
        ),
    )


def _aggregate(reports: Sequence[Any]) -> Any:
    present = [report for report in reports if report is not None]
    return reduce(lambda one, other: one.aggregate(other), present) if present else None
