"""The demo without an engine: what it draws, says, compares and returns."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_hisparse.cli.demo import command, sizes
from vllm_hisparse.cli.demo.engine import find_problem
from vllm_hisparse.cli.demo.frames import (
    Cell,
    Finished,
    Frame,
    Mode,
    Output,
    Phase,
    Pool,
    Refused,
    RequestFrame,
    Started,
    Step,
)
from vllm_hisparse.cli.demo.lines import Lines
from vllm_hisparse.cli.demo.process import DemoError, EngineProcess
from vllm_hisparse.cli.demo.progress import Progress
from vllm_hisparse.cli.demo.summary import first_difference, report
from vllm_hisparse.cli.demo.view import View
from vllm_hisparse.cli.main import app
from vllm_hisparse.scheduler.snapshot import CellKind

OUTPUT = Output((7, 8), (((7, (-0.5).hex()),), ((8, (-0.25).hex()),)))
STARTED = Started(Pool(6, 100, 600, 50, 9, 80), {"vllm": "1.2.3"}, 1.0)


def request(name: str, phase: Phase, **fields: object) -> RequestFrame:
    """A request with two new tokens."""
    values = {"prompt_tokens": 10, "tokens": (7, 8), "num_new_tokens": 2, "num_preemptions": 0, **fields}
    return RequestFrame(name=name, phase=phase, **values)  # type: ignore[arg-type]


def step(mode: Mode) -> Step:
    """A step in which plain vLLM has preempted B and HiSparse has pages of A on the host."""
    if mode is not Mode.HISPARSE:
        b = request("B", Phase.PREEMPTED if mode is Mode.PLAIN else Phase.DECODING, num_preemptions=1)
        cells = (Cell(CellKind.RESIDENT, "A"), Cell(CellKind.CACHED, ""))
        return Step(1, 1, (request("A", Phase.DECODING), b), cells, 1)
    a = request("A", Phase.DECODING, pages=("clean", "host", "dirty"), residency="mixed", hot_rows=64)
    cells = (Cell(CellKind.MIRRORED, "A"), Cell(CellKind.HOT, "A"), Cell(CellKind.INDEXER, "B"))
    return Step(
        1,
        2,
        (a, request("B", Phase.DECODING)),
        cells,
        0,
        5,
        spilled_pages=5,
        hits=3,
        misses=1,
        host_rows_read=3,
    )


def frames(mode: Mode, outputs: dict[str, Output]) -> list[Frame]:
    """A whole run of one step."""
    return [STARTED, step(mode), Finished(outputs, int(mode is Mode.PLAIN), 2.0)]


def finished_progress(hisparse: Output = OUTPUT) -> Progress:
    """Three runs, of which HiSparse gave `hisparse` for request A."""
    progress = Progress()
    for mode in Mode:
        outputs = {"A": hisparse if mode is Mode.HISPARSE else OUTPUT, "B": OUTPUT}
        for frame in frames(mode, outputs):
            progress.add(mode, frame)
    return progress


def drawn(progress: Progress, width: int = 120) -> str:
    """The picture as text."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(View(progress))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_frames_survive_the_pipe() -> None:
    decoder = msgspec.json.Decoder(Frame)
    for frame in (*frames(Mode.HISPARSE, {"A": OUTPUT}), Refused("no")):
        assert decoder.decode(msgspec.json.encode(frame)) == frame


def test_picture_before_the_first_frame() -> None:
    assert "starting" in drawn(Progress())


@pytest.mark.parametrize("mode", Mode)
def test_picture_shows_pool_requests_and_timeline(mode: Mode) -> None:
    progress = Progress()
    for frame in frames(mode, {"A": OUTPUT, "B": OUTPUT})[:2]:
        progress.add(mode, frame)
    text = drawn(progress)
    for part in ("HiSparse keeps all KV in host memory", "6 blocks x 100 B", "who decodes when", "w7 w8"):
        assert part in text
    assert "request A" in text and "request B" in text
    if mode is Mode.HISPARSE:
        for part in (
            "A=",
            "Ah",
            "Bi",
            "residency Mixed: 1 of 3 pages host only",
            "64 hot rows",
            "3 hits, 1 misses",
        ):
            assert part in text
    if mode is Mode.PLAIN:
        assert "✗ preempted" in text and "A•" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_picture_fits_a_terminal_of_40_lines() -> None:
    assert len(drawn(finished_progress()).splitlines()) <= 38


def test_lines_tell_changes_once() -> None:
    progress, console = Progress(), Console(file=io.StringIO(), width=80)
    lines = Lines(progress, console)
    for frame in (STARTED, step(Mode.HISPARSE), step(Mode.HISPARSE)):
        progress.add(Mode.HISPARSE, frame)
        lines.show(frame)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue().splitlines()
    assert len(said) == 2
    assert "A decoding, 2 new tokens, mixed (1 clean, 1 host, 1 dirty)" in said[1]


def test_timeline_shows_a_span_by_what_it_was_mostly() -> None:
    progress = Progress()
    phases = [Phase.PREFILL, Phase.DECODING, Phase.DECODING, Phase.PREEMPTED]
    progress.runs[Mode.PLAIN].phases["A"] = phases
    assert progress.columns(Mode.PLAIN, "A", 2, 6) == [Phase.DECODING, Phase.PREEMPTED]
    assert progress.columns(Mode.HISPARSE, "A", 2, 6) == [None, None]


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        (Output((7, 9), OUTPUT.logprobs), "new token 1: 9 instead of 8"),
        (Output((7,), OUTPUT.logprobs[:1]), "1 tokens instead of 2"),
        (
            Output((7, 8), (OUTPUT.logprobs[0], ((8, (-0.25000000000000006).hex()),))),
            "log-probabilities of new token 1",
        ),
        (Output((7, 8), (((7, (0.0).hex()),), OUTPUT.logprobs[1])), "log-probabilities of new token 0"),
    ],
)
def test_the_first_difference_is_named(changed: Output, where: str) -> None:
    difference = first_difference({"A": OUTPUT, "B": changed}, {"A": OUTPUT, "B": OUTPUT})
    assert difference is not None
    assert where in difference


def test_zeros_of_either_sign_differ() -> None:
    zero, minus_zero = (Output((1,), (((1, value.hex()),),)) for value in (0.0, -0.0))
    assert first_difference({"A": minus_zero}, {"A": zero}) is not None


def test_equal_outputs_have_no_difference() -> None:
    assert first_difference({"A": OUTPUT}, {"A": OUTPUT}) is None
    assert first_difference({}, {"A": OUTPUT}) is not None


def test_report_is_what_was_measured() -> None:
    figures = report(finished_progress())
    assert figures["identical"] and figures["identical_plain"]
    assert figures["mean_decoding_plain"] == 1.0
    assert figures["mean_decoding_hisparse"] == 2.0
    assert (figures["preemptions_plain"], figures["preemptions_hisparse"]) == (1, 0)
    assert figures["hit_rate"] == 0.75
    assert figures["max_host_only_pages"] == 1
    assert figures["pools"]["hisparse"]["bytes"] == 600


def run_with(monkeypatch: pytest.MonkeyPatch, run: Callable[[Progress], None]) -> Callable[[bool], int]:
    """`run_demo` whose engines are replaced by `run`."""
    monkeypatch.setattr(command, "run_engines", lambda progress, *args: run(progress))
    return command.run_demo


def filled(hisparse: Output) -> Callable[[Progress], None]:
    """Stands for engines of which HiSparse gave `hisparse`."""

    def run(progress: Progress) -> None:
        progress.runs = finished_progress(hisparse).runs

    return run


def test_json_is_the_last_line_of_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, filled(OUTPUT))(True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["identical"] is True
    assert "outputs identical to full residency: yes" in captured.err


def test_a_difference_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = Output((7, 9), OUTPUT.logprobs)
    assert run_with(monkeypatch, filled(changed))(False) == command.DIFFERENT
    out = capsys.readouterr().out
    assert "outputs identical to full residency: NO" in out
    assert "request A, new token 1: 9 instead of 8" in out


def test_the_exit_code_is_the_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, filled(Output((7, 9), OUTPUT.logprobs)))
    assert CliRunner().invoke(app, ["demo"]).exit_code == command.DIFFERENT
    run_with(monkeypatch, filled(OUTPUT))
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0


def test_another_build_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_problem() is None
    platform = SimpleNamespace(is_cpu=lambda: False, device_name="cuda")
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    problem = find_problem()
    assert problem is not None
    assert "for cuda; need its CPU build because" in problem


def test_a_failed_engine_is_an_exit_code_and_names_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(progress: Progress) -> None:
        raise DemoError("got another build")

    assert run_with(monkeypatch, fail)(False) == command.FAILED
    out = capsys.readouterr().out
    assert "got another build" in out
    log = next(line for line in out.splitlines() if "log is" in line).split()[-1]
    Path(log).parent.rmdir()


def test_an_engine_that_dies_is_an_error_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    engine = EngineProcess(Mode.PLAIN, tmp_path, tmp_path / "log")
    (tmp_path / "log").write_text("first\nout of luck\n")
    with pytest.raises(DemoError, match=r"plain engine ended with exit code 1: out of luck"):
        list(engine.frames(lambda: None))
    engine.stop()
    engine.stop()


def test_prompts_are_the_same_in_every_process() -> None:
    assert sizes.prompts() == sizes.prompts()
    assert [len(p) for p in sizes.prompts().values()] == list(sizes.PROMPT_TOKENS)


def test_both_pools_have_the_same_bytes_but_for_less_than_a_block() -> None:
    pools = sizes.plan_pools()
    difference = pools.budget_bytes - pools.num_hisparse_blocks * pools.hisparse_block_bytes
    assert 0 <= difference < pools.hisparse_block_bytes
