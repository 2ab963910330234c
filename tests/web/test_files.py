"""The page's files as the server gives them, without a browser."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import LiveServer, serve

FOLDER = Path(__file__).parent.parent.parent / "server" / "web"
SOURCES = sorted(path for path in FOLDER.iterdir())


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serve(api_key=("key",)) as live:
        yield live


def test_the_page_needs_no_key_and_forbids_everything_from_elsewhere(live: LiveServer) -> None:
    with live.http() as client:
        answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_each_file_is_served_as_what_it_is(live: LiveServer, path: Path) -> None:
    media_types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    with live.http() as client:
        answer = client.get(f"/web/{path.name}")
    assert answer.status_code == 200
    assert answer.content == path.read_bytes()
    expected = media_types.get(path.suffix, "text/html")
    assert answer.headers["content-type"].startswith(expected)
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nonesuch.js", "..%2fapp.py", "%2e%2e/app.py"])
def test_nothing_else_is_served(live: LiveServer, name: str) -> None:
    with live.http() as client:
        assert client.get(f"/web/{name}").status_code in (401, 404)


def test_the_page_refers_only_to_its_own_files_and_has_no_inline_script() -> None:
    html = (FOLDER / "index.html").read_text()
    for reference in re.findall(r'(?:src|href)="([^"#][^"]*)"', html):
        assert (FOLDER / reference.removeprefix("web/")).is_file()
        assert reference.startswith("web/")
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_file_names_another_host(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|//[a-z]+\.", text) == []
