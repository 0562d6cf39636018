"""Run by test_late.py: installs once in a fresh process, then forks for each case. Prints what came of them.

A case imports what a process of an engine might import first after the plugin, and breaks what it would find.
"""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import vllm.config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_hisparse.compat import install as module
from vllm_hisparse.compat.import_hook import when_imported
from vllm_hisparse.compat.install import CONNECTOR, CONNECTOR_MODULE, MANAGERS, OUR_MANAGERS
from vllm_hisparse.compat.ledger import LEDGER

VERSION = module.check_version()
THEIRS = sorted({seam.modules[VERSION] for seam in LEDGER} | {MANAGERS})
OURS = sorted({module._our_module(seam) for seam in LEDGER} | {OUR_MANAGERS, CONNECTOR_MODULE})
LATE = next(seam for seam in LEDGER if seam.symbol == "init_hisparse_kv_cache")


def missing_module() -> Any:
    """A module that this vLLM does not have."""
    seam = dataclasses.replace(LATE, modules={VERSION: "vllm.v1.worker.nowhere"})
    before = dict(KVConnectorFactory._registry)
    try:
        with patch.object(module, "LEDGER", (*LEDGER, seam)):
            module.install()
    except module.UnsupportedError as error:
        return str(error), KVConnectorFactory._registry == before
    return None


def first(name: str) -> Any:
    """Symbols, of modules that are there once `name` is, that are not ours; whether specs have a manager."""
    importlib.import_module(name)
    bound = [seam for seam in LEDGER if seam.modules[VERSION] in sys.modules]
    places = [(seam, *module.seam_place(seam, VERSION)) for seam in bound]
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_ROLE_MANAGERS

    has_manager = "hisparse_plugin_source" in _REGISTRY_ROLE_MANAGERS
    return {
        "others": [s.symbol for s, *place in places if getattr(*place).__module__ != module._our_module(s)],
        "is_right": (MANAGERS in sys.modules) == has_manager,
    }


def broken(prepare: Callable[[], Any]) -> Any:
    """(what the import says, what asking for the connector says) if a symbol has another signature."""
    name = LATE.modules[VERSION]
    prepare()
    try:
        importlib.import_module(name)
    except module.UnsupportedError as error:
        imported = str(error)
    else:
        imported = None
    return imported, _ask()


def _ask() -> str | None:
    try:
        KVConnectorFactory._registry[CONNECTOR]()
    except module.UnsupportedError as error:
        return str(error)
    return None


def _configure() -> None:
    config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=object()))
    patch.object(vllm.config, "get_current_vllm_config_or_none", lambda: config).start()


def in_a_fork(case: Callable[[], Any]) -> Any:
    """What `case` returns, in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(case()).encode())
        except BaseException as error:
            os.write(write, json.dumps(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return result


def break_late() -> None:
    """Whoever imports the module finds another function than vLLM's."""
    name = LATE.modules[VERSION]
    when_imported([name], lambda: setattr(sys.modules[name], LATE.symbol, lambda something: None))


def main() -> None:
    result: dict[str, Any] = {"missing": in_a_fork(missing_module)}
    before = set(sys.modules)
    assert LATE.modules[VERSION] not in before
    result["broken"] = in_a_fork(lambda: (break_late(), module.install(), broken(lambda: None))[-1])
    result["broken, configured"] = in_a_fork(lambda: (break_late(), module.install(), broken(_configure))[-1])
    result["broken, asked"] = in_a_fork(lambda: (break_late(), module.install(), broken(_ask))[-1])
    module.install()
    result["imported"] = sorted(set(sys.modules) - before)
    result["first"] = {name: in_a_fork(lambda name=name: first(name)) for name in (*THEIRS, *OURS)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
