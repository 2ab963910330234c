"""Transcribe one file on a session of its own.

In: an open file and options. Out: the engine's events, as they come. Audio is read no faster than
it is transcribed, and transcribed no faster than the events are taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO

from voxlite.engine.audio.audio_file import read_audio
from voxlite.engine.config import SessionOptions
from voxlite.engine.errors import EngineFailure, VoxliteError
from voxlite.engine.events import Event, SessionEnded, TextDelta, UtteranceDone
from voxlite.server.async_engine import AsyncEngine
from voxlite.server.session.engine_feed import EngineFeed


class FileTranscription:
    """One file on its way through the engine. It holds a seat until `close`."""

    def __init__(self, engine: AsyncEngine, options: SessionOptions) -> None:
        """Take a seat.

        Raises:
            InvalidInput, Overloaded, EngineFailure: as `AsyncEngine.open`.
        """
        self._events: asyncio.Queue[Event | VoxliteError] = asyncio.Queue()
        self._session = engine.open(options, self._events.put_nowait)
        self._feed = EngineFeed(self._session)
        self._reader: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Give the seat back. What was still to come is dropped."""
        if self._reader is not None:
            self._reader.cancel()
        self._session.close()

    async def run(self, file: BinaryIO) -> AsyncIterator[TextDelta | UtteranceDone]:
        """Yield the file's events, the last of them an `UtteranceDone`.

        Raises:
            InvalidInput: the file isn't audio or is damaged.
            EngineFailure: the session has failed.
        """
        self._reader = asyncio.create_task(self._read(file))
        while True:
            event = await self._events.get()
            self._feed.note_progress()
            match event:
                case TextDelta():
                    yield event
                case UtteranceDone():
                    yield event
                    return
                case SessionEnded(error=error):
                    raise error or EngineFailure("the engine has ended the session")
                case VoxliteError():
                    raise event

    async def _read(self, file: BinaryIO) -> None:
        try:
            pieces = await asyncio.to_thread(read_audio, file)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await self._feed.append(piece, deadline_s=None)
            self._session.commit()
        except VoxliteError as err:
            self._events.put_nowait(err)
        except Exception as err:
            self._events.put_nowait(EngineFailure(f"the file can't be read: {err!r}"))
