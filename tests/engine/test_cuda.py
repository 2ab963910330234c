"""The same code on a CUDA device: right results, every tensor where it belongs."""

from pathlib import Path

import pytest
import torch

from tests.engine.harness import transcribe
from tests.oracle import Oracle
from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig, InvalidInput

CLIP = speechlike(2.5, seed=1)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.cuda
@needs_cuda
def test_ids_on_cuda_equal_the_oracles(tiny_checkpoint: Path) -> None:
    config = EngineConfig(
        model=str(tiny_checkpoint), device="cuda", dtype="float32", poison_freed_blocks=True
    )
    assert transcribe(Engine(config), [CLIP]).ids() == Oracle(tiny_checkpoint).greedy(CLIP, 6)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_runs_on_cuda(tiny_checkpoint: Path, dtype: str) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoint), device="cuda", dtype=dtype))
    [done] = transcribe(engine, [CLIP]).done
    assert done.usage.total_tokens == 32 + 32 + 17


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_asking_for_cuda_without_a_device_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(InvalidInput, match="no CUDA device"):
        Engine(EngineConfig(model=str(tiny_checkpoint), device="cuda"))
