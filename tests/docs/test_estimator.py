"""docs/estimator/index.html: its arithmetic is that of `plan`, in a JavaScript engine and in a browser."""

import html
import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from vllm_hisparse.cli.plan_report import report
from vllm_hisparse.config import GIB
from vllm_hisparse.planning.estimate import HOST_STEP, Setup, estimate
from vllm_hisparse.planning.machines import GPU_MEMORY_MIB, kv_memory_bytes
from vllm_hisparse.planning.models import BUILT_IN, load_model

quickjs = pytest.importorskip("quickjs")

PAGE = Path(__file__).parents[2] / "docs" / "estimator" / "index.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
)
CONTEXTS = (1, 64, 4096, 32768, 131072, 163840)
KV_GIB = (0, 1, 2.5, 17.25, 36, 120)
HOST_GIB = (None, 1, 40.5, 512)


@pytest.fixture(scope="module")
def script() -> Any:
    """The page's arithmetic, as a JavaScript context."""
    source = PAGE.read_text()
    context = quickjs.Context()
    for name in ("constants", "arithmetic"):
        found = re.search(rf'<script id="{name}">(.*?)</script>', source, re.DOTALL)
        assert found
        context.eval(found[1])
    return context


def in_javascript(script: Any, setup: Setup, tensor_parallel: int) -> dict[str, Any]:
    """What the page says of a setup, under the names of `plan --json`."""
    given = {
        "kvBytes": setup.kv_bytes,
        "context": setup.context,
        "hostPoolBytes": setup.host_pool_bytes,
        "mtp": setup.speculative_tokens,
        "dtype": setup.kv_dtype,
        "requests": setup.max_requests,
    }
    code = f"""(() => {{
        const r = estimate({{ ...{json.dumps(given)}, model: CONSTANTS.models["{setup.model.name}"] }});
        const keys = ["num_device_blocks", "num_host_blocks", "plain", "admission", "steady", "floor"];
        return JSON.stringify({{
            ...Object.fromEntries(keys.map((key) => [key, r[key]])),
            starts: r.starts, advice: r.advice, gain: r.gain, num_regions: r.regions,
            block_bytes: r.geometry.stride, num_parts: r.geometry.parts, indexer_pages: r.geometry.pages,
            admission_blocks: r.need.admission, steady_blocks: r.need.steady(r.need.start),
            host_pool_gib: r.poolBytes / CONSTANTS.gib,
            needed_host_pool_gib: r.neededBytes / CONSTANTS.gib,
            serve: serveLine(r, {tensor_parallel}),
        }});
    }})()"""
    result: dict[str, Any] = json.loads(script.eval(code))
    for key in ("plain", "admission", "steady", "floor"):
        del result[key]["exact"]
    return result


def assert_equal(theirs: Any, ours: Any, where: str) -> None:
    """JSON values, numbers up to the digits that `plan` prints."""
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            assert_equal(value, ours[key], f"{where}.{key}")
    elif isinstance(theirs, float):
        assert theirs == pytest.approx(ours, abs=6e-5), where
    else:
        assert theirs == ours, where


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("mtp", [0, 1, 4])
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_page_says_what_plan_says(script: Any, name: str, mtp: int, dtype: str) -> None:
    model = load_model(name)
    for i, (context, kv, host) in enumerate(product(CONTEXTS, KV_GIB, HOST_GIB)):
        requests, ranks = (1, 256, 1024)[i % 3], (1, 8)[i % 2]
        pool = None if host is None else int(host * GIB)
        setup = Setup(model, int(kv * GIB), context, pool, mtp, dtype, requests)
        ours = report(estimate(setup), ranks, None, 0.92)
        assert_equal(in_javascript(script, setup, ranks), ours, f"{context} {kv} {host}")


def test_kv_memory_of_gpus(script: Any) -> None:
    for name, gpu, ranks, mtp in product(BUILT_IN, GPU_MEMORY_MIB, (1, 2, 8, 16), (0, 2)):
        theirs = script.eval(f'kvMemoryBytes(CONSTANTS.models["{name}"], "{gpu}", {ranks}, {mtp})')
        assert theirs == kv_memory_bytes(load_model(name), gpu, ranks, mtp)


def test_a_ranks_share_of_the_host(script: Any) -> None:
    for gib, ranks in product((1, 100, 2048), (1, 3, 8)):
        assert script.eval(f"hostShare({gib}, {ranks})") == gib * GIB // ranks // HOST_STEP * HOST_STEP


def test_nothing_is_fetched() -> None:
    """No script, style, font or picture from elsewhere."""
    source = PAGE.read_text()
    assert not re.search(r"\b(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", source)
    assert set(re.findall(r"https?://[^\"' ]+", source)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("gpu", "tp", "context", "host", "mtp"),
    [("h200", 8, 131072, 2048, 0), ("b200", 8, 32768, None, 2), ("h200", 16, 1048576, 4096, 1)],
)
def test_in_a_browser(tmp_path: Path, gpu: str, tp: int, context: int, host: int | None, mtp: int) -> None:
    model = load_model("glm-5.2")
    pool = None if host is None else host * GIB // tp // HOST_STEP * HOST_STEP
    setup = Setup(model, kv_memory_bytes(model, gpu, tp, mtp), context, pool, mtp)
    ours = report(estimate(setup), tp, None, 0.92)
    words = f"model=glm-5.2&gpu={gpu}&tp={tp}&context={context}&host={host or 'auto'}&mtp={mtp}"
    shown = _dump(f"{PAGE.as_uri()}#{words}", tmp_path)
    assert _value(shown, "plain") == pytest.approx(ours["plain"]["value"], abs=6e-5)
    assert _value(shown, "steady") == pytest.approx(ours["steady"]["value"], abs=6e-5)
    assert html.unescape(_text(shown, "serve")) == ours["serve"]
    assert ours["advice"][1:] in html.unescape(_text(shown, "advice"))
    assert shown.count("<path") == 3


def _dump(url: str, profile: Path) -> str:
    """The page after its scripts have run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def _value(shown: str, name: str) -> float:
    found = re.search(rf'id="{name}" data-value="([^"]*)"', shown)
    assert found, name
    return float(found[1])


def _text(shown: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>(.*?)</', shown, re.DOTALL)
    assert found, name
    return found[1]
