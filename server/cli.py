"""The `voxlite` command. Each subcommand imports what it needs, so that `--help` is instant."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

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


class Format(StrEnum):
    text = "text"
    json = "json"
    srt = "srt"
    vtt = "vtt"


Model = Annotated[
    str | None,
    typer.Option(help="A checkpoint folder or a hub id.", show_default="the bundled model"),
]


@app.callback()
def voxlite() -> None:
    """Keep `voxlite` a command with subcommands even while it has only one."""


@app.command()
def transcribe(
    audio: Annotated[
        list[str], typer.Argument(help="Audio files; - is raw PCM16, mono, 16 kHz on stdin.")
    ],
    model: Model = None,
    delay_ms: Annotated[
        int | None,
        typer.Option(help="80 to 1200 in steps of 80, or 2400.", show_default="the model's, 480"),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto is the checkpoint's own.")] = Dtype.auto,
    device: Annotated[Device, typer.Option(help="auto is CUDA where there is one.")] = Device.auto,
    format: Annotated[Format, typer.Option(help="What to write.")] = Format.text,
    output: Annotated[
        Path | None, typer.Option(help="A file, or a folder to get one file for each input.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Log what the engine does.")] = False,
) -> None:
    """Transcribe audio files, in any format, rate and number of channels that libsndfile reads."""
    from engine import Engine, EngineConfig, SessionOptions
    from server.bundled import bundled_model
    from server.transcribe import transcribe_files

    configure_logging(logging.INFO if verbose else logging.WARNING)
    config = EngineConfig(
        model=model or str(bundled_model()),
        dtype=dtype.value,
        device=device.value,
        max_num_seqs=min(len(audio), _MAX_CONCURRENT_FILES),
        default_delay_ms=delay_ms,
    )
    with Engine(config) as engine:
        num_failed = transcribe_files(
            engine, audio, options=SessionOptions(), output_format=format.value, output=output
        )
    if num_failed:
        raise typer.Exit(1)


def configure_logging(level: int) -> None:
    """Log to standard error. Called once, by a command."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command; an error that a user can mend is a sentence, not a traceback."""
    try:
        app()
    except Exception as err:
        from engine.errors import VoxliteError

        if not isinstance(err, VoxliteError):
            raise
        print(f"voxlite: {err}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
