"""Who may use the server: API keys, short-lived client secrets, and which web pages.

In: the headers of a request or handshake. Out: whether it may go on. No I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from voxlite.engine.errors import Overloaded

KEY_SUBPROTOCOL: Final = "openai-insecure-api-key."
SUBPROTOCOL: Final = "realtime"
_MAX_SECRETS: Final = 10_000
_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """A key for a browser, good until `expires_at_s` (Unix time), with a session's settings."""

    value: str
    expires_at_s: int
    update: Mapping[str, object] | None


class ClientSecrets:
    """The short-lived secrets that are out, found by their digests."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._secrets: dict[bytes, ClientSecret] = {}

    def issue(self, lifetime_s: int, update: Mapping[str, object] | None) -> ClientSecret:
        """Make a secret.

        Args:
            update: the `session` that a connection with this secret begins with.

        Raises:
            Overloaded: too many are out.
        """
        now_s = self._now_s()
        self._secrets = {k: s for k, s in self._secrets.items() if s.expires_at_s > now_s}
        if len(self._secrets) >= _MAX_SECRETS:
            raise Overloaded(f"{_MAX_SECRETS} client secrets are out; wait until some expire")
        value = f"ek_{secrets.token_urlsafe(32)}"
        secret = ClientSecret(value, int(now_s) + lifetime_s, update)
        self._secrets[_digest(value)] = secret
        return secret

    def find(self, value: str) -> ClientSecret | None:
        """Return the secret with this value, None if there is none or it has expired."""
        secret = self._secrets.get(_digest(value))
        return secret if secret is not None and secret.expires_at_s > self._now_s() else None


class KeyRing:
    """The API keys. Without any, everybody may come in."""

    def __init__(self, keys: Collection[str], client_secrets: ClientSecrets) -> None:
        self._digests = [_digest(key) for key in keys]
        self._client_secrets = client_secrets

    def admits(self, key: str | None, *, accepts_secrets: bool) -> bool:
        """Tell whether a key opens the server, in time that doesn't depend on the key.

        Args:
            accepts_secrets: whether a client secret will do.
        """
        if not self._digests:
            return True
        if key is None:
            return False
        digest = _digest(key)
        # A list: every key is compared, whichever fits.
        if any([hmac.compare_digest(digest, each) for each in self._digests]):
            return True
        return accepts_secrets and self._client_secrets.find(key) is not None


def key_in(headers: Mapping[str, str], subprotocols: Collection[str] = ()) -> str | None:
    """Return the key of a request: `Authorization: Bearer`, or a browser's subprotocol."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for subprotocol in subprotocols:
        if subprotocol.startswith(KEY_SUBPROTOCOL):
            return subprotocol.removeprefix(KEY_SUBPROTOCOL)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginPolicy:
    """Which web pages may use the server: its own, and those that the operator allows.

    A server on the loopback interface is its own origin only under a loopback name; otherwise a
    page could make its own host name resolve to 127.0.0.1 and pass for the server's.
    """

    allowed_origins: tuple[str, ...]
    is_loopback: bool

    def admits(self, origin: str | None, host: str | None) -> bool:
        """Tell whether a request may come from a page of this origin (None: not from a page)."""
        if origin is None or "*" in self.allowed_origins or origin in self.allowed_origins:
            return True
        try:
            parts = urlsplit(origin)
            name = parts.hostname
        except ValueError:
            return False
        is_same = bool(parts.netloc) and parts.netloc.lower() == (host or "").lower()
        return is_same and (not self.is_loopback or name in _LOOPBACK_NAMES)


def is_loopback(host: str) -> bool:
    """Tell whether a server bound to `host` is reached from this machine only."""
    return host in _LOOPBACK_NAMES
