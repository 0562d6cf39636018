"""docs/estimator/index.html: its arithmetic is that of `plan`, in a JavaScript engine and in a browser."""

import json
import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tools.browser import FOLDER, Browser
from vllm_hisparse.cli.plan_report import report
from vllm_hisparse.config import GIB
from vllm_hisparse.planning.estimate import Setup, estimate
from vllm_hisparse.planning.machines import GPU_MEMORY_MIB, kv_memory_bytes
from vllm_hisparse.planning.models import BUILT_IN, load_model

quickjs = pytest.importorskip("quickjs")

PAGE = Path(__file__).parents[2] / "docs" / "estimator" / "index.html"
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


def test_nothing_is_fetched() -> None:
    """No script, style, font or picture from elsewhere."""
    source = PAGE.read_text()
    assert not re.search(r"\b(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", source)
    assert set(re.findall(r"https?://[^\"' ]+", source)) == {"http://www.w3.org/2000/svg"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The page in a headless Chromium. In CI it has to be there; elsewhere its tests are skipped."""
    if not (FOLDER / "chromium").exists():
        reason = f"no browser in {FOLDER}: `./run setup` fetches one where npm can"
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    with Browser() as page:
        page.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        page.open(PAGE.as_uri())
        yield page
        assert set(page.requests()) == {PAGE.as_uri()}, "the page asks for nothing but itself"
        assert page.complaints() == []


READ = """(() => {
    const data = (id) => Number(document.getElementById(id).dataset.value);
    const text = (id) => document.getElementById(id).textContent;
    return {
        plain: data("plain"), steady: data("steady"), gain: data("gain"), serve: text("serve"),
        advice: text("advice"), pools: text("pools"), context: text("context-out"),
        paths: document.querySelectorAll("#chart path").length,
        rows: [...document.querySelectorAll("#table tbody tr")].map((tr) => tr.textContent).length,
        wide: document.documentElement.scrollWidth <= window.innerWidth,
    };
})()"""


def _show(browser: Browser, words: str) -> dict[str, Any]:
    """What the page shows after its address has changed."""
    code = f"""new Promise((done) => {{
        addEventListener("hashchange", () => done({READ}), {{ once: true }});
        location.hash = "{words}";
    }})"""
    shown: dict[str, Any] = browser.evaluate(code)
    return shown


def _assert_shown(shown: dict[str, Any], setup: Setup, tp: int, where: str) -> None:
    ours = report(estimate(setup), tp, None, 0.92)
    assert shown["plain"] == pytest.approx(ours["plain"]["value"], abs=6e-5), where
    assert shown["steady"] == pytest.approx(ours["steady"]["value"] if ours["starts"] else 0, abs=6e-5), where
    assert shown["serve"] == ours["serve"], where
    advice = ours["advice"] if setup.kv_bytes > 0 else "The weights leave no memory for KV"
    assert advice[1:] in shown["advice"], where
    for key in ("num_device_blocks", "block_bytes", "num_regions"):
        assert f"{ours[key]:,}" in shown["pools"], (where, key)
    assert shown["paths"] == 3 and shown["rows"] > 5 and shown["wide"], where


@pytest.mark.browser
@pytest.mark.parametrize("name", BUILT_IN)
def test_in_a_browser(browser: Browser, name: str) -> None:
    model = load_model(name)
    grid = product(
        ("h100", "h200", "b200"), ((8, 0), (8, 2), (16, 1)), ("fp8", "bf16"), (4096, 33792, 163840)
    )
    for number, (gpu, (tp, mtp), dtype, context) in enumerate(grid):
        host = (None, 512, 2048, 6000)[number % 4]
        seqs = (8, 256, 2048)[number % 3]
        kv = (None, None, 17.5)[number % 3]
        given = {
            "model": name,
            "gpu": gpu,
            "tp": tp,
            "mtp": mtp,
            "dtype": dtype,
            "context": context,
            "seqs": seqs,
        }
        given |= {"host": "auto" if host is None else host} | ({} if kv is None else {"kv": kv})
        words = "&".join(f"{key}={value}" for key, value in given.items())
        memory = kv_memory_bytes(model, gpu, tp, mtp) if kv is None else int(kv * GIB)
        pool = None if host is None else host * GIB
        setup = Setup(model, max(0, memory), context, pool, mtp, dtype, seqs)
        _assert_shown(_show(browser, words), setup, tp, words)


@pytest.mark.browser
def test_a_slider_is_moved_by_keys(browser: Browser) -> None:
    before = _show(browser, "model=glm-5.2&gpu=h200&tp=8&context=65536&host=256")
    browser.evaluate('document.getElementById("context").focus()')
    for _ in range(20):
        browser.press("ArrowRight", 39)
    after = browser.evaluate(READ)
    context = int(re.sub(r"\D", "", after["context"]))
    assert context > 65536 and after["steady"] < before["steady"]
    model = load_model("glm-5.2")
    setup = Setup(model, kv_memory_bytes(model, "h200", 8, 0), context, 256 * GIB)
    _assert_shown(after, setup, 8, f"context {context}")
    assert f"context={context}" in browser.evaluate("location.hash")


@pytest.mark.browser
def test_every_control_changes_what_is_shown(browser: Browser) -> None:
    start = "model=glm-5.2&gpu=h200&tp=8&context=65536&host=2048&seqs=256"
    inputs = {"model": "deepseek-v3.2", "gpu": "b200", "tp": 16, "dtype": "bf16", "mtp": 2, "kv": 100}
    for name, value in (inputs | {"context": 100, "host": 128, "seqs": 3}).items():
        before = _show(browser, f"{start}&control={name}")
        browser.evaluate(
            f"""(() => {{ const control = document.getElementById("{name}"); control.value = "{value}";
            control.dispatchEvent(new Event("input", {{ bubbles: true }})); }})()"""
        )
        after = browser.evaluate(READ)
        assert (after["serve"], after["pools"]) != (before["serve"], before["pools"]), name


@pytest.mark.browser
def test_dark_and_light(browser: Browser) -> None:
    colours = [
        browser.evaluate(
            'document.getElementById("theme").click(); getComputedStyle(document.body).backgroundColor'
        )
        for _ in range(2)
    ]
    assert sorted(colours) == ["rgb(15, 19, 25)", "rgb(246, 247, 249)"]


@pytest.mark.browser
def test_the_picture_is_of_this_page(browser: Browser) -> None:
    """`python tools/screenshot.py` makes it, and keeps the page's text in it."""
    picture = PAGE.with_name("screenshot.png")
    assert picture.stat().st_size < 200_000
    browser.open(f"{PAGE.as_uri()}#theme=light")
    with Image.open(picture) as image:
        image.load()
        assert image.text["text"] == browser.evaluate("document.body.innerText")
