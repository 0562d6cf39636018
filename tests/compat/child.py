"""Run by test_install.py in a fresh process, where vLLM is as it was shipped: prints what install does to it.

First with a version that is not supported, then with a symbol of another signature, then as it should be. The
first two must change nothing, so one process can do all three.
"""

import inspect
import json
from typing import Any
from unittest.mock import patch

import vllm
from vllm import version as vllm_version
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_hisparse.compat.install import CONNECTOR, check_version, install, seam_place
from vllm_hisparse.compat.ledger import LEDGER, Seam

VERSION = check_version()


def current(seam: Seam) -> Any:
    return getattr(*seam_place(seam, VERSION))


def state() -> list[Any]:
    registries = (KVConnectorFactory._registry[CONNECTOR], dict(KVCacheSpecRegistry.__dict__))
    return [*map(current, LEDGER), registries[0], *map(repr, registries[1].values())]


def attempt() -> dict[str, Any]:
    before = state()
    try:
        install()
    except RuntimeError as error:
        return {"error": str(error), "changed": state() != before}
    return {"error": None, "changed": state() != before}


def with_another_version() -> dict[str, Any]:
    with (
        patch.object(vllm_version, "__version_tuple__", (0, 99, 0)),
        patch.object(vllm, "__version__", "0.99.0"),
    ):
        return attempt()


def with_another_signature(seam: Seam) -> dict[str, Any]:
    def changed(something: Any, else_: Any) -> None:
        raise NotImplementedError

    with patch.object(*seam_place(seam, VERSION), changed):
        return attempt()


def main() -> None:
    result: dict[str, Any] = {"version": vllm.__version__}
    result["shipped"] = {
        seam.symbol: [list(inspect.signature(current(seam)).parameters), current(seam).__module__]
        for seam in LEDGER
    }
    result["other version"] = with_another_version()
    result["other signature"] = {seam.symbol: with_another_signature(seam) for seam in LEDGER}
    result["first"] = attempt()
    result["installed"] = {seam.symbol: current(seam).__module__ for seam in LEDGER}
    result["connector"] = KVConnectorFactory._registry[CONNECTOR]().__module__
    result["second"] = attempt()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
