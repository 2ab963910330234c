"""Text on its way to one client: a bounded queue, emptied as fast as the client reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

# What may wait for a client that doesn't read: hours of speech.
MAX_QUEUED_CHARACTERS: Final = 4 * 2**20


class ClientDoesNotRead(Exception):
    """Report a client that leaves too much text unread, or leaves it too long."""


class Outbox:
    """The messages that a client hasn't been sent yet."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._num_characters = 0
        self._has_texts = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def put(self, text: str) -> None:
        """Queue a message.

        Raises:
            ClientDoesNotRead: too much is waiting.
        """
        self._texts.append(text)
        self._num_characters += len(text)
        self._is_empty.clear()
        self._has_texts.set()
        if self._num_characters > MAX_QUEUED_CHARACTERS:
            raise ClientDoesNotRead(f"{self._num_characters} characters unread")

    async def wait_until_empty(self) -> None:
        """Wait until everything has been sent."""
        await self._is_empty.wait()

    async def send_all(self, send: Callable[[str], Awaitable[None]], max_wait_s: float) -> None:
        """Send what is queued and what will be, until cancelled.

        Raises:
            ClientDoesNotRead: a message wasn't taken for `max_wait_s`.
        """
        while True:
            await self._has_texts.wait()
            while self._texts:
                text = self._texts.popleft()
                self._num_characters -= len(text)
                try:
                    async with asyncio.timeout(max_wait_s):
                        await send(text)
                except TimeoutError as err:
                    raise ClientDoesNotRead(f"nothing read for {max_wait_s:g} s") from err
            self._has_texts.clear()
            self._is_empty.set()
