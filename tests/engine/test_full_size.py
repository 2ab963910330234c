"""A checkpoint of the published model's sizes: it loads, runs, and stays within its memory.

Set TEST_CHECKPOINT to a folder to use that one; otherwise a random one is written first
(8.9 GB of disk, a few minutes).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.speechlike import speechlike

CLIP_S = 5
MAX_BYTES_BESIDE_WEIGHTS = 2e9

# In a process of its own, whose peak is then the engine's alone.
PROGRAM = """
import resource, sys
from voxlite.server.cli import main
sys.argv = ["voxlite", *sys.argv[1:]]
main_error = None
try:
    main()
except SystemExit as err:
    main_error = err.code
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(main_error)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get("TEST_CHECKPOINT"):
        return Path(folder)
    path = tmp_path_factory.mktemp("full_size")
    subprocess.run([sys.executable, "-m", "tests.checkpoints", str(path)], check=True)
    return path


@pytest.mark.checkpoint
def test_a_full_size_checkpoint_transcribes_within_its_memory(
    checkpoint: Path, tmp_path: Path
) -> None:
    clip = tmp_path / "clip.wav"
    soundfile.write(clip, speechlike(CLIP_S, seed=0), 16_000)
    command = ["transcribe", str(clip), "--model", str(checkpoint), "--format", "json"]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=True
    )
    result = json.loads(run.stdout)
    audio_tokens = int(np.ceil(CLIP_S / 0.08))
    assert result["usage"]["total_tokens"] == 32 + audio_tokens + 17
    assert len(result["token_ids"]) == result["usage"]["completion_tokens"]
    weight_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert int(run.stderr.split()[-1]) < weight_bytes + MAX_BYTES_BESIDE_WEIGHTS
