"""A source that somebody else's package adds: by its word it is a data set like any other."""

from pathlib import Path

import pytest
import torch

from wellcond import register_source
from wellcond.data import SOURCES, DataSet, Images, Settings, open_data
from wellcond.train.config import Config
from wellcond.train.loop import train


@pytest.fixture
def halves():
    """Images whose upper or lower half is bright, as many as the word says."""

    @register_source("halves", takes="COUNT")
    def source(rest: str, settings: Settings) -> DataSet:
        side, unknown = settings.image_size, torch.zeros(3)

        def part(count: int) -> Images:
            labels = torch.arange(count) % 2
            pixels = torch.randint(60, (count, 3, side, side), generator=torch.Generator().manual_seed(count))
            rows = torch.arange(side)[None, :] >= side // 2
            bright = (rows == labels[:, None].bool())[:, None, :, None]
            return Images((pixels + 150 * bright).to(torch.uint8), labels, mean=unknown, std=unknown)

        first = part(int(rest)).measured()
        second = part(int(rest) // 2).normalised_by(first.mean, first.std)
        return DataSet(name="halves", classes=["up", "down"], train=first, val=second, skipped=[])

    yield
    del SOURCES["halves"]


def test_it_is_opened_held_out_and_trained(halves: None, tmp_path: Path) -> None:
    assert len(open_data("halves:64", image_size=8, holdout=0.25).val) == 16
    model = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
    settings = {"data": "halves:128", "image_size": 8, "model_kwargs": model, "epochs": 15, "batch_size": 16}
    outcome = train(Config().changed({**settings, "lr": 5e-3, "probe_every": 50}), tmp_path, device="cpu", quiet=True)
    assert outcome.metrics["top1"] > 0.9


def test_words_are_taken_once_and_named_in_errors(halves: None) -> None:
    with pytest.raises(ValueError, match="there is a source called 'halves' already"):
        register_source("halves")(lambda rest, settings: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="names nothing after the colon; write halves:COUNT"):
        open_data("halves:", image_size=8)
    with pytest.raises(ValueError, match="halves:COUNT"):
        open_data("nothing:1", image_size=8)
    with pytest.raises(ValueError, match="at least two"):
        register_source("c")
