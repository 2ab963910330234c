"""Finding a checkpoint: a folder, or a hub id out of the hub's cache or from the hub.

The hub's settings are read from the environment when its client is first imported, so those cases
run in a process of their own, one for each environment. The hub is an HTTP server on loopback.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from voxlite.engine.checkpoint import find_checkpoint
from voxlite.engine.errors import CheckpointError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TIMEOUT_S = 120

MISTRAL_FILES = {"params.json", "consolidated.safetensors", "tekken.json"}
HUGGING_FACE_FILES = {
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "tekken.json",
}
REPOSITORIES = {
    "acme/both": MISTRAL_FILES | HUGGING_FACE_FILES | {"README.md", "training.bin"},
    "acme/mistral": MISTRAL_FILES | {"README.md"},
    "acme/transformers": HUGGING_FACE_FILES | {"generation_config.json"},
}

# Prints what is found for each id, as JSON lines: a folder's files, or the error.
FINDER = """
import json, sys
from voxlite.engine.checkpoint import find_checkpoint
from voxlite.engine.errors import CheckpointError
for model in sys.argv[1:]:
    try:
        folder = find_checkpoint(model)
    except CheckpointError as err:
        print(json.dumps({"error": str(err)}))
    else:
        print(json.dumps({"folder": str(folder), "files": [p.name for p in folder.iterdir()]}))
"""


class Hub(NamedTuple):
    url: str
    downloads: list[str]  # "repository/file", in the order asked for


class HubHandler(BaseHTTPRequestHandler):
    """As much of the hub as a download needs. A file's contents are its own name."""

    downloads: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = self.path.split("?")[0].removeprefix("/api/models").strip("/").split("/")
        repository = "/".join(parts[:2])
        if repository == "acme/gated":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif repository == "acme/hung-up":
            self.close_connection = True
        elif repository not in REPOSITORIES:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif parts[2] == "resolve":
            self._send_file(repository, parts[-1])
        elif parts[2] == "tree":
            files = [
                {"type": "file", "path": name, "size": len(name), "oid": name}
                for name in sorted(REPOSITORIES[repository])
            ]
            self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
        else:
            siblings = [{"rfilename": name} for name in sorted(REPOSITORIES[repository])]
            info = {"id": repository, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repository: str, name: str) -> None:
        if name not in REPOSITORIES[repository]:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        if self.command == "GET":
            self.downloads.append(f"{repository}/{name}")
        self._send(200, name.encode(), {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    downloads: list[str] = []
    handler = type("Handler", (HubHandler,), {"downloads": downloads})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Hub(f"http://127.0.0.1:{server.server_port}", downloads)
        server.shutdown()
        thread.join()


class Found(NamedTuple):
    folder: Path | None
    files: set[str]
    error: str


def find_in_process(models: list[str], **environment: str) -> dict[str, Found]:
    """Look for models under other hub settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    result = subprocess.run(
        [sys.executable, "-c", FINDER, *models],
        env=inherited | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    return {
        model: Found(
            Path(answer["folder"]) if "folder" in answer else None,
            set(answer.get("files", [])),
            answer.get("error", ""),
        )
        for model, answer in zip(models, answers, strict=True)
    }


@pytest.fixture(scope="module")
def online(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return find_in_process(
        [*REPOSITORIES, "acme/missing", "acme/gated", "acme/hung-up"],
        HF_HOME=str(tmp_path_factory.mktemp("online")),
        HF_ENDPOINT=hub.url,
    )


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    home = tmp_path_factory.mktemp("offline")
    for repository in ("acme/mistral", "acme/transformers"):
        cache = home / "hub" / ("models--" + repository.replace("/", "--"))
        snapshot = cache / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for name in REPOSITORIES[repository]:
            (snapshot / name).write_text(name)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(COMMIT)
    return find_in_process(
        ["acme/mistral", "acme/transformers", "acme/missing"],
        HF_HOME=str(home),
        HF_HUB_OFFLINE="1",
    )


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("acme/both", MISTRAL_FILES),
        ("acme/mistral", MISTRAL_FILES),
        ("acme/transformers", HUGGING_FACE_FILES),
    ],
)
def test_one_format_is_fetched_and_nothing_else(
    model: str, files: set[str], online: dict[str, Found], hub: Hub
) -> None:
    assert online[model].files == files
    fetched = [file for file in hub.downloads if file.startswith(model + "/")]
    assert sorted(fetched) == sorted(f"{model}/{name}" for name in files)


@pytest.mark.parametrize("model", ["acme/missing", "acme/gated", "acme/hung-up"])
def test_a_repository_that_the_hub_does_not_give_is_named(
    model: str, online: dict[str, Found]
) -> None:
    assert online[model].error.startswith(f"{model}: no such folder here, and from the hub: ")


@pytest.mark.parametrize("model", ["acme/mistral", "acme/transformers"])
def test_offline_a_fetched_model_is_found_in_the_cache(
    model: str, offline: dict[str, Found]
) -> None:
    assert offline[model].files >= REPOSITORIES[model]


def test_offline_a_model_that_was_never_fetched_is_named(offline: dict[str, Found]) -> None:
    assert "acme/missing: no such folder here, and from the hub: " in offline["acme/missing"].error


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_a_folder_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find_checkpoint("~/model") == tmp_path / "model"


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "consolidated.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        find_checkpoint(str(path))


@pytest.mark.parametrize(
    "model", ["model", "./no/such", "/no/such", "~/no-such", "../no-such", "a/b/c", "no/such/"]
)
def test_what_is_neither_folder_nor_hub_id_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder") as refusal:
        find_checkpoint(model)
    assert model in str(refusal.value)


@pytest.mark.parametrize("model", ["a b/c", "acme/..", "acme/" + "x" * 200, "acme/-x"])
def test_an_impossible_hub_id_is_named(model: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        find_checkpoint(model)
    assert model in str(refusal.value)
