import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wellcond.data import Augmentation, DataSet, ImageFiles, StreamBatches, StreamEvalBatches, eval_batches, open_data
from wellcond.data import train_batches as make_batches

HOW = Augmentation(scale_min=0.3, flip=0.5, auto_augment="rand-m9-mstd0.5-inc1", erasing=0.3, mixup=0.8, cutmix=1.0)


@pytest.fixture
def streamed(tmp_path: Path, make_tree) -> DataSet:
    return open_data(str(make_tree(train=13, val=5)), image_size=16, cache_dir=tmp_path / "cache", cache_limit=0)


def make(data: DataSet, how: Augmentation = HOW, **settings) -> StreamBatches:
    assert isinstance(data.train, ImageFiles)
    defaults = {"batch_size": 4, "seed": 0, "augmentation": how, "num_classes": 2, "workers": 0}
    return StreamBatches(data.train, **{**defaults, **settings})


def same(left, right) -> bool:
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


def test_an_epoch_goes_on_from_any_step_to_the_same_bits(streamed: DataSet) -> None:
    whole = list(make(streamed).epoch(1))
    assert len(whole) == 26 // 4
    images, labels = whole[0]
    assert (images.shape, images.dtype, labels.shape) == ((4, 3, 16, 16), torch.float32, (4, 2))
    for start in (0, 1, 5, 6):
        torch.manual_seed(start)
        random.seed(start)
        np.random.seed(start)  # noqa: NPY002
        assert same(make(streamed).epoch(1, start), whole[start:])
    assert not same(make(streamed).epoch(2), whole)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_change_nothing(streamed: DataSet) -> None:
    assert same(make(streamed, workers=2).epoch(0, 3), list(make(streamed).epoch(0))[3:])


def test_processes_share_one_order_and_its_draws(streamed: DataSet) -> None:
    ranks = [make(streamed, batch_size=2, rank=rank, world=2).epoch(1) for rank in range(2)]
    joined = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    assert same(joined, make(streamed).epoch(1))


def test_the_global_generators_are_left_alone(streamed: DataSet) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    list(make(streamed).epoch(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002


def test_each_image_has_a_crop_of_its_own(tmp_path: Path, make_tree) -> None:
    """Of files that are all the same picture, each comes out another."""
    tree = make_tree()
    picture = (tree / "train" / "china" / "000.png").read_bytes()
    for file in tree.rglob("*.png"):
        file.write_bytes(picture)
    data = open_data(str(tree), image_size=16, cache_dir=tmp_path / "cache", cache_limit=0)
    images, _ = next(make(data, Augmentation(scale_min=0.3), batch_size=12).epoch(0))
    assert len({image.numpy().tobytes() for image in images}) == 12
    plain, _ = next(make(data, Augmentation(), batch_size=12, interpolation="bicubic").epoch(0))
    assert len({image.numpy().tobytes() for image in plain}) == 1  # and nothing is varied unasked


def test_evaluation_is_what_the_cache_would_show(streamed: DataSet, tmp_path: Path) -> None:
    """Every image once over the ranks; with the whole image, the pixels are those of the cache."""
    cached = open_data(str(tmp_path / "photos"), image_size=16, cache_dir=tmp_path / "cache")
    assert isinstance(streamed.val, ImageFiles)
    found = [
        batch
        for rank in range(3)
        for batch in StreamEvalBatches(streamed.val, batch_size=2, rank=rank, world=3, workers=0, crop_pct=1.0)
    ]
    images, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = torch.cat([torch.arange(rank, 10, 3) for rank in range(3)])
    assert torch.equal(labels, cached.val.labels[order])
    pixels = (images * streamed.val.std[:, None, None] + streamed.val.mean[:, None, None]) * 255
    assert (pixels - cached.val.pixels[order]).abs().max() < 1e-2  # pyright: ignore[reportAttributeAccessIssue]


def test_a_corrupt_image_is_named_and_another_takes_its_place(streamed: DataSet, tmp_path: Path) -> None:
    for name in ("train/china/003.png", "val/flower/001.png"):
        file = tmp_path / "photos" / name
        file.write_bytes(file.read_bytes()[:300])
    batches = make(streamed, Augmentation(), batch_size=13)
    assert [len(labels) for _, labels in batches.epoch(0)] == [13, 13]
    list(batches.epoch(0))
    assert [name for name, _ in batches.skipped] == ["train/china/003.png"]  # once, however often it is met
    evaluated = eval_batches(streamed.val, batch_size=4, workers=0)
    assert sum(batch.count for batch in evaluated) == 9
    assert [name for name, _ in evaluated.skipped] == ["val/flower/001.png"]


def test_from_an_archive_by_function_with_a_holdout(tmp_path: Path, make_tree) -> None:
    import tarfile

    tree = make_tree()
    (tmp_path / "tars").mkdir()
    for split in ("train", "val"):
        with tarfile.open(tmp_path / "tars" / f"{split}.tar", "w") as archive:
            archive.add(tree / split, split)
    data = open_data(
        str(tmp_path / "tars"), image_size=16, cache_dir=tmp_path / "cache", cache_limit=0, holdout=1 / 3, seed=1
    )
    assert (len(data.train), len(data.val)) == (8, 4)
    batches = make_batches(data.train, batch_size=4, seed=0, augmentation=Augmentation(), num_classes=2, workers=0)
    assert [batch.count for batch in batches.epoch(0)] == [4, 4]
    assert isinstance(data.train, ImageFiles)
    for row in range(8):  # each is read from its place in the archive
        name = data.train.name(row)
        with Image.open(tree / name.removeprefix("train.tar:")) as image:
            assert data.train.read(row).tobytes() == image.tobytes()
        assert data.classes[int(data.train.labels[row])] in name


def test_compressed_shards_cannot_be_streamed(tmp_path: Path, make_tree) -> None:
    import tarfile

    tree = make_tree()
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar.gz", "w:gz") as archive:
            archive.add(tree / split, split)
    with pytest.raises(ValueError, match="unpack them"):
        open_data(f"wds:{tmp_path}/*.tar.gz", image_size=16, cache_dir=tmp_path / "cache", cache_limit=0)


def test_padding_is_for_cached_sets(streamed: DataSet) -> None:
    with pytest.raises(ValueError, match="cropped by scale_min: set padding=0"):
        make(streamed, Augmentation(padding=4))
