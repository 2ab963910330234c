import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.client.stub_server import KEY, StubServer
from tests.server.fake_engine import pcm16, tone
from tests.server.harness import serve
from voxlite.client.audio_sources import unpaced
from voxlite.client.realtime_client import Delta, Done, RealtimeClient, RealtimeError, Usage


async def transcribe(client: RealtimeClient, *chunks: bytes) -> list[Delta | Done]:
    return [event async for event in client.transcribe(unpaced(chunks))]


def test_deltas_and_usage_arrive() -> None:
    async def session() -> None:
        async with StubServer().running() as server, RealtimeClient(server.url, "m") as client:
            assert client.session_id == "sess-1"
            events = await transcribe(client, b"ab", b"cd")
        assert events == [Delta(" 1"), Delta(" 2"), Done(" 1 2", Usage(39, 2, 41))]
        assert server.types == ["session.update", "commit", "append", "append", "commit"]
        assert server.messages[0] == {"type": "session.update", "model": "m"}
        assert [m["final"] for m in server.messages if m.get("final")] == [True]
        assert server.audio == b"abcd"

    asyncio.run(session())


def test_a_second_utterance_follows_on_the_same_connection() -> None:
    async def session() -> None:
        async with StubServer().running() as server, RealtimeClient(server.url) as client:
            first = await transcribe(client, b"ab")
            second = await transcribe(client, b"ab", b"cd")
        assert [first[-1], second[-1]] == [
            Done(" 1", Usage(39, 1, 40)),
            Done(" 1 2", Usage(39, 2, 41)),
        ]

    asyncio.run(session())


def test_text_arrives_while_audio_is_still_being_sent() -> None:
    async def session() -> None:
        heard = asyncio.Event()

        async def chunks() -> AsyncIterator[bytes]:
            yield b"ab"
            await heard.wait()
            yield b"cd"

        async with StubServer().running() as server, RealtimeClient(server.url) as client:
            events = []
            async for event in client.transcribe(chunks()):
                events.append(event)
                heard.set()
        assert events[-1] == Done(" 1 2", Usage(39, 2, 41))

    asyncio.run(session())


def test_the_delay_is_asked_for_only_where_one_is_given() -> None:
    async def update_of(delay_ms: int | None) -> dict[str, object]:
        async with StubServer().running() as server:
            async with RealtimeClient(server.url, delay_ms=delay_ms) as client:
                await transcribe(client, b"ab")
        return server.messages[0]

    assert "transcription_delay_ms" not in asyncio.run(update_of(None))
    assert asyncio.run(update_of(960))["transcription_delay_ms"] == 960


def test_an_error_of_the_server_ends_the_transcription() -> None:
    async def session() -> None:
        server = StubServer(error_at="input_audio_buffer.append")
        async with server.running(), RealtimeClient(server.url) as client:
            await transcribe(client, *[b"ab"] * 1000)

    with pytest.raises(RealtimeError, match="refused") as caught:
        asyncio.run(session())
    assert caught.value.code == "processing_error"


def test_an_error_of_the_source_ends_the_transcription() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"ab"
        raise OSError("unplugged")

    async def session() -> None:
        async with StubServer().running() as server, RealtimeClient(server.url) as client:
            async for _ in client.transcribe(chunks()):
                pass

    with pytest.raises(OSError, match="unplugged"):
        asyncio.run(session())


def test_a_key_is_sent_and_a_wrong_one_refused() -> None:
    async def session(key: str) -> str:
        async with StubServer(needs_key=True).running() as server:
            async with RealtimeClient(server.url, api_key=key) as client:
                return client.session_id

    assert asyncio.run(session(KEY)) == "sess-1"
    with pytest.raises(RealtimeError, match="HTTP 401"):
        asyncio.run(session("wrong"))


def test_no_server_is_a_sentence() -> None:
    async def session() -> None:
        async with RealtimeClient("ws://127.0.0.1:9/v1/realtime"):
            pass

    with pytest.raises(RealtimeError, match="127.0.0.1:9") as caught:
        asyncio.run(session())
    assert caught.value.code == "connection_failed"


def test_the_application_transcribes_two_utterances() -> None:
    audio = pcm16(tone(1, 2, 3, num_tokens=2))

    async def session(url: str) -> list[Delta | Done]:
        async with RealtimeClient(url, "voxtral", "key", delay_ms=960) as client:
            await transcribe(client, audio)
            return await transcribe(client, audio)

    with serve(api_key=("key",)) as live:
        events = asyncio.run(session(live.url.replace("http", "ws") + "/v1/realtime"))
    *deltas, done = events
    assert isinstance(done, Done)
    assert done.text == " w1 w2 w3" == "".join(delta.text for delta in deltas)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


@pytest.mark.parametrize(
    ("model", "key", "code"),
    [("nonesuch", "key", "model_not_found"), ("", "wrong", "invalid_api_key")],
)
def test_the_application_says_why_it_refuses(model: str, key: str, code: str) -> None:
    async def session(url: str) -> None:
        async with RealtimeClient(url, model, key) as client:
            await transcribe(client, pcm16(tone(1)))

    with serve(api_key=("key",)) as live, pytest.raises(RealtimeError) as caught:
        asyncio.run(session(live.url.replace("http", "ws") + "/v1/realtime"))
    assert caught.value.code == code
