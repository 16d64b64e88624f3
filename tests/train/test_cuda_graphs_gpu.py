"""Passes replayed as CUDA graphs train as without them: nothing is read when the next step has overwritten it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wellcond import records
from wellcond.train.config import Config
from wellcond.train.loop import train

Make = Callable[..., Config]


def losses(config: Config, folder: Path) -> list[float]:
    torch.compiler.reset()
    train(config, folder, device="cuda", quiet=True)
    rows = records.read_rows(folder / "metrics.jsonl")
    return [row["loss"] for row in rows]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"mixup": 0.8, "cutmix": 1.0, "probe_every": 5, "probe_samples": 4},
        {"accumulate": 2, "clip_grad": 1.0, "ema_decay": 0.9},
        # Its loss is what the model returns, and lies in the graphs' memory.
        {"task": "mae", "padding": 0, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    ],
    ids=("probed", "accumulated", "mae"),
)
def test_replayed_graphs_train_the_same(make_config: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    config = make_config(epochs=6, log_every=7, compile=True, **settings)
    plain = losses(config, tmp_path / "plain")
    replayed = losses(config.changed({"compile_mode": "reduce-overhead"}), tmp_path / "replayed")
    assert replayed == pytest.approx(plain, rel=1e-3)
