"""The `voxlite` command. Each subcommand imports what it needs, so that `--help` is instant."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

# Files transcribed at once: each takes a session's KV cache (1.1 GB for the 4B model).
_MAX_CONCURRENT_FILES = 4

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Realtime transcription with Voxtral-Mini-4B-Realtime.",
)


class Dtype(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Quantization(StrEnum):
    none = "none"
    int8 = "int8"


class Format(StrEnum):
    text = "text"
    json = "json"
    srt = "srt"
    vtt = "vtt"


Model = Annotated[
    str | None,
    typer.Option(help="A checkpoint folder or a hub id.", show_default="the bundled model"),
]


DelayMs = Annotated[
    int | None,
    typer.Option(help="80 to 1200 in steps of 80, or 2400.", show_default="the model's, 480"),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="auto is the checkpoint's own.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto is CUDA where there is one.")]
QuantizationOption = Annotated[
    Quantization,
    typer.Option("--quantization", help="int8: half of bfloat16's memory, and faster on a CPU."),
]


@app.command()
def transcribe(
    audio: Annotated[
        list[str], typer.Argument(help="Audio files; - is raw PCM16, mono, 16 kHz on stdin.")
    ],
    model: Model = None,
    delay_ms: DelayMs = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = Device.auto,
    quantization: QuantizationOption = Quantization.none,
    format: Annotated[Format, typer.Option(help="What to write.")] = Format.text,
    output: Annotated[
        Path | None, typer.Option(help="A file, or a folder to get one file for each input.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Log what the engine does.")] = False,
) -> None:
    """Transcribe audio files, in any format, rate and number of channels that libsndfile reads."""
    from voxlite.engine import Engine, EngineConfig, SessionOptions
    from voxlite.server.bundled import bundled_model
    from voxlite.server.commands.transcribe import transcribe_files

    configure_logging(logging.INFO if verbose else logging.WARNING)
    config = EngineConfig(
        model=model or str(bundled_model()),
        dtype=dtype.value,
        device=device.value,
        quantization=quantization.value,
        max_num_seqs=min(len(audio), _MAX_CONCURRENT_FILES),
        default_delay_ms=delay_ms,
    )
    with Engine(config) as engine:
        num_failed = transcribe_files(
            engine, audio, options=SessionOptions(), output_format=format.value, output=output
        )
    if num_failed:
        raise typer.Exit(1)


@app.command()
def evaluate(
    manifest: Annotated[
        Path, typer.Argument(help='JSON lines: {"audio": path, "text": ..., "set": ...}.')
    ],
    model: Model = None,
    delay_ms: DelayMs = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = Device.auto,
    quantization: QuantizationOption = Quantization.none,
    max_num_seqs: Annotated[int, typer.Option(help="Clips transcribed at once.")] = 8,
    show_errors: Annotated[
        bool, typer.Option(help="Print each clip that isn't right, with both texts.")
    ] = False,
) -> None:
    """Measure the word error rate of a manifest, per set, through the streaming engine."""
    from rich.console import Console
    from rich.table import Table

    from voxlite.engine import Engine, EngineConfig, SessionOptions
    from voxlite.server.bundled import bundled_model
    from voxlite.server.commands.evaluate import normalize, read_manifest, score_sets, transcripts

    clips = read_manifest(manifest)
    config = EngineConfig(
        model=model or str(bundled_model()),
        dtype=dtype.value,
        device=device.value,
        quantization=quantization.value,
        max_num_seqs=max_num_seqs,
        default_delay_ms=delay_ms,
    )
    with Engine(config) as engine:
        results = list(zip(clips, transcripts(engine, clips, SessionOptions()), strict=True))
        title = f"delay {engine.default_delay_ms} ms"
    heard = [(clip, text) for clip, text in results if text is not None]
    if show_errors:
        for clip, text in heard:
            if normalize(clip.text) != normalize(text):
                print(f"{clip.audio}\n  said:  {normalize(clip.text)}\n  heard: {normalize(text)}")
    table = Table("set", title=title)
    for column in ("clips", "words", "substituted", "deleted", "inserted", "word error rate"):
        table.add_column(column, justify="right")
    for score in score_sets([clip for clip, _ in heard], [text for _, text in heard]):
        rate = score.word_error_rate
        table.add_row(
            score.set_name,
            str(score.num_clips),
            str(score.num_words),
            str(score.num_substitutions),
            str(score.num_deletions),
            str(score.num_insertions),
            "-" if rate is None else f"{100 * rate:.2f} %",
        )
    Console().print(table)
    if len(heard) < len(results):
        print(
            f"voxlite: {len(results) - len(heard)} clips not read are not counted", file=sys.stderr
        )
        raise typer.Exit(1)


def _flag(text: str, default: object = None) -> Any:
    shown = False if default is None else str(default)
    return typer.Option(help=text, show_default=shown)


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint folder or a hub id; without it, the bundled model."),
    ] = None,
    host: Annotated[str | None, _flag("Address to listen on.", "127.0.0.1")] = None,
    port: Annotated[int | None, _flag("Port to listen on.", 8000)] = None,
    api_key: Annotated[
        list[str] | None, _flag("A key that clients must have. May be given several times.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _flag("A name of the model for clients. May be given several times.", "the model"),
    ] = None,
    dtype: Annotated[
        str | None, _flag("auto, bfloat16, float32 or float16; auto is the model's own.", "auto")
    ] = None,
    device: Annotated[
        str | None, _flag("auto, cpu or cuda; auto is CUDA where there is one.", "auto")
    ] = None,
    quantization: Annotated[
        str | None,
        _flag("none or int8; int8 has half of bfloat16's memory, and is faster on a CPU.", "none"),
    ] = None,
    max_num_seqs: Annotated[int | None, _flag("Most sessions at once.", 8)] = None,
    kv_cache_gib: Annotated[
        float | None, _flag("Memory for the KV cache.", "enough for --max-num-seqs")
    ] = None,
    default_delay_ms: Annotated[
        int | None,
        _flag("Delay of sessions that ask for none: 80 to 1200 in steps of 80, or 2400.", 480),
    ] = None,
    idle_timeout: Annotated[
        float | None, _flag("Seconds without audio after which a session ends; 0: never.", 120)
    ] = None,
    max_session_seconds: Annotated[
        float | None, _flag("Longest session, in seconds; 0: no limit.", 0)
    ] = None,
    max_buffered_seconds: Annotated[
        float | None, _flag("Audio that a session may have waiting, in seconds.", 300)
    ] = None,
    max_upload_mib: Annotated[
        int | None, _flag("Largest file for /v1/audio/transcriptions, in MiB.", 1024)
    ] = None,
    ssl_keyfile: Annotated[str | None, _flag("The key of the TLS certificate.")] = None,
    ssl_certfile: Annotated[str | None, _flag("The TLS certificate.")] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _flag("An origin whose pages may use the server, * for all. May be given several times."),
    ] = None,
    uvicorn_log_level: Annotated[
        str | None, _flag("critical, error, warning, info, debug or trace.", "info")
    ] = None,
) -> None:
    """Serve realtime transcription. Every flag can come from the environment: VOXLITE_PORT=8000."""
    flags = locals()
    from voxlite.server.commands.serve import serve as run
    from voxlite.server.commands.serve import settings_of

    configure_logging(logging.INFO)
    run(settings_of(**flags))


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint folder or a hub id.", show_default="the bundled model"),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Random weights of a size, made in memory: tiny, small or 4b."),
    ] = None,
    quantization: QuantizationOption = Quantization.none,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = Device.auto,
    sessions: Annotated[str, typer.Option(help="Numbers of clips to hand in at once.")] = "1,2,4,8",
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each clip.")] = 5.0,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens to draft.", show_default="what suits the weights")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Word times (JSON lines): ids as speech has them, for a file of 60 s."),
    ] = None,
    replay_seconds: Annotated[float, typer.Option(min=0.1, help="How much to replay.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the engine on this machine: passes, clips, memory, beside what the memory allows."""
    from voxlite.bench.engine_report import print_report
    from voxlite.bench.engine_speed import measure_engine
    from voxlite.engine import EngineConfig, InvalidInput
    from voxlite.server.bundled import bundled_model

    configure_logging(logging.WARNING)
    if model is not None and preset is not None:
        raise InvalidInput("a model and --preset: only one can be measured")
    try:
        counts = [int(count) for count in sessions.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InvalidInput(f"--sessions {sessions}: whole numbers from 1, with commas in between")
    config = EngineConfig(
        model=model or str(bundled_model()),
        dtype=dtype.value,
        device=device.value,
        quantization=quantization.value,
        max_num_seqs=max(counts),
        num_draft_tokens=draft_tokens,
        max_buffered_seconds=max(60.0, seconds, replay_seconds),
    )
    report = measure_engine(
        config,
        preset=preset,
        sessions=counts,
        seconds=seconds,
        replay_path=replay,
        replay_seconds=replay_seconds,
    )
    if as_json:
        print(report.as_json())
    else:
        print_report(report)


@app.command()
def demo() -> None:
    """Start a server, speak the bundled sample to it in real time, print the words as they come."""
    from voxlite.server.commands.demo import run_demo

    configure_logging(logging.WARNING)
    run_demo()


def configure_logging(level: int) -> None:
    """Log to standard error. Called once, by a command."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command; an error that a user can mend is a sentence, not a traceback."""
    try:
        app()
    except Exception as err:
        from voxlite.engine.errors import VoxliteError

        if not isinstance(err, VoxliteError):
            raise
        print(f"voxlite: {err}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
