"""Replayed passes train as plain ones do: the same losses, whatever the model draws, measures or keeps."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellcond import records
from wellcond.data import Batch
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.replay import WARM, Replayed

Make = Callable[..., Config]
pytestmark = pytest.mark.gpu

MIXER = {"model": "convmixer_768_32", "model_kwargs": {"dim": 16, "depth": 2, "kernel_size": 3, "patch_size": 2}}


def losses(config: Config, folder: Path) -> list[float]:
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a step of this training cannot be replayed")
        train(config, folder, device="cuda", quiet=True)
    return [row["loss"] for row in records.read_rows(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    "settings",
    [
        {"mixup": 0.8, "cutmix": 1.0, "probe_every": 5, "probe_samples": 4},
        {"drop_path": 0.2, "clip_grad": 1.0, "ema_decay": 0.9, "compile": True},
        {"amp_dtype": "float16"},
        {"amp_dtype": "bfloat16", "gray": "dct"},
        {"gray": "svd", "epsilon": 0.9},
        {"amp_dtype": "bfloat16", "attention": "skyformer", "attention_kwargs": {"num_landmarks": 4}},
        {"attention": "nystrom", "attention_kwargs": {"num_landmarks": 2}},
        {"task": "mae", "padding": 0, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
        MIXER,  # its batch norms keep averages
    ],
    ids=("probed", "drawn", "scaled", "grayed", "grayed by svd", "skyformer", "nystrom", "mae", "averaged"),
)
def test_replayed_passes_train_the_same(make_config: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    config = make_config(epochs=4, step_graph=True, **settings)
    plain = losses(config.changed({"step_graph": False}), tmp_path / "plain")
    assert losses(config, tmp_path / "replayed") == pytest.approx(plain, rel=1e-3)


def passes_of(model: nn.Module, also: Callable[[Tensor], object] = id) -> Callable[[Batch], Tensor]:
    def one_pass(batch: Batch) -> Tensor:
        loss = nn.functional.cross_entropy(model(*batch.inputs), batch.targets)
        also(loss)
        loss.backward()
        return loss.detach()

    return one_pass


def batches(number: int, size: int = 16) -> list[Batch]:
    def one() -> Batch:
        labels = torch.randint(4, (size,), device="cuda")
        return Batch(inputs=(torch.randn(size, 8, device="cuda"),), targets=labels, count=size)

    return [one() for _ in range(number)]


def test_gradients_are_those_of_the_images_given() -> None:
    model = nn.Linear(8, 4).cuda()
    replayed = Replayed(passes_of(model), list(model.parameters()), torch.device("cuda", 0))
    for batch in [*batches(WARM + 3), *batches(1, size=5), *batches(2)]:  # one is of another size
        loss = replayed(batch)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        torch.testing.assert_close(loss, passes_of(model)(batch))
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
        model.zero_grad()
    assert replayed._graph is not None


@pytest.mark.parametrize(
    ("also", "refused_at"),
    [(Tensor.item, WARM), (lambda _loss: torch.cuda.synchronize(), WARM + 1)],  # torch does not report the second
    ids=("seen before", "refused by CUDA"),
)
def test_a_pass_that_waits_is_refused_and_goes_on(also: Callable[[Tensor], object], refused_at: int) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 4)).cuda()
    replayed = Replayed(passes_of(model, also), list(model.parameters()), torch.device("cuda", 0))
    stream, given = torch.cuda.current_stream(), batches(WARM + 4)
    for batch in given[: refused_at - 1]:
        replayed(batch)
    with pytest.warns(RuntimeWarning, match="cannot be replayed as a CUDA graph"):
        replayed(given[refused_at])
    assert torch.cuda.current_stream() == stream
    for batch in batches(3):  # random numbers are drawn as before
        torch.manual_seed(5)
        loss = replayed(batch)
        torch.manual_seed(5)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        torch.testing.assert_close(loss, passes_of(model)(batch))
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
