"""One server with a fake engine for all tests that change nothing about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import LiveServer, serve


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve(FakeEngine(max_sessions=4)) as live:
        yield live
