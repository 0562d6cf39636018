"""Every command in a document exists, with every option it is shown with; the quick ones are run."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("vllm")

from typer.testing import CliRunner
from vllm.config.attention import HiSparseConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_hisparse.cli.main import app
from vllm_hisparse.config import read_options

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")])
PROGRAMS = (
    "vllm-hisparse",
    "vllm serve",
    "./run",
    "python",
    "pytest",
    "docker compose",
    "--attention-config",
)
PLACEHOLDER = re.compile(r"\b[A-Z]{1,}\b|\.\.\.|path/to")
TYPER = typer.main.get_command(app)


def commands(document: Path) -> Iterator[str]:
    """Commands in code: indented or fenced lines, and what stands in backquotes. Comments are cut off."""
    text = document.read_text().replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in re.findall(r"^ {4}(.*)$", text, re.MULTILINE)]
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines += [line.strip().removeprefix("$ ") for line in block.splitlines()]
    for code in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
        command = re.sub(r"\s{2,}# .*$", "", code)
        if command.startswith(tuple(f"{program} " for program in PROGRAMS)):
            yield command


COMMANDS = [(document.name, command) for document in DOCUMENTS for command in commands(document)]


def options_of(words: list[str]) -> list[str]:
    """Names of the options, without the brackets and dots around optional ones."""
    found = [re.match(r"\[?(--?[a-zA-Z][\w-]*)", word) for word in words]
    return [match[1] for match in found if match]


def own_command(words: list[str]) -> Any:
    """The subcommand that the words name; raises KeyError for one that does not exist."""
    command: Any = TYPER
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    return command


def vllm_options() -> set[str]:
    parser = make_arg_parser(FlexibleArgumentParser())
    return {option for action in parser._actions for option in action.option_strings}


def check_json(words: list[str]) -> None:
    """JSON arguments are JSON, and what is in them is known to whom it is for."""
    for word in words:
        if not word.startswith("{") or "..." in word:
            continue
        content: dict[str, Any] = json.loads(word)
        if "kv_connector_extra_config" in content:
            read_options(content["kv_connector_extra_config"])
        for key in content.get("hisparse_config", {}):
            assert key in HiSparseConfig.__dataclass_fields__, key


def check(command: str) -> None:
    """Raises AssertionError or KeyError if the command cannot be typed."""
    words = shlex.split(command)
    options = options_of(words)
    check_json(words)
    if words[0] == "vllm-hisparse":
        known = {name for p in own_command(words[1:]).params for name in (*p.opts, *p.secondary_opts)}
        assert set(options) <= known | {"--help"}, command
    elif words[0] in ("vllm", "--attention-config"):
        assert set(options) <= vllm_options(), command
    elif words[0] == "./run":
        run = (ROOT / "run").read_text()
        assert re.search(rf"^  {words[1]}\) ", run, re.MULTILINE), command
        if words[1] == "bench" and not PLACEHOLDER.search(words[2]):
            check_script(ROOT / "examples" / "bench" / f"{words[2]}.py", options)
    elif words[0] == "python" and words[1] == "-m":
        check_script(ROOT / (words[2].replace(".", "/") + ".py"), options[1:])
    elif words[0] == "python":
        check_script(ROOT / words[1], options)
    else:
        files = [word for word in words[1:] if "/" in word]
        assert files and all((ROOT / file).exists() for file in files), command


def check_script(script: Path, options: list[str]) -> None:
    assert script.exists(), script
    source = script.read_text()
    assert [option for option in options if option not in source] == [], script


def test_commands_are_found() -> None:
    for program in PROGRAMS:
        assert any(command.startswith(program) for _, command in COMMANDS), program
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(
    ("document", "command"), COMMANDS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(COMMANDS)]
)
def test_the_command_exists(document: str, command: str) -> None:
    check(command)


QUICK = sorted(
    {c for _, c in COMMANDS if re.match(r"vllm-hisparse (plan \w|doctor)", c) and not PLACEHOLDER.search(c)}
)


@pytest.mark.parametrize("command", QUICK)
def test_the_command_runs(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output


def test_mistakes_are_found() -> None:
    for wrong in (
        "vllm-hisparse plan glm-5.2 --no-such-option",
        "vllm serve MODEL --kv-transfer-confg x",
        "python tools/no_such_tool.py",
        "./run demolish",
    ):
        with pytest.raises(AssertionError):
            check(wrong)
    with pytest.raises(KeyError):
        check("vllm-hisparse plann")
    with pytest.raises(ValueError, match="unknown options"):
        check(
            """vllm serve MODEL --kv-transfer-config '{"kv_connector_extra_config": {"host_pool_gb": 1}}'"""
        )
