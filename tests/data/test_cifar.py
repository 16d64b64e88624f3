import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wellcond.data import open_data


def write_cifar(folder: Path, photos: dict[str, Image.Image], **changes) -> np.ndarray:
    """Six files in the form of CIFAR-10's python version, four pictures each; returns the pictures."""
    folder.mkdir(parents=True)
    photo = np.array(photos["flower"])
    pictures = np.stack([photo[10 * i : 10 * i + 32, 20 * i : 20 * i + 32] for i in range(24)])
    rows = pictures.transpose(0, 3, 1, 2).reshape(24, -1)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        batch = {"data": rows[4 * number : 4 * number + 4], "labels": [0, 1, 2, 1], "batch_label": name, **changes}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["frog", "cat", "ship"]}, protocol=2))
    return pictures


def test_cifar(tmp_path: Path, photos) -> None:
    pictures = write_cifar(tmp_path / "data" / "cifar-10-batches-py", photos)
    for place in ("data", "data/cifar-10-batches-py"):
        data = open_data(f"cifar10:{tmp_path / place}", image_size=32, cache_dir=tmp_path / "cache")
        assert data.classes == ["frog", "cat", "ship"]
        assert torch.equal(data.train.pixels, torch.from_numpy(pictures[:20]).permute(0, 3, 1, 2))  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(data.val.pixels, torch.from_numpy(pictures[20:]).permute(0, 3, 1, 2))  # pyright: ignore[reportAttributeAccessIssue]
        assert data.train.labels.tolist() == [0, 1, 2, 1] * 5


def test_cifar_as_torchvision_reads_it(tmp_path: Path, photos, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    write_cifar(tmp_path / "cifar-10-batches-py", photos)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)  # of the real files' sums
    theirs = CIFAR10(tmp_path)
    ours = open_data(f"cifar10:{tmp_path}", image_size=32, cache_dir=tmp_path / "cache")
    assert np.array_equal(ours.train.pixels.permute(0, 2, 3, 1).numpy(), theirs.data)  # pyright: ignore[reportAttributeAccessIssue]
    assert (ours.train.labels.tolist(), ours.classes) == (theirs.targets, theirs.classes)


class _Harm:
    def __reduce__(self):
        return Path.touch, (Path("harm_done"),)


def test_mistakes_in_cifar(tmp_path: Path, photos, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, changes, says in (
        ("long", {"labels": [0, 1, 2]}, "4 images but 3 labels"),
        ("high", {"labels": [0, 1, 2, 3]}, "run from 0 to 3, but there are 3 classes"),
        ("empty", {"labels": [0, 0, 1, 1]}, "no image of 1 of the 3 classes.*'ship'"),
        ("wide", {"data": np.zeros((4, 100), np.uint8)}, "CIFAR has uint8 rows of 3072"),
        ("harm", {"extra": _Harm()}, "neither an array nor a plain value"),
    ):
        write_cifar(tmp_path / name, photos, **changes)
        with pytest.raises(ValueError, match=says):
            open_data(f"cifar10:{tmp_path / name}", image_size=32, cache_dir=tmp_path / "cache")
    assert not Path("harm_done").exists()
    with pytest.raises(ValueError, match="has no train; cifar100 needs the python version"):
        open_data(f"cifar100:{tmp_path}", image_size=32, cache_dir=tmp_path / "cache")
    cut = tmp_path / "long" / "batches.meta"
    cut.write_bytes(cut.read_bytes()[:20])
    with pytest.raises(ValueError, match="cannot be read as CIFAR"):
        open_data(f"cifar10:{tmp_path / 'long'}", image_size=32, cache_dir=tmp_path / "cache")
