"""A run that was stopped and resumed must end where an uninterrupted one does."""

from pathlib import Path

import pytest
import torch

from training.dataset import Batch
from training.model import ModelShape
from training.muon import orthogonalize
from training.train import Trainer

SHAPE = ModelShape(
    encoder_dim=32,
    encoder_layers=1,
    encoder_heads=2,
    encoder_head_size=8,
    encoder_hidden_dim=32,
    encoder_window=16,
    decoder_dim=32,
    decoder_layers=1,
    decoder_heads=2,
    decoder_kv_heads=1,
    decoder_head_size=8,
    decoder_hidden_dim=32,
    decoder_window=16,
    vocab_size=1300,
)
NUM_SOUNDS = 5
NUM_TOKENS = 60


def trainer(seed: int) -> Trainer:
    torch.manual_seed(seed)
    device = torch.device("cpu")
    return Trainer(
        SHAPE, num_sounds=NUM_SOUNDS, device=device, weight_decay=0.01, helper_weight=0.5
    )


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def ids(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    return Batch(
        log_mel=torch.randn(2, 128, 8 * NUM_TOKENS, generator=generator),
        input_ids=ids(SHAPE.vocab_size, 2, NUM_TOKENS),
        target_ids=ids(SHAPE.vocab_size, 2, NUM_TOKENS),
        num_delay_tokens=torch.tensor([6, 12]),
        word_labels=ids(300, 2, NUM_TOKENS),
        sound_labels=ids(NUM_SOUNDS, 2, 4 * NUM_TOKENS),
    )


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted = trainer(seed=0)
    for index in range(4):
        uninterrupted.update(batch(index), 1e-3)

    stopped = trainer(seed=0)
    for index in range(2):
        stopped.update(batch(index), 1e-3)
    stopped.save(tmp_path / "last.pt")
    resumed = trainer(seed=1)
    resumed.load(tmp_path / "last.pt")
    assert resumed.step == 2
    for index in range(2, 4):
        resumed.update(batch(index), 1e-3)

    for name, expected in uninterrupted.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], expected, atol=0, rtol=0)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    saved = trainer(seed=0)
    saved.save(tmp_path / "last.pt")
    saved.shape = ModelShape()
    with pytest.raises(ValueError, match="holds a model of shape"):
        saved.load(tmp_path / "last.pt")


def test_the_loss_of_one_batch_falls() -> None:
    learner = trainer(seed=0)
    first = learner.update(batch(0), 1e-2)
    for _ in range(15):
        last = learner.update(batch(0), 1e-2)
    assert last["word"] < first["word"]
    assert last["token"] < first["token"]


def test_muons_direction_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    direction = orthogonalize(torch.randn(3, 16, 40)).float()
    values = torch.linalg.svdvals(direction)
    assert values.min() > 0.5
    assert values.max() < 1.5
