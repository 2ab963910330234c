"""The code in the documents: examples are run, and command lines are read by the commands' parsers.

`tests/clients/test_documents.py` runs the examples of other projects' clients.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import soundfile
import typer

from tests.checkpoints import write_checkpoint
from tests.clients.test_documents import CLIENTS
from tests.documents import BLOCKS, DOCUMENTS, ROOT, SAMPLE, Block, blocks_of, in_language
from tests.server.fake_engine import tone
from tests.server.harness import TIMEOUT_S, serve
from voxlite.server.cli import app

# The fake engine hears three words in it.
AUDIO = tone(1, 2, 3, num_tokens=2)
WORDS = ["w1", "w2", "w3"]
OWN_CLIENT = "voxlite.client"
OWN_ENGINE = "voxlite.engine"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MARKERS = {marker.split(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
LONGEST_README = 200
# What a newcomer has to have, and what takes any arguments.
PROGRAMS = {"cd", "git", "ruff", "mypy"}


def name_of(block: Block) -> str:
    return block.where


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**environment, "no_proxy": "127.0.0.1"},
        **options,
    )


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "a.wav", AUDIO, 16_000, subtype="PCM_16")
    return tmp_path / "a.wav"


# Every block is run, read or marked.


def test_every_block_is_tested_or_says_why_not() -> None:
    covered = [
        *in_language("sh"),
        *in_language("js"),
        *in_language("python", OWN_CLIENT, OWN_ENGINE, *CLIENTS),
    ]
    left = [b.where for b in BLOCKS if b.why_untested is None and b not in covered]
    assert left == []


def test_blocks_are_found_fenced_and_indented_with_their_marks() -> None:
    text = """\
Text:

    voxlite demo

        indented

<!-- not tested: because -->
```python
    x = 1
```

- a list
    goes on

<!-- a comment -->

    last
"""
    found = [(b.line, b.language, b.text, b.why_untested) for b in blocks_of("a.md", text)]
    assert found == [
        (3, "sh", "voxlite demo\n\n    indented\n", None),
        (8, "python", "    x = 1\n", "because"),
        (17, "sh", "last\n", None),
    ]


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "tests/README.md"])
def test_every_marker_has_a_row(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / name).read_text(), re.MULTILINE)
    assert set(rows) == MARKERS


# Examples are run.


@pytest.mark.parametrize("block", in_language("python", OWN_CLIENT), ids=name_of)
def test_examples_of_the_bundled_client_print_the_text(block: Block, sample: Path) -> None:
    with serve() as live:
        code = block.with_values(address=f"127.0.0.1:{live.port}", sample=str(sample))
        done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == WORDS


@pytest.mark.parametrize("block", in_language("python", OWN_ENGINE), ids=name_of)
def test_examples_of_the_engine_print_events(block: Block, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    soundfile.write(tmp_path / "a.wav", AUDIO, 16_000)
    code = block.with_values(sample=str(tmp_path / "a.wav")).replace("models/demo", str(model))
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert "UtteranceDone" in done.stdout


@pytest.mark.parametrize("block", in_language("js"), ids=name_of)
def test_examples_in_javascript_print_the_text(block: Block, sample: Path) -> None:
    node = shutil.which("node")
    if node is None or run([node, "--experimental-websocket", "-e", "0"]).returncode:
        pytest.skip("needs Node 20.10 or newer")
    with serve() as live:
        address = f"127.0.0.1:{live.port}"
        code = block.with_values(address=address, sample=str(sample))
        # Node has a WebSocket of its own, as browsers have, and no page to load the sample from.
        code = code.replace('import WebSocket from "ws";\n', "")
        code = code.replace(
            f'await fetch("http://{address}/web/sample.wav")',
            f'new Blob([(await import("node:fs")).readFileSync({str(sample)!r})])',
        )
        arguments = ["--experimental-websocket", "--input-type=module", "-e", code]
        done = run([node, *arguments])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == WORDS


@pytest.mark.parametrize(
    "block", [b for b in in_language("sh") if b.text.startswith("curl ")], ids=name_of
)
def test_examples_of_curl_print_the_text(block: Block, sample: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    with serve() as live:
        command = block.with_values(address=f"127.0.0.1:{live.port}", sample=str(sample))
        done = run(["curl", "--silent", "--fail-with-body", *shlex.split(command)[1:]])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.sub(r"\W+", " ", done.stdout).split().count("w2") >= 1


# Command lines are read.


def command_lines(text: str) -> list[list[str]]:
    """Split shell code into commands, each a list of words without a file that it writes to."""
    lines = re.sub(r" > \S+", "", text.replace("\\\n", " ")).splitlines()
    commands = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while "&&" in words:
            commands.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        commands.append(words)
    return [words for words in commands if words]


@cache
def help_of(module: str) -> str:
    done = run([sys.executable, "-m", module, "--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_flags(module: str, arguments: list[str]) -> None:
    # Training tools import for seconds: their flags stand in their source.
    is_training = module.startswith("training.")
    source = ROOT / f"{module.replace('.', '/')}.py"
    known = source.read_text() if is_training else help_of(module)
    for argument in arguments:
        if argument.startswith("--"):
            assert argument in known, f"{module} has no {argument}"


def check_voxlite(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    name, *rest = arguments
    command = group.get_command(group.make_context("voxlite", [], resilient_parsing=True), name)
    assert command is not None, name
    command.make_context(name, rest)  # raises where the command would


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    for extras in re.findall(r"\[(.*?)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= EXTRAS, extras


def check_pytest(arguments: list[str]) -> None:
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=False):
        if flag == "-m":
            assert set(re.findall(r"\w+", value)) - {"not", "and", "or"} <= MARKERS, value
        elif not flag.startswith("-") and "/" in flag:
            assert (ROOT / flag.split("::")[0]).exists(), flag


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m" and arguments[1] == "venv":
        return
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
        if arguments[1].startswith(("training.", "voxlite.")):
            check_flags(arguments[1], arguments[2:])
        return
    module = arguments[0].removesuffix(".py").replace("/", ".")
    check_flags(f"voxlite.{module}", arguments[1:])


def check_torchrun(arguments: list[str]) -> None:
    check_python(arguments[arguments.index("-m") :])


CHECKS = {
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "voxlite": check_voxlite,
}


@pytest.mark.parametrize(
    "block", [b for b in in_language("sh") if not b.text.startswith("curl ")], ids=name_of
)
def test_commands_and_their_flags_exist(block: Block) -> None:
    for program, *arguments in command_lines(block.text):
        name = program.removeprefix(".venv/bin/")
        if name in CHECKS:
            CHECKS[name](arguments)
        elif "/" in name:
            assert (ROOT / name).exists(), name
        else:
            assert name in PROGRAMS, f"{name} isn't checked: mark the block, or add a check"


@pytest.mark.parametrize(
    "line",
    [
        "voxlite serve --nonesuch",
        "voxlite nonesuch",
        "pip install -e '.[nonesuch]'",
        "pytest -m nonesuch",
        "python -m voxlite.nonesuch",
        "python client/microphone_client.py --nonesuch",
        "nonesuch",
    ],
)
def test_a_command_line_that_is_wrong_is_noticed(line: str) -> None:
    block = Block(document="a.md", line=1, language="sh", text=line)
    with pytest.raises(Exception, match="(?i)nonesuch"):
        test_commands_and_their_flags_exist(block)


def test_the_sample_that_examples_use_is_there() -> None:
    assert (ROOT / SAMPLE).is_file()
