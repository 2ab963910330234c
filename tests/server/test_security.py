"""Keys, client secrets and origins, at every route and at the sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from tests.server.fake_engine import FakeEngine, pcm16, tone
from tests.server.harness import LiveServer, serve
from tests.server.realtime.test_socket_openai import COMPLETED, INTENT, text_of
from voxlite.server.access import PUBLIC_PATHS, PUBLIC_PREFIX
from voxlite.server.auth import ClientSecrets, KeyRing, OriginPolicy

KEYS = ("first-key", "second-key")
SOCKETS = ("/v1/realtime", "/v1/audio/transcriptions/realtime")


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with serve(FakeEngine(), api_key=KEYS, allowed_origins=("https://ok.example",)) as live:
        yield live


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes(live: LiveServer) -> set[tuple[str, str]]:
    return {
        (method, route.path.replace("{name:path}", "voxtral"))
        for route in all_routes(live.app.routes)
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD"
    }


def all_routes(routes_: Any) -> Iterator[Any]:
    for route in routes_:
        nested = getattr(route, "original_router", None)
        if nested is not None:
            yield from all_routes(nested.routes)
        elif hasattr(route, "path"):
            yield route


def test_every_route_but_health_refuses_without_a_key(locked: LiveServer) -> None:
    found = routes(locked)
    assert ("POST", "/v1/audio/transcriptions") in found and ("GET", "/metrics") in found
    with locked.http() as http:
        for method, path in found | {("GET", "/nowhere"), ("GET", "/v1")}:
            for headers in (
                {},
                bearer("wrong"),
                {"Authorization": "Basic eDp5"},
                {"Authorization": "Bearer"},
            ):
                response = http.request(method, path, headers=headers)
                if path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX):
                    assert response.status_code != 401
                else:
                    assert response.status_code == 401, (method, path)
                    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(locked: LiveServer, key: str) -> None:
    with locked.http(headers=bearer(key)) as http:
        assert http.get("/v1/models").status_code == 200
    with locked.socket(INTENT, additional_headers=bearer(key)) as client:
        assert client.receive()["type"] == "session.created"


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer("first-key\udcff")])
def test_a_socket_without_a_key_gets_401_with_a_body(
    locked: LiveServer, path: str, headers: dict[str, str]
) -> None:
    headers = {name: value.encode("utf-8", "replace").decode() for name, value in headers.items()}
    with (
        pytest.raises(InvalidStatus) as refused,
        locked.socket(path, additional_headers=headers),
    ):
        pass
    response = refused.value.response
    assert response.status_code == 401
    assert b"invalid_api_key" in (response.body or b"")


def test_a_browsers_subprotocol_carries_the_key_and_is_never_echoed(locked: LiveServer) -> None:
    subprotocols = ["realtime", "openai-insecure-api-key.first-key"]
    with locked.socket(INTENT, subprotocols=subprotocols) as client:
        assert client.websocket.subprotocol == "realtime"
        assert client.receive()["type"] == "session.created"
    with pytest.raises(InvalidStatus), locked.socket(INTENT, subprotocols=subprotocols[:1]):
        pass


def test_a_client_secret_opens_sockets_with_its_session_and_nothing_else(
    locked: LiveServer,
) -> None:
    session = {
        "type": "transcription",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": 16000},
                "turn_detection": {"type": "server_vad"},
            }
        },
    }
    with locked.http() as http:
        body = {"expires_after": {"anchor": "created_at", "seconds": 60}, "session": session}
        response = http.post("/v1/realtime/client_secrets", json=body, headers=bearer(KEYS[0]))
        secret = response.json()
        assert response.status_code == 200 and secret["value"].startswith("ek_")
        assert secret["session"]["audio"]["input"]["format"]["rate"] == 16000
        ek = bearer(secret["value"])
        assert http.get("/v1/models", headers=ek).status_code == 401
        assert http.post("/v1/realtime/client_secrets", headers=ek).status_code == 401
    subprotocols = ["realtime", f"openai-insecure-api-key.{secret['value']}"]
    with locked.socket("/v1/realtime", subprotocols=subprotocols) as client:
        created = client.receive()
        assert created["session"]["audio"]["input"]["format"]["rate"] == 16000
        client.append(pcm16(tone(1, 2, 0, 0, 0, 0, 0, 0, 0, 0)))
        assert text_of(client.until(COMPLETED)) == "w1 w2"  # its turn detection is on


def test_bad_requests_for_a_secret_are_refused_in_words(locked: LiveServer) -> None:
    with locked.http(headers=bearer(KEYS[0])) as http:
        for body, status in (
            ({"expires_after": {"seconds": 5}}, 400),
            ({"session": {"type": "realtime"}}, 400),
            ({"session": {"audio": {"input": {"transcription": {"model": "x"}}}}}, 404),
            ({"session": {"x": "y" * 70_000}}, 413),
        ):
            response = http.post("/v1/realtime/client_secrets", json=body)
            assert response.status_code == status
            assert response.json()["error"]["message"]
        assert http.post("/v1/realtime/client_secrets").status_code == 200


def test_a_secret_expires() -> None:
    now_s = [1000.0]
    issued = ClientSecrets(lambda: now_s[0])
    ring = KeyRing(("key",), issued)
    secret = issued.issue(10, None)
    assert ring.admits(secret.value, accepts_secrets=True)
    assert not ring.admits(secret.value, accepts_secrets=False)
    now_s[0] += 10
    assert not ring.admits(secret.value, accepts_secrets=True)


@pytest.mark.parametrize(
    ("origin", "is_admitted"),
    [
        ("https://ok.example", True),
        ("https://evil.example", False),
        ("null", False),
        ("file://", False),
        ("http://[", False),
    ],
)
def test_pages_of_other_origins_cannot_open_a_socket(
    locked: LiveServer, origin: str, is_admitted: bool
) -> None:
    subprotocols = ["realtime", "openai-insecure-api-key.first-key"]
    kwargs = {"additional_headers": {"Origin": origin}, "subprotocols": subprotocols}
    if is_admitted:
        with locked.socket(INTENT, **kwargs) as client:
            assert client.receive()["type"] == "session.created"
        return
    with pytest.raises(InvalidStatus) as refused, locked.socket(INTENT, **kwargs):
        pass
    assert refused.value.response.status_code == 403
    assert b"origin_not_allowed" in (refused.value.response.body or b"")


def test_the_servers_own_page_may_open_a_socket(server: LiveServer) -> None:
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    with server.socket(INTENT, additional_headers=own) as client:
        assert client.receive()["type"] == "session.created"
    with server.http() as http:
        response = http.post("/v1/audio/transcriptions", headers={"Origin": "http://evil.example"})
        assert response.status_code == 403


@pytest.mark.parametrize(
    ("origin", "host", "is_loopback", "is_admitted"),
    [
        (None, "127.0.0.1:8000", True, True),
        ("http://localhost:8000", "localhost:8000", True, True),
        ("http://[::1]:8000", "[::1]:8000", True, True),
        ("http://localhost:9000", "localhost:8000", True, False),
        ("http://rebound.example:8000", "rebound.example:8000", True, False),
        ("https://voice.example", "voice.example", False, True),
        ("https://evil.example", "voice.example", False, False),
    ],
)
def test_what_an_own_page_is(
    origin: str | None, host: str, is_loopback: bool, is_admitted: bool
) -> None:
    policy = OriginPolicy(allowed_origins=(), is_loopback=is_loopback)
    assert policy.admits(origin, host) is is_admitted


def test_a_page_that_is_allowed_can_read_answers(locked: LiveServer) -> None:
    headers = {**bearer(KEYS[0]), "Origin": "https://ok.example"}
    with locked.http() as http:
        response = http.get("/v1/models", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://ok.example"
        preflight = {"Access-Control-Request-Method": "POST", "Origin": "https://ok.example"}
        assert http.options("/v1/audio/transcriptions", headers=preflight).status_code == 200


def test_logs_hold_no_keys_and_no_text(
    locked: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    subprotocols = ["realtime", "openai-insecure-api-key.first-key"]
    with locked.socket(INTENT, subprotocols=subprotocols) as client:
        client.append(pcm16(tone(17, num_tokens=30)))
        client.send("input_audio_buffer.commit")
        client.next(COMPLETED)
    server_lines = [r.getMessage() for r in caplog.records if not r.name.startswith("websockets")]
    assert server_lines
    assert not any("first-key" in line or "w17" in line for line in server_lines)


def test_a_socket_at_an_unknown_path_is_not_found_but_only_for_those_who_may_come_in() -> None:
    with serve(api_key=("secret",)) as live:
        for key, status, code in (("secret", 404, "not_found"), ("wrong", 401, "invalid_api_key")):
            headers = {"Authorization": f"Bearer {key}"}
            with pytest.raises(InvalidStatus) as refused:
                with live.socket("/v1/nowhere", additional_headers=headers):
                    pass
            response = refused.value.response
            assert response.status_code == status
            assert json.loads(response.body)["error"]["code"] == code
