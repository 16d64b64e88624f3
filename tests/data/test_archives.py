import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from wellcond.data import DataSet, open_data
from wellcond.data.folders import expand_braces

SIZE = 16


def open_small(spec: str | Path, cache: Path, **settings) -> DataSet:
    return open_data(str(spec), image_size=SIZE, cache_dir=cache, **settings)


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


def test_two_tars(tmp_path: Path, make_tree, check_photos) -> None:
    tree = make_tree()
    for split in ("train", "val"):
        pack(tree, tmp_path / "tars", split)
    data = open_small(tmp_path / "tars", tmp_path / "cache")
    assert data.name == "tars"
    check_photos(data, tree)


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("form", ["folders", "names", "json"])
def test_shards(tmp_path: Path, make_tree, check_photos, form: str, gz: bool) -> None:
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


def test_shards_that_webdataset_wrote(tmp_path: Path, make_tree, check_photos) -> None:
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


def test_gzip_of_something_else(tmp_path: Path, make_tree) -> None:
    tree = make_tree()
    pack(tree, tmp_path / "shards", "val", "names", shards=2, gz=True)
    with gzip.open(tmp_path / "shards" / "train-0.tar.gz", "wb") as file:
        file.write(b"no archive" * 100)
    with pytest.raises(ValueError, match="no images in the train archives"):
        open_small(tmp_path / "shards", tmp_path / "cache")
