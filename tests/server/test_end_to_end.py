"""The server on the real engine, with a tiny random checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from websockets.exceptions import ConnectionClosed

from tests.checkpoints import write_checkpoint
from tests.engine.test_detokenizer import END_ID, TEXTS, ids_of
from tests.server.fake_engine import pcm16
from tests.server.harness import LiveServer, serve
from tests.server.http.test_http import post, wav
from tests.server.realtime.test_robustness import reset
from tests.server.realtime.test_socket_openai import COMPLETED, DELTA, INTENT, PCM_16, update
from tests.server.realtime.test_socket_openai import text_of as openai_text_of
from tests.server.realtime.test_socket_vllm import DONE, configured, text_of
from voxlite.engine import Engine, EngineConfig
from voxlite.engine.config import STREAMING_PAD_ID
from voxlite.server.session.voice_activity import SileroModel


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=3)
    engine = Engine(config)
    with serve(engine, voice_model=SileroModel()) as server:
        yield server


def noise(duration_s: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(int(duration_s * 16_000))
    return (0.1 * samples).astype(np.float32)


def vllm_text(live: LiveServer, clip: bytes, chunk_bytes: int) -> tuple[str, dict]:
    with live.socket() as client:
        configured(client)
        client.send("input_audio_buffer.commit")
        for start in range(0, len(clip), chunk_bytes):
            client.append(clip[start : start + chunk_bytes])
        client.send("input_audio_buffer.commit", final=True)
        events = client.until(DONE)
    return text_of(events), events[-1]["usage"]


def test_sixteen_seconds_in_125_appends_are_counted_as_vllm_counts(live: LiveServer) -> None:
    clip = pcm16(noise(16.0))
    text, usage = vllm_text(live, clip, 4096)
    assert len(clip) / 4096 == 125
    assert text
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        39,
        210,
        249,
    )


def test_every_way_of_sending_gives_the_same_text(live: LiveServer) -> None:
    samples = noise(3.0, seed=1)
    clip = pcm16(samples)
    expected, _ = vllm_text(live, clip, len(clip))
    assert vllm_text(live, clip, 1281)[0] == expected
    with live.socket(INTENT) as client:
        update(client, format=PCM_16)
        for start in range(0, len(clip), 3333):
            client.websocket.send(clip[start : start + 3333])
        client.send("input_audio_buffer.commit")
        assert openai_text_of(client.until(COMPLETED)) == expected.lstrip()
    assert post(live, wav(samples)).json()["text"] == expected.lstrip()


def test_an_utterance_after_another_is_what_it_is_alone(live: LiveServer) -> None:
    first, second = pcm16(noise(2.0, seed=2)), pcm16(noise(1.5, seed=3))
    alone, _ = vllm_text(live, second, 4096)
    with live.socket() as client:
        configured(client, include=["item.input_audio_transcription.logprobs"])
        client.append(first)
        client.send("input_audio_buffer.commit", final=True)
        client.append(second)
        client.send("input_audio_buffer.commit", final=True)
        client.until(DONE)
        events = client.until(DONE)
    assert text_of(events) == alone
    assert any(e["logprobs"] for e in events[:-1])
    assert all(t["logprob"] <= 0 and t["bytes"] for e in events[:-1] for t in e["logprobs"])


def test_word_times_are_monotone_over_turns(live: LiveServer) -> None:
    with live.socket() as client:
        configured(client, timestamp_granularities=["word"])
        ends = []
        for seed in (4, 5, 6):
            client.append(pcm16(noise(2.0, seed=seed)))
            client.send("input_audio_buffer.commit", final=True)
            words = client.next(DONE)["words"]
            ends.append([(word["start"], word["end"]) for word in words])
    times = [time for turn in ends for word in turn for time in word]
    assert times == sorted(times)
    assert times[-1] <= 6.0


def test_the_seats_are_the_engines(live: LiveServer) -> None:
    with live.socket(INTENT) as a, live.socket(INTENT) as b, live.socket(INTENT) as c:
        for client in (a, b, c):
            assert client.receive()["type"] == "session.created"
        with live.socket(INTENT) as d:
            assert d.receive()["error"]["code"] == "overloaded"
    live.wait_until(lambda: live.engine.stats().num_sessions == 0)
    with live.http() as http:
        metrics = http.get("/metrics").text
    assert "voxlite_sessions 0.0" in metrics


class Script:
    """A `Pick` that makes every utterance consist of the same ids, and pads after them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.first_position = 0

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        picked = [self._id(position - self.first_position) for position in positions]
        return torch.tensor(picked, device=logits.device)

    def _id(self, index: int) -> int:
        return self.ids[index] if 0 <= index < len(self.ids) else STREAMING_PAD_ID


@pytest.fixture(scope="module")
def scripted(tiny_checkpoint: Path) -> Iterator[tuple[LiveServer, Script]]:
    script = Script()
    config = EngineConfig(model=str(tiny_checkpoint), device="cpu", max_num_seqs=1)
    engine = Engine(config, pick=script)
    audio = engine.model_config.audio
    num_delay = audio.default_delay_ms // audio.token_ms
    script.first_position = audio.num_prompt_tokens(num_delay) - 1
    with serve(engine) as live:
        yield live, script


def said(live: LiveServer, duration_s: float) -> list[dict]:
    """Return the events of one utterance, sent in small appends; its text is its deltas' sum."""
    clip = pcm16(noise(duration_s))
    live.wait_until(lambda: live.engine.stats().num_sessions == 0)
    with live.socket(INTENT) as client:
        client.send(
            "session.update",
            session={
                "type": "transcription",
                "include": ["item.input_audio_transcription.logprobs"],
                "audio": {"input": {"format": PCM_16}},
            },
        )
        for start in range(0, len(clip), 1280):
            client.append(clip[start : start + 1280])
        client.send("input_audio_buffer.commit")
        events = client.until(COMPLETED)
    openai_text_of(events)
    return events


@pytest.mark.parametrize("num_pads", [0, 2])
@pytest.mark.parametrize("name", TEXTS)
def test_characters_spread_over_tokens_arrive_whole(
    scripted: tuple[LiveServer, Script], name: str, num_pads: int
) -> None:
    """FAULTS 35: each byte is a token of its own, with pads after it."""
    live, script = scripted
    pads = [STREAMING_PAD_ID] * num_pads
    script.ids = [id_ for byte_id in ids_of(TEXTS[name]) for id_ in (byte_id, *pads)]
    events = said(live, 0.08 * len(script.ids))
    assert events[-1]["transcript"] == TEXTS[name]
    # None is held back longer than its last byte: one delta a character.
    deltas = [event["delta"] for event in events if event["type"] == DELTA]
    assert deltas == list(TEXTS[name])


def test_an_end_token_in_mid_stream_is_a_token_like_any_other(
    scripted: tuple[LiveServer, Script],
) -> None:
    """FAULTS 12: decoding goes on, the token counts and leaves no mark in what is sent."""
    live, script = scripted
    script.ids = [END_ID, *ids_of("one"), END_ID, END_ID, *ids_of(" tw"), END_ID, *ids_of("o")]
    completed = said(live, 2.0)[-1]
    assert completed["transcript"] == "one two"
    assert "".join(logprob["token"] for logprob in completed["logprobs"]) == "one two"
    script.ids = ids_of("one two")
    assert said(live, 2.0)[-1]["usage"] == completed["usage"]


def random_session(live: LiveServer, seed: int) -> None:
    """Do some of what clients do, in any order, and end in any way, while others do the same."""
    rng = random.Random(seed)
    live.wait_until(lambda: live.engine.stats().num_sessions < live.engine.stats().max_sessions)
    # Another one may have taken the seat.
    with suppress(ConnectionClosed), live.socket(INTENT) as client:
        if rng.random() < 0.7:
            client.receive()
        session = {"type": "transcription", "audio": {"input": {"format": PCM_16}}}
        client.send("session.update", session=session)
        for _ in range(rng.randrange(6)):
            match rng.choice(("append", "append", "commit", "clear")):
                case "append":
                    client.append(pcm16(noise(rng.random() * 0.3, seed)))
                case action:
                    client.send(f"input_audio_buffer.{action}")
        if rng.random() < 0.4:
            reset(client)


def test_five_hundred_random_sessions_leave_every_seat_and_block_free(live: LiveServer) -> None:
    """FAULTS 31: as many at a time as there are seats."""
    live.wait_until(lambda: live.engine.stats().num_sessions == 0)
    before = live.engine.stats()
    with ThreadPoolExecutor(before.max_sessions) as clients:
        for _ in clients.map(lambda seed: random_session(live, seed), range(500)):
            pass
    live.wait_until(lambda: not live.services.sessions)
    live.wait_until(lambda: live.engine.stats().num_sessions == 0)
    after = live.engine.stats()
    assert after.num_free_encoder_blocks == before.num_free_encoder_blocks
    assert after.num_free_decoder_blocks == before.num_free_decoder_blocks
    assert after.num_samples_in > before.num_samples_in
    assert after.failure is None
    test_the_seats_are_the_engines(live)
