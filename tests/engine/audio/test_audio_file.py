"""Audio files of every kind that users send: the right samples, or a sentence that says why not."""

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from voxlite.engine.audio.audio_file import AudioFile, pcm16_to_float, read_audio, read_pcm16
from voxlite.engine.errors import InvalidInput

Samples = NDArray[np.float32]

PCM, FLOAT = 1, 3
UNKNOWN = 0xFFFFFFFF
PCM_GUID = b"\x01\x00\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71"
LIST_CHUNK = (
    b"LIST" + struct.pack("<I", 26) + b"INFOISFT" + struct.pack("<I", 14) + b"Lavf58.29.100\0"
)


def tone(rate_hz: int = 16_000, seconds: float = 0.5) -> Samples:
    times_s = np.arange(round(rate_hz * seconds)) / rate_hz
    return (0.5 * np.sin(2 * np.pi * 440 * times_s)).astype(np.float32)


def pcm16(samples: Samples) -> bytes:
    return (samples * 32_768).astype("<i2").tobytes()


def pcm24(samples: Samples) -> bytes:
    values = (samples * 2**23).astype("<i4")
    return values.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def format_chunk(
    tag: int = PCM, bits: int = 16, *, rate_hz: int = 16_000, channels: int = 1, extra: bytes = b""
) -> bytes:
    frame_bytes = channels * bits // 8
    body = struct.pack("<HHIIHH", tag, channels, rate_hz, rate_hz * frame_bytes, frame_bytes, bits)
    return b"fmt " + struct.pack("<I", len(body + extra)) + body + extra


def wav(
    data: bytes,
    *,
    fmt: bytes = format_chunk(),
    data_size: int | None = None,
    riff_size: int | None = None,
    before: bytes = b"",
    after: bytes = b"",
) -> bytes:
    """A WAV file, byte by byte; sizes that aren't given are true."""
    head = b"WAVE" + fmt + before + b"data"
    size = struct.pack("<I", len(data) if data_size is None else data_size)
    body = head + size + data + after
    return b"RIFF" + struct.pack("<I", len(body) if riff_size is None else riff_size) + body


def encoded(
    samples: Samples, rate_hz: int = 16_000, container: str = "WAV", subtype: str | None = None
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=container, subtype=subtype)
    return file.getvalue()


def read(contents: bytes) -> Samples:
    return np.concatenate(list(read_audio(io.BytesIO(contents))))


def from_path(contents: bytes, folder: Path) -> Samples:
    path = folder / "audio.bin"
    path.write_bytes(contents)
    return np.concatenate(list(read_audio(path)))


def from_memory(contents: bytes, folder: Path) -> Samples:
    return read(contents)


UNFINISHED_WAVS = {
    "data size 0": wav(pcm16(tone()), data_size=0),
    "data size 0, RIFF size 0": wav(pcm16(tone()), data_size=0, riff_size=0),
    "data size 0, RIFF size of the header": wav(pcm16(tone()), data_size=0, riff_size=36),
    "data size 0 after a LIST chunk": wav(
        pcm16(tone()), data_size=0, riff_size=0, before=LIST_CHUNK
    ),
    "data size 0xFFFFFFFF": wav(pcm16(tone()), data_size=UNKNOWN),
    "both sizes 0xFFFFFFFF": wav(pcm16(tone()), data_size=UNKNOWN, riff_size=UNKNOWN),
    "as ffmpeg pipes it": wav(
        pcm16(tone()), data_size=UNKNOWN, riff_size=UNKNOWN, before=LIST_CHUNK
    ),
    "data size 0x7FFFF000": wav(pcm16(tone()), data_size=0x7FFFF000, riff_size=0x7FFFF024),
}


@pytest.mark.parametrize("source", [from_path, from_memory])
@pytest.mark.parametrize("name", UNFINISHED_WAVS)
def test_a_wav_of_unknown_size_gives_all_its_audio(
    name: str, source: Callable[[bytes, Path], Samples], tmp_path: Path
) -> None:
    actual = source(UNFINISHED_WAVS[name], tmp_path)
    np.testing.assert_array_equal(actual, pcm16_to_float(pcm16(tone())))


def test_a_wav_of_unknown_size_may_start_with_silence() -> None:
    samples = np.concatenate((np.zeros(10_000, np.float32), tone()))
    actual = read(wav(pcm16(samples), data_size=0, riff_size=0))
    np.testing.assert_array_equal(actual, pcm16_to_float(pcm16(samples)))


@pytest.mark.parametrize("name", UNFINISHED_WAVS)
def test_a_wav_of_unknown_size_is_not_changed_on_disk(name: str, tmp_path: Path) -> None:
    from_path(UNFINISHED_WAVS[name], tmp_path)
    assert (tmp_path / "audio.bin").read_bytes() == UNFINISHED_WAVS[name]


EXTENSIBLE = struct.pack("<HHI", 22, 16, 4) + PCM_GUID
WAV_VARIANTS = {
    "LIST before the data": wav(pcm16(tone()), before=LIST_CHUNK),
    "LIST after the data": wav(pcm16(tone()), after=LIST_CHUNK),
    "extensible": wav(pcm16(tone()), fmt=format_chunk(0xFFFE, extra=EXTENSIBLE)),
    "24 bit": wav(pcm24(tone()), fmt=format_chunk(bits=24)),
    "32 bit": wav((tone() * 2**31).astype("<i4").tobytes(), fmt=format_chunk(bits=32)),
    "float": wav(tone().astype("<f4").tobytes(), fmt=format_chunk(FLOAT, 32)),
    "double": wav(tone().astype("<f8").tobytes(), fmt=format_chunk(FLOAT, 64)),
    "stereo": wav(pcm16(np.repeat(tone(), 2)), fmt=format_chunk(channels=2)),
    "an odd byte too many": wav(pcm16(tone()) + b"\x07"),
    "a RIFF size that is too small": wav(pcm16(tone()), riff_size=100),
    "a RIFF size of 0": wav(pcm16(tone()), riff_size=0),
}


@pytest.mark.parametrize("name", WAV_VARIANTS)
def test_every_kind_of_wav_gives_its_samples(name: str) -> None:
    np.testing.assert_allclose(read(WAV_VARIANTS[name]), tone(), atol=1 / 32_768)


def test_8_bit_wav_gives_its_samples() -> None:
    data = (tone() * 128 + 128).astype(np.uint8).tobytes()
    np.testing.assert_allclose(read(wav(data, fmt=format_chunk(bits=8))), tone(), atol=1 / 128)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
def test_every_rate_comes_out_at_16_khz(rate_hz: int) -> None:
    actual = read(encoded(tone(rate_hz), rate_hz))
    assert abs(len(actual) - 8_000) <= 1
    np.testing.assert_allclose(actual[1_000:7_000], tone()[1_000:7_000], atol=1e-3)


@pytest.mark.parametrize(
    ("container", "subtype"),
    [
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
        ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),
    ],
)
def test_every_codec_gives_its_audio(container: str, subtype: str) -> None:
    actual = read(encoded(tone(), 16_000, container, subtype))
    assert abs(len(actual) - 8_000) <= 1_152  # of which a codec may pad a frame
    np.testing.assert_allclose(actual[1_000:7_000], tone()[1_000:7_000], atol=0.05)


def test_channels_are_averaged() -> None:
    stereo = np.stack((tone(), np.zeros_like(tone())), axis=1)
    np.testing.assert_allclose(read(encoded(stereo)), tone() / 2, atol=1 / 32_768)


def test_a_flac_of_unknown_length_gives_all_its_audio() -> None:
    flac = bytearray(encoded(tone(), container="FLAC"))
    total_samples = slice(21, 26)  # the lower 36 bits of these five bytes of STREAMINFO
    flac[total_samples] = bytes([flac[21] & 0xF0, 0, 0, 0, 0])
    np.testing.assert_allclose(read(bytes(flac)), tone(), atol=1 / 32_768)


def test_an_ogg_cut_short_gives_what_is_there() -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 160_000).astype(np.float32)
    whole = encoded(samples, container="OGG", subtype="VORBIS")
    actual = read(whole[: len(whole) // 2])
    assert 60_000 < len(actual) < 100_000
    np.testing.assert_array_equal(actual[:60_000], read(whole)[:60_000])


@pytest.mark.parametrize("num_bytes", [16_044, 16_043, 46, 45])
def test_a_wav_cut_short_gives_what_is_there(num_bytes: int) -> None:
    expected = pcm16_to_float(pcm16(tone()))[: (num_bytes - 44) // 2]
    if len(expected) == 0:
        with pytest.raises(InvalidInput, match="no audio"):
            read(wav(pcm16(tone()))[:num_bytes])
    else:
        np.testing.assert_array_equal(read(wav(pcm16(tone()))[:num_bytes]), expected)


FLAC, OGG = encoded(tone(), container="FLAC"), encoded(tone(), container="OGG", subtype="VORBIS")
UNREADABLE = {
    "empty": b"",
    "text": b"This is not audio, however long one listens to it.\n" * 50,
    "a RIFF header alone": wav(b"")[:12],
    "a WAV cut off in its header": wav(b"")[:30],
    "a WAV without samples": wav(b""),
    "a WAV without samples, but with chunks after them": wav(b"", after=LIST_CHUNK),
    "a FLAC cut short": FLAC[: len(FLAC) // 2],
    "a FLAC header alone": FLAC[:42],
    "an Ogg cut off in its header": OGG[:100],
    "an Ogg cut off before its first audio": OGG[:-100],
    "an MP3 cut off in its first frame": encoded(tone(), container="MP3")[:100],
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_audio_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"audio") as refusal:
        read(UNREADABLE[name])
    assert "BytesIO" not in str(refusal.value)


def test_a_folder_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a folder, not an audio file"):
        AudioFile(tmp_path)


def test_a_missing_file_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        AudioFile(str(tmp_path / "missing.wav"))


def test_a_refusal_does_not_repeat_the_path(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not audio")
    with pytest.raises(InvalidInput) as refusal:
        AudioFile(path)
    assert str(tmp_path) not in str(refusal.value)


def test_values_that_are_not_finite_become_silence() -> None:
    samples = tone()
    samples[100:104] = [np.nan, np.inf, -np.inf, np.nan]
    expected = samples.copy()
    expected[100:104] = 0
    np.testing.assert_array_equal(read(encoded(samples, subtype="FLOAT")), expected)


def test_opposite_infinities_in_two_channels_become_silence() -> None:
    stereo = np.stack((tone(), tone()), axis=1)
    stereo[5] = [np.inf, -np.inf]
    assert read(encoded(stereo, subtype="FLOAT"))[5] == 0


@pytest.mark.parametrize(("rate_hz", "num_samples"), [(16_000, 8_000), (48_000, 24_000)])
def test_the_length_is_known_ahead(rate_hz: int, num_samples: int) -> None:
    audio = AudioFile(io.BytesIO(encoded(np.zeros(num_samples, np.float32), rate_hz)))
    assert audio.num_samples == 8_000


@pytest.mark.parametrize("read_size", [1, 3, 4_095, 4_096])
def test_raw_pcm_is_whole_however_the_pipe_delivers_it(read_size: int) -> None:
    class Pipe(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or -1, read_size))

    pieces = list(read_pcm16(Pipe(pcm16(tone()) + b"\x01")))
    np.testing.assert_array_equal(np.concatenate(pieces), pcm16_to_float(pcm16(tone())))


def test_pcm16_spans_minus_one_to_just_below_one() -> None:
    data = np.array([-32_768, 0, 32_767], "<i2").tobytes()
    np.testing.assert_array_equal(pcm16_to_float(data), np.float32([-1, 0, 32_767 / 32_768]))
