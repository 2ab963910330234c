"""The Dockerfiles: what they promise, and, under the marker `docker`, their steps carried out.

No Docker is needed: an image's folders become folders below a temporary one, its install steps run
in a new virtual environment there, and its start command is started, checked and stopped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).parent.parent
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")
PORT = "8000"
IMAGE_FOLDERS = ("/opt/voxlite", "/src", "/models", "/tmp")
INSTALL_TIMEOUT_S = 1200
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 5


class Step(NamedTuple):
    instruction: str
    arguments: str


@dataclass
class Stage:
    """One stage of a Dockerfile and its steps, in order."""

    image: str
    name: str | None
    steps: list[Step] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [step.arguments for step in self.steps if step.instruction == instruction]

    def only(self, instruction: str) -> str:
        [arguments] = self.all(instruction)
        return arguments


def parse(text: str) -> list[Stage]:
    """Read a Dockerfile as far as these use its language."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    defaults: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(str.strip, text.splitlines()):
        step = Step(*line.split(maxsplit=1))
        if step.instruction == "FROM":
            image, *name = step.arguments.split(" AS ")
            image = image.replace("${PYTHON_IMAGE}", defaults.get("PYTHON_IMAGE", ""))
            stages.append(Stage(image, *name) if name else Stage(image, None))
        elif not stages:
            assert step.instruction == "ARG"
            name_, default = step.arguments.split("=", 1)
            defaults[name_] = default
        else:
            stages[-1].steps.append(step)
    return stages


def environment(stage: Stage) -> dict[str, str]:
    pairs = (pair.split("=", 1) for step in stage.all("ENV") for pair in shlex.split(step))
    return {name: value for name, value in pairs}


def sources(copy: str) -> list[str]:
    """Return what a COPY takes from the checkout."""
    return [] if copy.startswith("--from=") else copy.split()[:-1]


@pytest.fixture(params=DOCKERFILES)
def stages(request: pytest.FixtureRequest) -> list[Stage]:
    return parse((ROOT / request.param).read_text())


def test_stages_start_from_one_slim_pinned_image(stages: list[Stage]) -> None:
    assert len(stages) == 2
    assert len({stage.image for stage in stages}) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", stages[0].image)


def test_the_server_runs_as_a_user_in_exec_form(stages: list[Stage]) -> None:
    final = stages[-1]
    user = final.only("USER")
    assert user not in ("root", "0")
    assert f"useradd --uid 10001 --no-create-home {user}" in final.all("RUN")[0]
    # As a list: the server itself gets SIGTERM, not a shell.
    assert json.loads(final.only("ENTRYPOINT")) == ["voxlite", "serve"]
    assert final.all("CMD") == []
    assert final.only("EXPOSE") == PORT
    assert environment(final)["VOXLITE_HOST"] == "0.0.0.0"


def test_downloaded_models_are_kept_in_the_volume(stages: list[Stage]) -> None:
    final = stages[-1]
    assert final.only("VOLUME") == environment(final)["HF_HOME"]
    assert f"install -d -o {final.only('USER')} {final.only('VOLUME')}" in final.all("RUN")[0]


def test_copied_paths_are_there_and_not_ignored(stages: list[Stage]) -> None:
    kept = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [path for stage in stages for copy in stage.all("COPY") for path in sources(copy)]
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / path).exists() for path in copied)


def test_only_pytorchs_index_is_an_argument_and_empty_by_default() -> None:
    arguments = {
        name: [
            argument for stage in parse((ROOT / name).read_text()) for argument in stage.all("ARG")
        ]
        for name in DOCKERFILES
    }
    assert arguments == {"Dockerfile.cpu": ['TORCH_INDEX_URL=""'], "Dockerfile.cuda": []}


def test_every_dependency_is_pinned_to_a_version_that_suits() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


class Container:
    """A stand-in for a container: the steps of an image, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"PATH": f"{root}/bin:/usr/bin:/bin", "HOME": str(root)}
        self.env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.workdir = root
        for name in ("bin", "tmp"):
            (root / name).mkdir()
        (root / "bin" / "python").symlink_to(getattr(sys, "_base_executable", sys.executable))

    def here(self, text: str) -> str:
        """Move an image's absolute paths below the folder."""
        folders = "|".join(map(re.escape, IMAGE_FOLDERS))
        return re.sub(rf"(?<![\w./])({folders})\b", rf"{self.root}\1", text)

    def carry_out(self, step: Step) -> None:
        match step.instruction:
            case "ENV":
                for pair in shlex.split(step.arguments):
                    name, value = pair.split("=", 1)
                    self.env[name] = self.here(value).replace("$PATH", self.env["PATH"])
            case "WORKDIR":
                self.workdir = Path(self.here(step.arguments))
                self.workdir.mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(step.arguments)
            case "RUN":
                self._run(step.arguments)

    def _copy(self, arguments: str) -> None:
        target = Path(self.workdir, self.here(arguments.split()[-1]))
        for source in map(ROOT.joinpath, sources(arguments)):
            if source.is_dir():
                shutil.copytree(
                    source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, target)

    def _run(self, command: str) -> None:
        if command.startswith("useradd"):
            return  # The machine's users are left alone.
        subprocess.run(
            ["sh", "-euc", self.here(command)],
            cwd=self.workdir,
            env=self.env,
            check=True,
            timeout=INSTALL_TIMEOUT_S,
        )

    def start(self, entrypoint: str, port: int) -> subprocess.Popen[bytes]:
        program, *arguments = json.loads(entrypoint)
        path = shutil.which(program, path=self.env["PATH"])
        assert path is not None and path.startswith(str(self.root))
        return subprocess.Popen(
            [path, *arguments], cwd=self.workdir, env={**self.env, "VOXLITE_PORT": str(port)}
        )

    def is_healthy(self, healthcheck: str, port: int) -> bool:
        command = json.loads(healthcheck.split("CMD ", 1)[1].replace(PORT, str(port)))
        return subprocess.run(command, env=self.env, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.docker
def test_the_image_installs_serves_is_healthy_and_stops(
    stages: list[Stage], tmp_path: Path
) -> None:
    container = Container(tmp_path)
    for stage in stages:
        for step in stage.steps:
            container.carry_out(step)
    [package] = tmp_path.glob("opt/voxlite/lib/*/site-packages/voxlite/server")
    model = package.parent / "models" / "demo"
    if not (model / "params.json").exists():
        write_checkpoint(model)
    port = free_port()
    server = container.start(stages[-1].only("ENTRYPOINT"), port)
    try:
        healthcheck = stages[-1].only("HEALTHCHECK")
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not container.is_healthy(healthcheck, port):
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline_s, "the server doesn't become healthy"
            time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        # Ended by the signal, after an orderly shutdown.
        assert server.wait(STOP_TIMEOUT_S) in (0, -signal.SIGTERM)
        assert not container.is_healthy(healthcheck, port)
    finally:
        server.kill()
