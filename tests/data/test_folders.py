import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wellcond.data import DataSet, open_data

SIZE = 16


def open_small(spec: str | Path, cache: Path, **settings) -> DataSet:
    return open_data(str(spec), image_size=SIZE, cache_dir=cache, **settings)


@pytest.mark.parametrize("validation", ["val", "validation", "test"])
def test_class_folders(tmp_path: Path, make_tree, check_photos, validation: str) -> None:
    tree = make_tree()
    data = open_small(f"folder:{tree}", tmp_path / "cache")
    check_photos(data, tree)
    (tree / "val").rename(tree / validation)
    renamed = open_small(tree, tmp_path / "cache")
    assert data.name == renamed.name == "photos"
    assert torch.equal(renamed.val.pixels, data.val.pixels)  # pyright: ignore[reportAttributeAccessIssue]


def test_images_of_the_right_size_are_kept_to_the_bit(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    for file in tree.rglob("*.png"):
        Image.open(file).crop((0, 0, 32, 32)).save(file)
    data = open_data(str(tree), image_size=32, cache_dir=tmp_path / "cache")
    truth = {np.array(Image.open(file)).transpose(2, 0, 1).tobytes() for file in (tree / "train").rglob("*.png")}
    assert {pixels.numpy().tobytes() for pixels in data.train.pixels} == truth  # pyright: ignore[reportAttributeAccessIssue]


def test_gray_pictures_become_rgb(tmp_path: Path, make_tree, check_photos) -> None:
    tree = make_tree()
    file = tree / "train" / "china" / "000.png"
    Image.open(file).convert("L").save(file)
    data = open_small(tree, tmp_path / "cache")
    check_photos(data, tree)
    gray = data.train.pixels[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(gray[0], gray[1])


def test_mean_and_deviation_are_the_training_parts(tmp_path: Path, make_tree) -> None:
    data = open_small(make_tree(), tmp_path / "cache")
    truth = data.train.pixels.double() / 255  # pyright: ignore[reportAttributeAccessIssue]
    for part in (data.train, data.val):
        torch.testing.assert_close(part.mean.double(), truth.mean((0, 2, 3)), rtol=1e-6, atol=0)
        torch.testing.assert_close(part.std.double(), truth.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)


def test_a_corrupt_image_is_named_and_skipped(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    bad = tree / "train" / "flower" / "002.png"
    bad.write_bytes(bad.read_bytes()[:500])
    (tree / "val" / "china" / "page.jpg").write_text("<html>not found</html>")
    for _ in range(2):  # built, and from the cache
        data = open_small(tree, tmp_path / "cache")
        assert [name for name, _ in data.skipped] == ["train/flower/002.png", "val/china/page.jpg"]
        assert all(why and str(tmp_path) not in why for _, why in data.skipped)
        assert (len(data.train), len(data.val)) == (11, 6)
        assert data.train.labels.bincount().tolist() == [6, 5]


def test_a_holdout_of_files(tmp_path: Path, make_tree) -> None:
    data = open_small(make_tree(), tmp_path / "cache", holdout=1 / 3)
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (8, 4, 6)
    assert data.val.labels.bincount().tolist() == [2, 2]


def test_mistakes_in_folders(tmp_path: Path, make_tree) -> None:
    cache = tmp_path / "cache"

    def refused(spec: object, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            open_small(str(spec), cache)

    tree = make_tree("file")
    refused(tree / "train" / "china" / "000.png", "is a file")
    refused(tree / "train" / "china", r"needs train/ and one of val/.*it holds 000\.png, 001\.png")

    alone = tmp_path / "alone"
    shutil.copytree(tree / "train" / "china", alone / "china")
    refused(alone, "images of one class only, china/; two are needed")

    tree = make_tree("empty_class")
    (tree / "train" / "cathedral").mkdir()
    refused(tree, r"train.cathedral holds no image; add some")

    tree = make_tree("differing")
    shutil.move(tree / "val" / "flower", tree / "val" / "tulip")
    refused(tree, "the classes 'flower' are in train but not in val")

    tree = make_tree("extra")
    shutil.copytree(tree / "val" / "flower", tree / "val" / "tulip")
    refused(tree, "the classes 'tulip' are in val but not in train")

    tree = make_tree("loose")
    shutil.copy(tree / "val" / "flower" / "000.png", tree / "val" / "loose.png")
    refused(tree, r"loose.png lies in no class folder")

    tree = make_tree("none")
    for file in (tree / "val").rglob("*.png"):
        file.unlink()
    refused(tree, r"no images in .*val or below \(looked for .jpg")

    tree = make_tree("unreadable")
    for file in (tree / "train" / "china").iterdir():
        file.write_bytes(b"nothing")
    refused(tree, "no image of 1 of the 2 classes.*6 files could not be read, such as train/china/000.png.*'china'")
