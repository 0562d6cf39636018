"""Every policy by name, in the order in which they are compared."""

from __future__ import annotations

from vllm_hisparse.policies.base import Policy
from vllm_hisparse.policies.frequency import Lfu, Lrfu
from vllm_hisparse.policies.kernel import LrfuKernel
from vllm_hisparse.policies.oracle import Belady
from vllm_hisparse.policies.recency import Clock, Fifo, KeepCurrent, Lru, Random
from vllm_hisparse.policies.s3fifo import S3Fifo
from vllm_hisparse.policies.scores import LowestScore, Saf

__all__ = ["POLICIES"]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        KeepCurrent,
        Fifo,
        Random,
        Lru,
        Clock,
        S3Fifo,
        Lfu,
        Lrfu,
        LrfuKernel,
        LowestScore,
        Saf,
        Belady,
    )
}
