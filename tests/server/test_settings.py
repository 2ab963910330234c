"""Settings from flags and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from voxlite.engine.errors import InvalidInput
from voxlite.server.cli import app
from voxlite.server.commands.serve import settings_of
from voxlite.server.settings import BUNDLED_NAME, ServerSettings


def test_defaults_are_safe() -> None:
    settings = ServerSettings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.model_names == (BUNDLED_NAME,)
    assert settings.idle_timeout > 0


def test_the_environment_is_read_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXLITE_PORT", "9000")
    monkeypatch.setenv("VOXLITE_API_KEY", "a, b")
    monkeypatch.setenv("VOXLITE_ALLOWED_ORIGINS", '["https://x.example"]')
    settings = settings_of(port=None, host="0.0.0.0")
    assert (settings.port, settings.host) == (9000, "0.0.0.0")
    assert settings.api_key == ("a", "b")
    assert settings.allowed_origins == ("https://x.example",)
    assert settings_of(port=1).port == 1


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="colour"):
        settings_of(colour="red")
    monkeypatch.setenv("VOXLITE_PROT", "9000")
    with pytest.raises(InvalidInput, match="VOXLITE_PROT"):
        settings_of()


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 70_000), ("max_num_seqs", 0), ("idle_timeout", -1), ("dtype", "int3"),
     ("kv_cache_gib", 0), ("ssl_keyfile", "key.pem")],
)  # fmt: skip
def test_impossible_values_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name.replace("_", "-")):
        settings_of(**{name: value})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 70_000}, "--port 70000: at most 65535"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0: at least 1"),
        ({"dtype": "int3"}, "--dtype \"int3\": one of 'auto', 'bfloat16', 'float32' or 'float16'"),
        ({"idle_timeout": float("inf")}, "--idle-timeout Infinity: a finite number"),
        ({"colour": "red"}, '--colour "red": no such setting'),
        ({"default_delay_ms": 9}, "--default-delay-ms: 9 ms: 80 to 1200 in steps of 80, or 2400"),
        ({"max_send_wait": "x"}, 'VOXLITE_MAX_SEND_WAIT "x": a number'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_our_own_words(flags: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        settings_of(**flags)
    assert str(refused.value) == message


def test_the_engine_gets_its_part(tmp_path: Path) -> None:
    config = settings_of(model=str(tmp_path), max_num_seqs=3, default_delay_ms=960).engine_config()
    assert (config.model, config.max_num_seqs, config.default_delay_ms) == (str(tmp_path), 3, 960)


def test_the_command_knows_vllms_flags() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for flag in (
        "--host --port --api-key --served-model-name --dtype --device --max-num-seqs "
        "--ssl-keyfile --ssl-certfile --allowed-origins --uvicorn-log-level --default-delay-ms "
        "--idle-timeout --max-session-seconds --max-buffered-seconds --kv-cache-gib"
    ).split():
        assert flag in result.output


def test_an_empty_key_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="--api-key: .*it is empty"):
        settings_of(api_key=[""])
    monkeypatch.setenv("VOXLITE_API_KEY", "")
    with pytest.raises(InvalidInput, match="it is empty"):
        settings_of()


def test_a_key_with_a_comma_is_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(api_key=["a,b", " [c "]).api_key == ("a,b", "[c")
    monkeypatch.setenv("VOXLITE_API_KEY", '["a,b", "c"]')
    assert settings_of().api_key == ("a,b", "c")
    with pytest.raises(InvalidInput, match="it is empty"):
        settings_of(api_key=[" "])


def test_a_file_that_is_no_certificate_is_named_before_the_server_starts(tmp_path: Path) -> None:
    path = tmp_path / "notes.pem"
    path.write_text("no certificate")
    with pytest.raises(InvalidInput, match=rf"--ssl-certfile {path} .*: not a certificate and its"):
        settings_of(ssl_keyfile=str(path), ssl_certfile=str(path))


def test_a_certificate_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(InvalidInput, match=rf"{missing}: no such file"):
        settings_of(ssl_keyfile=missing, ssl_certfile=missing)
