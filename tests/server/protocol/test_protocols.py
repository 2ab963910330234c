"""The protocol modules without a socket: what decides, what is sticky, what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

import pytest

from voxlite.engine.config import LEGAL_DELAYS_MS
from voxlite.engine.events import Usage, Word
from voxlite.server.protocol.messages import (
    Append,
    Commit,
    Completed,
    Configure,
    Delta,
    ErrorEvent,
    Fault,
    ItemAdded,
    Nothing,
    ProtocolError,
    SessionUpdated,
)
from voxlite.server.protocol.mistral import MistralProtocol
from voxlite.server.protocol.negotiation import (
    Dialect,
    NegotiatedProtocol,
    dialect_of_update,
    hint_of,
)
from voxlite.server.protocol.openai_ga import OpenAIGAProtocol
from voxlite.server.protocol.vllm import VllmProtocol
from voxlite.server.protocol.wire import decode_audio, parse_object
from voxlite.server.session.session_config import (
    PCM_16_KHZ,
    PCM_24_KHZ,
    AudioFormat,
    Encoding,
    SemanticVad,
    ServerOffer,
    ServerVad,
)

OFFER = ServerOffer(
    model_names=("voxtral",), default_delay_ms=480, legal_delays_ms=tuple(LEGAL_DELAYS_MS)
)
CONFIG = OFFER.initial_config(PCM_16_KHZ)


def ids() -> Iterator[str]:
    return map(str, count())


def new_id_from(numbers: Iterator[str]):
    return lambda prefix: f"{prefix}_{next(numbers)}"


def negotiated(hint: Dialect) -> NegotiatedProtocol:
    return NegotiatedProtocol(OFFER, new_id_from(ids()), hint)


def written(protocol: object, event: object) -> list[dict]:
    return [json.loads(text) for text in protocol.send(event)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("query", "headers", "subprotocols", "hint"),
    [
        ({}, {}, [], Dialect.VLLM),
        ({"intent": "transcription"}, {}, [], Dialect.OPENAI),
        ({"model": "voxtral"}, {}, [], Dialect.OPENAI),
        ({}, {}, ["realtime", "openai-insecure-api-key.x"], Dialect.OPENAI),
        ({"intent": "transcription"}, {"openai-beta": "realtime=v1"}, [], Dialect.OPENAI_BETA),
        ({}, {}, ["realtime", "openai-beta.realtime-v1"], Dialect.OPENAI_BETA),
    ],
)
def test_the_handshake_is_a_hint(
    query: dict, headers: dict, subprotocols: list, hint: Dialect
) -> None:
    assert hint_of(query, headers, subprotocols) is hint


@pytest.mark.parametrize(
    ("message", "dialect"),
    [
        ({"type": "session.update", "model": "m"}, Dialect.VLLM),
        ({"type": "session.update", "session": {"type": "transcription"}}, Dialect.OPENAI),
        ({"type": "session.update", "session": {"audio": {}}}, Dialect.OPENAI),
        ({"type": "session.update", "session": {"audio": {}}, "model": "m"}, Dialect.OPENAI),
        ({"type": "session.update", "session": {"input_audio_format": "pcm16"}},
         Dialect.OPENAI_BETA),
        ({"type": "transcription_session.update", "session": {}}, Dialect.OPENAI_BETA),
        ({"type": "session.update"}, None),
        ({"type": "session.update", "session": {}}, None),
        ({"type": "session.update", "session": 5}, None),
    ],
)  # fmt: skip
def test_the_update_decides(message: dict, dialect: Dialect | None) -> None:
    assert dialect_of_update(message) is dialect


def test_the_update_wins_over_the_hint_and_brings_its_own_format() -> None:
    protocol = negotiated(Dialect.OPENAI_BETA)
    config = protocol.initial_config()
    assert config.audio_format == PCM_24_KHZ
    command = protocol.receive({"type": "session.update", "model": "voxtral"}, config)
    assert command == Configure(OFFER.initial_config(PCM_16_KHZ).__class__(
        model="voxtral", audio_format=PCM_16_KHZ, delay="low"), is_acknowledged=False)  # fmt: skip
    assert protocol.dialect is Dialect.VLLM


def test_a_decided_protocol_stays() -> None:
    protocol = negotiated(Dialect.VLLM)
    protocol.receive({"type": "session.update", "session": {"type": "transcription"}}, CONFIG)
    with pytest.raises(ProtocolError, match="session"):
        protocol.receive({"type": "session.update", "model": "voxtral"}, CONFIG)
    assert protocol.dialect is Dialect.OPENAI


def test_a_refused_update_is_answered_in_the_clients_protocol() -> None:
    protocol = negotiated(Dialect.VLLM)
    with pytest.raises(ProtocolError):
        protocol.receive({"type": "session.update", "session": {"type": "realtime"}}, CONFIG)
    (error,) = written(protocol, ErrorEvent(Fault.INVALID_VALUE, "no"))
    assert error["error"]["message"] == "no"


def test_vllms_plain_commit_asks_for_nothing_and_the_final_one_ends_the_utterance() -> None:
    protocol = VllmProtocol(OFFER)
    validated = CONFIG.__class__(model="voxtral", delay="low")
    assert protocol.receive({"type": "input_audio_buffer.commit"}, validated) == Nothing()
    final = {"type": "input_audio_buffer.commit", "final": True}
    assert protocol.receive(final, validated) == Commit()
    empty_name = protocol.receive({"type": "session.update", "model": ""}, CONFIG)
    assert isinstance(empty_name, Configure) and empty_name.config.model == "voxtral"


@pytest.mark.parametrize("type_", ["session.update", "input_audio_buffer.commit"])
def test_unknown_fields_are_ignored(type_: str) -> None:
    message = {"type": type_, "model": "voxtral", "language": "en", "prompt": 3, "x": [1]}
    VllmProtocol(OFFER).receive(message, CONFIG.__class__(model="voxtral", delay="low"))


def test_white_space_before_the_first_word_is_vllms_alone() -> None:
    def delta(text: str, is_first: bool) -> Delta:
        return Delta(item_id="i", text=text, is_first=is_first, logprobs=None, words=())

    openai = OpenAIGAProtocol(OFFER, new_id_from(ids()))
    assert written(openai, delta(" ", True)) == []
    assert written(openai, delta(" hello", True))[0]["delta"] == "hello"
    assert written(openai, delta(" world", False))[0]["delta"] == " world"
    assert written(VllmProtocol(OFFER), delta(" hello", True)) == [
        {"type": "transcription.delta", "delta": " hello"}
    ]


def test_times_that_come_after_the_letters_are_sent_where_deltas_have_times() -> None:
    word = Word(text=" hello", start_s=0.4, end_s=0.8)
    times = Delta(item_id="i", text="", is_first=False, logprobs=None, words=(word,))
    [delta] = written(OpenAIGAProtocol(OFFER, new_id_from(ids())), times)
    assert delta["delta"] == ""
    assert delta["words"] == [{"word": "hello", "start": 0.4, "end": 0.8}]
    assert written(VllmProtocol(OFFER), times) == []


def test_text_in_any_script_survives() -> None:
    text = " 你好 नमस्ते مرحبا 👩‍👩‍👧 é"
    event = Completed(
        item_id="i",
        text=text,
        usage=Usage(prompt_tokens=1, completion_tokens=2),
        duration_s=1.0,
        logprobs=None,
        words=(),
        config=CONFIG,
    )
    assert written(VllmProtocol(OFFER), event)[0]["text"] == text
    assert written(MistralProtocol(OFFER), event)[0]["text"] == text
    openai = OpenAIGAProtocol(OFFER, new_id_from(ids()))
    assert written(openai, event)[0]["transcript"] == text.lstrip()


def test_each_protocol_is_silent_where_it_has_no_word() -> None:
    added = ItemAdded(item_id="i", previous_item_id=None)
    assert written(VllmProtocol(OFFER), added) == []
    assert written(MistralProtocol(OFFER), added) == []


def test_every_fault_can_be_written_in_every_protocol() -> None:
    openai = OpenAIGAProtocol(OFFER, new_id_from(ids()))
    for fault in Fault:
        error = ErrorEvent(fault, "message", "param", "id")
        assert isinstance(written(VllmProtocol(OFFER), error)[0]["error"], str)
        assert isinstance(written(MistralProtocol(OFFER), error)[0]["error"]["code"], int)
        nested = written(openai, error)[0]["error"]
        assert nested["type"] in ("invalid_request_error", "server_error")
        assert nested["event_id"] == "id"


def openai_update(**audio_input: object) -> Configure:
    message = {
        "type": "session.update",
        "session": {"type": "transcription", "audio": {"input": audio_input}},
    }
    command = OpenAIGAProtocol(OFFER, new_id_from(ids())).receive(message, CONFIG)
    assert isinstance(command, Configure)
    return command


def test_a_format_without_a_rate_keeps_the_rate_of_its_type() -> None:
    assert openai_update(format={"type": "audio/pcm"}).config.audio_format == PCM_16_KHZ
    g711 = openai_update(format={"type": "audio/pcmu"}).config.audio_format
    assert g711 == AudioFormat(Encoding.MULAW, 8000)


def test_turn_detection_of_another_type_starts_from_its_defaults() -> None:
    assert openai_update(turn_detection={"type": "semantic_vad"}).config.turn_detection == (
        SemanticVad()
    )
    assert openai_update(turn_detection={"type": "server_vad"}).config.turn_detection == ServerVad()
    vad = {"type": "server_vad", "create_response": True, "interrupt_response": False}
    assert openai_update(turn_detection=vad).config.turn_detection == ServerVad()


def test_null_clears() -> None:
    config = CONFIG.__class__(delay="high", model="voxtral", turn_detection=ServerVad())
    message = {
        "type": "session.update",
        "session": {
            "type": "transcription",
            "audio": {"input": {"turn_detection": None, "transcription": None}},
        },
    }
    command = OpenAIGAProtocol(OFFER, new_id_from(ids())).receive(message, config)
    assert isinstance(command, Configure)
    assert command.config.turn_detection is None
    assert command.config.delay == "low"


def test_what_is_echoed_can_be_sent_back() -> None:
    protocol = OpenAIGAProtocol(OFFER, new_id_from(ids()))
    config = openai_update(
        format={"type": "audio/pcma"}, turn_detection={"type": "server_vad", "threshold": 0.25}
    ).config
    updated = SessionUpdated(session_id="s", created_s=0, config=config)
    echoed = written(protocol, updated)[0]["session"]
    again = protocol.receive({"type": "session.update", "session": echoed}, CONFIG)
    assert isinstance(again, Configure)
    assert again.config.turn_detection == config.turn_detection
    assert again.config.audio_format == config.audio_format


@pytest.mark.parametrize("text", ["", "nul", '{"a":Infinity}', '{"a":' * 50_000, "1" * 5000])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse_object(text)


def test_messages_about_values_are_short() -> None:
    with pytest.raises(ProtocolError) as refused:
        VllmProtocol(OFFER).receive({"type": "x" * 100_000}, CONFIG)
    assert len(refused.value.message) < 200
    with pytest.raises(ProtocolError) as refused:
        openai_update(transcription={"model": "m" * 100_000})
    assert len(refused.value.message) < 200


def test_audio_is_base64_and_nothing_else() -> None:
    assert decode_audio("AAE=") == b"\x00\x01"
    for bad in ("AAE", "A A=", "data:audio/wav;base64,AAE=", "é", "AA-_"):
        with pytest.raises(ProtocolError):
            decode_audio(bad)


def test_segments_of_mistral_come_from_the_words() -> None:
    word = Word(text=" hi", start_s=0.1 + 0.2 + 0.2, end_s=0.75 + 1e-12)
    event = Completed(
        item_id="i",
        text=" hi",
        usage=Usage(prompt_tokens=39, completion_tokens=11),
        duration_s=1.2,
        logprobs=None,
        words=(word,),
        config=CONFIG,
    )
    (done,) = written(MistralProtocol(OFFER), event)
    assert done["segments"] == [
        {"type": "transcription_segment", "text": "hi", "start": 0.5, "end": 0.75}
    ]
    assert done["usage"]["prompt_audio_seconds"] == 1


def test_an_append_is_the_bytes() -> None:
    message = {"type": "input_audio_buffer.append", "audio": "AAE="}
    assert VllmProtocol(OFFER).receive(message, CONFIG) == Append(b"\x00\x01")
