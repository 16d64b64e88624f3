"""Each kind of source, against the pictures that were put into it, and each mistake that has to be named."""

import gzip
import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from wellcond.data import DataSet, open_data
from wellcond.data.archives import expand_braces

SIZE = 16


def expected(file: Path) -> Tensor:
    """40 × 32 to 20 × 16, of which the middle 16 × 16."""
    image = Image.open(file).convert("RGB").resize((20, 16), Image.Resampling.BICUBIC).crop((2, 0, 18, 16))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def open_small(spec: str | Path, cache: Path, **settings) -> DataSet:
    return open_data(str(spec), image_size=SIZE, cache_dir=cache, **settings)


def check_photos(data: DataSet, tree: Path) -> None:
    """Every picture of the tree once, under its label, in both parts."""
    assert data.classes == ["china", "flower"]
    assert data.skipped == []
    for split, part in (("train", data.train), ("val", data.val)):
        truth = {(expected(file).numpy().tobytes(), file.parent.name) for file in tree.glob(f"{split}/*/*")}
        found = {
            (pixels.numpy().tobytes(), data.classes[label])
            for pixels, label in zip(part.pixels, part.labels.tolist(), strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        }
        assert found == truth
        assert len(part) == len(truth)


def pack(tree: Path, out: Path, split: str, form: str = "folders", shards: int = 1, gz: bool = False) -> None:
    """Archives of a tree's split: members split/CLASS/FILE, or KEY.png with KEY.cls."""
    out.mkdir(exist_ok=True)
    files = sorted(tree.glob(f"{split}/*/*"))
    for shard in range(shards):
        name = f"{split}.tar" if shards == 1 and not gz else f"{split}-{shard:03d}.tar" + ".gz" * gz
        with tarfile.open(out / name, "w:gz" if gz else "w") as archive:
            for file in files[shard::shards]:
                if form == "folders":
                    archive.add(file, f"{split}/{file.parent.name}/{file.name}")
                    continue
                key = f"{file.parent.name}_{file.stem}"
                archive.add(file, f"{key}.png")
                ending, text = {
                    "cls": ("cls", str(["china", "flower"].index(file.parent.name))),
                    "names": ("cls", file.parent.name),
                    "json": ("json", json.dumps({"label": file.parent.name, "width": 40})),
                }[form]
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))


# ---- class folders


@pytest.mark.parametrize("validation", ["val", "validation", "test"])
def test_class_folders(tmp_path: Path, make_tree, validation: str) -> None:
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


def test_gray_pictures_become_rgb(tmp_path: Path, make_tree) -> None:
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

    refused(tmp_path / "nowhere", "there is no such folder")
    refused(f"folder:{tmp_path / 'nowhere'}", "there is no folder .*nowhere; name one with train/CLASS/FILE")
    refused("folder:", "nothing after the colon")
    refused("cifar11:x", "unknown data 'cifar11:x'.*wds:PATTERN")
    tree = make_tree("file")
    refused(tree / "train" / "china" / "000.png", "is a file")
    refused(tree / "train", "needs train/ and one of val/.*it holds china/, flower/")

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
    with pytest.raises(ValueError, match="image_size is 0"):
        open_data("digits", image_size=0)


# ---- archives


def test_two_tars(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    for split in ("train", "val"):
        pack(tree, tmp_path / "tars", split)
    data = open_small(tmp_path / "tars", tmp_path / "cache")
    assert data.name == "tars"
    check_photos(data, tree)


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("form", ["folders", "names", "json"])
def test_shards(tmp_path: Path, make_tree, form: str, gz: bool) -> None:
    tree = make_tree()
    pack(tree, tmp_path / "shards", "train", form, shards=3, gz=gz)
    pack(tree, tmp_path / "shards", "val", form, shards=2, gz=gz)
    ending = ".tar.gz" if gz else ".tar"
    for number, pattern in enumerate(("", "/{train,val}-*" + ending, "/*-???" + ending)):
        check_photos(open_small(f"wds:{tmp_path}/shards{pattern}", tmp_path / f"cache{number}"), tree)
    check_photos(open_small(tmp_path / "shards", tmp_path / "cache"), tree)
    assert not list((tmp_path / "cache").rglob("*.tar"))  # what was unpacked is gone


def test_shards_with_numbers(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    for split in ("train", "val"):
        pack(tree, tmp_path / "shards", split, "cls", shards=2)
    data = open_small(f"wds:{tmp_path}/shards/{{train,val}}-{{000..001}}.tar", tmp_path / "cache")
    assert data.classes == ["0", "1"]
    assert data.train.labels.bincount().tolist() == [6, 6]


def test_shards_that_webdataset_wrote(tmp_path: Path, make_tree) -> None:
    webdataset = pytest.importorskip("webdataset")
    tree = make_tree()
    for split in ("train", "val"):
        with webdataset.TarWriter(str(tmp_path / f"{split}-000.tar")) as writer:
            for number, file in enumerate(sorted(tree.glob(f"{split}/*/*"))):
                writer.write({"__key__": f"{number:06d}", "png": file.read_bytes(), "cls": file.parent.name})
    check_photos(open_small(f"wds:{tmp_path}/*.tar", tmp_path / "cache"), tree)


def test_a_damaged_archive_gives_what_comes_before(tmp_path: Path, make_tree) -> None:
    tree = make_tree(suffix=".png")
    for split in ("train", "val"):
        pack(tree, tmp_path / "shards", split, "names", shards=2, gz=split == "train")
    bad = tmp_path / "shards" / "train-001.tar.gz"
    bad.write_bytes(bad.read_bytes()[:-3000])
    data = open_small(tmp_path / "shards", tmp_path / "cache")
    assert 6 <= len(data.train) < 12
    assert any("train-001.tar.gz" in name for name, _ in data.skipped)


def test_mistakes_in_archives(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    pack(tree, tmp_path / "half", "train", shards=2)
    with pytest.raises(ValueError, match=r"no val shards in .*\{train,val\}"):
        open_small(f"wds:{tmp_path}/half", tmp_path / "cache")
    with pytest.raises(ValueError, match=r"there is no shard .*train-002.tar"):
        open_small(f"wds:{tmp_path}/half/train-{{000..002}}.tar", tmp_path / "cache")

    def shards(name: str, members: dict[str, bytes]) -> str:
        folder = tmp_path / name
        pack(tree, folder, "val", "cls", shards=2)
        with tarfile.open(folder / "train-0.tar", "w") as archive:
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return f"wds:{folder}"

    picture = (tree / "train" / "china" / "000.png").read_bytes()
    for name, members, says in (
        ("unlabelled", {"a.png": picture}, "a.png in .* has no label: put a.cls beside it"),
        ("empty", {"a.png": picture, "a.cls": b""}, "which is no label"),
        ("gap", {"a.png": picture, "a.cls": b"0", "b.png": picture, "b.cls": b"2"}, "but not in"),
        ("json", {"a.png": picture, "a.json": b"{"}, "a.json is no JSON"),
        ("nothing", {"a.txt": b"0"}, "no images in the train archives"),
    ):
        with pytest.raises(ValueError, match=says):
            open_small(shards(name, members), tmp_path / "cache")
    junk = tmp_path / "junk"
    shutil.copytree(tmp_path / "nothing", junk)
    (junk / "train-0.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(ValueError, match=r"no images in the train archives .*train-0.tar"):
        open_small(junk, tmp_path / "cache")


def test_a_class_number_without_images(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    for split in ("train", "val"):
        (tree / split / "flower").rename(tree / split / "2")
        (tree / split / "china").rename(tree / split / "0")
        pack(tree, tmp_path / "tars", split)
    with pytest.raises(ValueError, match="numbers from 0 to 2, but none is 1"):
        open_small(tmp_path / "tars", tmp_path / "cache")


def test_braces() -> None:
    assert expand_braces("a") == ["a"]
    assert expand_braces("{x,y}-{08..10}.tar") == [f"{a}-{b}.tar" for a in "xy" for b in ("08", "09", "10")]


# ---- CIFAR


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


# ---- the hub


def test_a_folder_through_the_hubs_reader(tmp_path: Path, make_tree) -> None:
    pytest.importorskip("datasets")
    tree = make_tree()
    data = open_small(f"hf:{tree}", tmp_path / "cache")
    check_photos(data, tree)


def test_the_hub_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'wellcond\[hf\]'"):
        open_small("hf:uoft-cs/cifar10", tmp_path / "cache")


def test_gzip_of_something_else(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    pack(tree, tmp_path / "shards", "val", "names", shards=2, gz=True)
    with gzip.open(tmp_path / "shards" / "train-0.tar.gz", "wb") as file:
        file.write(b"no archive" * 100)
    with pytest.raises(ValueError, match="no images in the train archives"):
        open_small(tmp_path / "shards", tmp_path / "cache")
