"""What an operator chooses: from flags, or from the environment as VOXLITE_<NAME>.

In: strings. Out: one frozen object, checked once. Flags win over the environment.
"""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from voxlite.engine.config import LEGAL_DELAYS_MS, EngineConfig
from voxlite.server.bundled import bundled_model

_PREFIX: Final = "VOXLITE_"
BUNDLED_NAME: Final = "voxlite-demo"

# Written as a JSON list, or with commas in between, or (for flags) one after the other.
_Names = Annotated[tuple[str, ...], NoDecode]
_WITHOUT_FLAG: Final = ("max_append_wait", "max_send_wait")
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ServerSettings(BaseSettings):
    """Settings of `voxlite serve`. Durations of 0 mean: no limit."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    model: str | None = None
    served_model_name: _Names = ()
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    max_num_seqs: Annotated[int, Field(ge=1)] = 8
    kv_cache_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    default_delay_ms: int | None = None

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"

    api_key: _Names = ()
    allowed_origins: _Names = ()

    idle_timeout: _Seconds = 120.0
    max_session_seconds: _Seconds = 0.0
    # Files are often sent at once: what fits is taken at once, 19 MB per session.
    max_buffered_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 300.0
    max_upload_mib: Annotated[int, Field(ge=1)] = 1024
    # How long an append waits for room, before it is refused.
    max_append_wait: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 15.0
    # How long a message may take to be sent to a client that doesn't read.
    max_send_wait: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0

    @field_validator("served_model_name", "api_key", "allowed_origins", mode="before")
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        names: tuple[str, ...]
        if isinstance(value, str):
            names = tuple(_names_in(value))
        elif not isinstance(value, list | tuple):
            return value
        elif info.field_name == "api_key":
            # A key given as a flag is taken as it is: it may have commas.
            names = tuple(filter(None, map(str.strip, value)))
        else:
            names = tuple(name for text in value for name in _names_in(text))
        if not names and value not in ([], ()):
            # An empty key would open the server to everybody, most often by a variable not set.
            raise ValueError("it is empty; leave it out, or say what it should be")
        return names

    @field_validator("default_delay_ms")
    @classmethod
    def _check_delay(cls, delay_ms: int | None) -> int | None:
        if delay_ms is not None and delay_ms not in LEGAL_DELAYS_MS:
            raise ValueError(f"{delay_ms} ms: 80 to 1200 in steps of 80, or 2400")
        return delay_ms

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_variables(cls, values: Any) -> Any:
        known = {_PREFIX + name.upper() for name in cls.model_fields}
        unknown = sorted(
            name for name in os.environ if name.upper().startswith(_PREFIX) and name not in known
        )
        if unknown:
            there_are = ", ".join(sorted(known))
            raise ValueError(f"{', '.join(unknown)}: not a setting; there are {there_are}")
        return values

    @model_validator(mode="after")
    def _check_ssl(self) -> ServerSettings:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile belong together")
        for path in (self.ssl_keyfile, self.ssl_certfile):
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{path}: no such file")
        if self.ssl_certfile is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                # An empty password: without one, OpenSSL would ask for it on the terminal.
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: b"")
            except OSError as err:
                raise ValueError(
                    f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile}: not "
                    f"a certificate and its key, in PEM and without a password ({err})"
                ) from err
        return self

    @classmethod
    def public_name(cls, field: str) -> str:
        """Return how a user gives a setting: as a flag, or, where there is none, a variable."""
        if field in _WITHOUT_FLAG:
            return _PREFIX + field.upper()
        return "--" + field.replace("_", "-")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients may use for the model."""
        return self.served_model_name or (self.model or BUNDLED_NAME,)

    @property
    def max_upload_bytes(self) -> int:
        return self.max_upload_mib * 2**20

    def engine_config(self) -> EngineConfig:
        """Return the engine's part.

        Raises:
            InvalidInput: a value is impossible.
            CheckpointError: no model was named and none is bundled.
        """
        return EngineConfig(
            model=self.model or str(bundled_model()),
            dtype=self.dtype,
            device=self.device,
            quantization=self.quantization,
            max_num_seqs=self.max_num_seqs,
            kv_cache_gib=self.kv_cache_gib,
            default_delay_ms=self.default_delay_ms,
            max_buffered_seconds=self.max_buffered_seconds,
        )


def _names_in(text: str) -> list[str]:
    if text.lstrip().startswith("["):
        names = json.loads(text)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{text}: a list of strings is needed")
        return names
    return [name.strip() for name in text.split(",") if name.strip()]
