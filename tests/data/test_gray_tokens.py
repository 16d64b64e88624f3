from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wellcond.data import open_data
from wellcond.data.gray_tokens import to_gray


def test_gray_is_rounded_as_tensorflow_does() -> None:
    colours = [[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 200, 77], [1, 1, 1]]
    pixels = torch.tensor(colours, dtype=torch.uint8)[:, :, None, None]
    # int(0.2989 r + 0.5870 g + 0.1140 b) · 255.5 / 255, by hand
    truth = [int((0.2989 * r + 0.5870 * g + 0.1140 * b) * 255.5 / 255) for r, g, b in colours]
    assert truth == [0, 255, 76, 149, 29, 129, 1]
    assert to_gray(pixels).flatten().tolist() == truth


@pytest.mark.parametrize("spec", ["lra_image:{}", "lra_image:folder:{}"])
def test_cifar_in_a_folder(tmp_path: Path, spec: str) -> None:
    draw = np.random.default_rng(0)
    pictures: dict[str, list[bytes]] = {"train": [], "val": []}
    for split, count in (("train", 20), ("val", 3)):
        for label in ("cat", "dog"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(256, size=(32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
                pictures[split].append(to_gray(torch.from_numpy(pixels).permute(2, 0, 1)[None]).numpy().tobytes())
    data: Any = open_data(spec.format(tmp_path), cache_dir=tmp_path / "cache", seed=3)
    assert data.classes == ["cat", "dog"]
    assert (len(data.train), len(data.val), len(data.test)) == (36, 4, 6)
    assert data.val.labels.bincount().tolist() == [2, 2]
    assert (data.train.length, data.train.vocab) == (1024, 256)
    found = [row.numpy().tobytes() for part in (data.train, data.val) for row in part.tokens]
    assert sorted(found) == sorted(pictures["train"])
    assert sorted(row.numpy().tobytes() for row in data.test.tokens) == sorted(pictures["val"])
    other: Any = open_data(spec.format(tmp_path), cache_dir=tmp_path / "cache", seed=4)
    assert other.val.content() == data.val.content()  # the split is the same whatever the training's seed


def test_what_the_files_are_called_makes_no_difference(tmp_path: Path) -> None:
    """Shards and folders give images in orders of their own; the split and the order are those of the pixels."""
    found: list[Any] = []
    for name in ("one", "other"):
        draw = np.random.default_rng(0)
        for split, label in ((split, label) for split in ("train", "val") for label in ("cat", "dog")):
            folder = tmp_path / name / split / label
            folder.mkdir(parents=True)
            for number in range(20):
                pixels = draw.integers(256, size=(32, 32), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number if name == 'one' else 99 - number}.png")
        found.append(open_data(f"lra_image:{tmp_path / name}", cache_dir=tmp_path / "cache"))
    one, other = found
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(one, part).tokens, getattr(other, part).tokens)
        assert torch.equal(getattr(one, part).labels, getattr(other, part).labels)
