"""One odd file is named, skipped and counted, in folders and archives; nothing fills the memory or waits for ever."""

import gzip
import io
import os
import shutil
import socket
import struct
import tarfile
import tempfile
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wellcond.data import DataSet, StreamEvalBatches, open_data, read_images

LATIN = b"caf\xe9.png"  # as an old system wrote it


def open_small(spec: str | Path, cache: Path, **settings: Any) -> DataSet:
    return open_data(str(spec), image_size=16, cache_dir=cache, **settings)


def large_png(width: int, height: int) -> bytes:
    """Black, of one bit a pixel: 0.03 MB for 177 million of them."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer = zlib.compressobj(9)
    rows = [packer.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)]
    pixels = b"".join([*rows, packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


ODD = {
    "moving.GIF": "only .jpg, .jpeg, .png",
    "dangling.png": "it is a link to nowhere.png, which is not there",
    "loop.png": "Too many levels of symbolic links",
    "fifo.png": "it is a FIFO, not a file",
    "socket.png": "it is a socket, not a file",
    "device.png": "it is a device, not a file",
    "empty.png": "no image of a known format",
    "huge.webp": "it has 600,000,000 bytes",
    "bomb.png": "it has 13312 × 13312 pixels",
    r"caf\xe9.png": "its name is not UTF-8",
    "class": "it is a link to no-such-folder, which is not there",
}


@pytest.fixture
def odd_tree(make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tree with every odd thing in train/china; who waits for the FIFO is let go after a minute, and fails."""
    tree = make_tree()
    china = tree / "train" / "china"
    (china / "dangling.png").symlink_to("nowhere.png")
    (china / "loop.png").symlink_to("loop.png")
    (china / "device.png").symlink_to("/dev/zero")
    (china / "class").symlink_to("no-such-folder")
    (china / "empty.png").touch()
    for name in ("moving.GIF", "._moving.gif", "notes.txt"):  # only the first could be a picture
        (china / name).touch()
    (china / "folder.png").mkdir()
    shutil.copy(china / "000.png", china / "folder.png" / "inside.png")
    (china / "around").symlink_to("..")
    (china / "bomb.png").write_bytes(large_png(13312, 13312))
    with open(china / "huge.webp", "wb") as file:
        file.truncate(600_000_000)
    shutil.copy(os.fsencode(china / "000.png"), os.path.join(os.fsencode(china), LATIN))
    os.mkfifo(china / "fifo.png")
    with monkeypatch.context() as here:  # the path of a socket may not be long
        here.chdir(china)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("socket.png")
    let_go = threading.Timer(60, lambda: os.close(os.open(china / "fifo.png", os.O_WRONLY | os.O_NONBLOCK)))
    let_go.daemon = True
    let_go.start()
    yield tree
    let_go.cancel()
    listening.close()


def check_odd(skipped: list[tuple[str, str]], prefix: str) -> None:
    found = dict(skipped)
    assert found.keys() == {prefix + name for name in ODD}
    assert len(skipped) == len(ODD)
    for name, why in ODD.items():
        assert found[prefix + name].startswith(why), name


def test_odd_files_in_a_folder(odd_tree: Path, tmp_path: Path) -> None:
    for _ in range(2):  # built, and from the cache
        data = open_small(odd_tree, tmp_path / "cache")
        check_odd(data.skipped, "train/china/")
        assert data.train.labels.bincount().tolist() == [7, 6]
        assert data.classes == ["china", "flower"]
    os.unlink(odd_tree / "train" / "china" / "class")
    assert len(open_small(odd_tree, tmp_path / "cache").skipped) == len(ODD) - 1  # what is gone is not named again


def test_odd_files_are_streamed_past(odd_tree: Path, tmp_path: Path) -> None:
    data = open_small(odd_tree, tmp_path / "cache", cache_limit=0)
    batches: Any = StreamEvalBatches(data.train, batch_size=4, workers=0)  # pyright: ignore[reportArgumentType]
    assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [7, 6]
    check_odd([*data.skipped, *batches.skipped], "train/china/")


def test_odd_files_are_no_part_of_a_sample(odd_tree: Path) -> None:
    sample = read_images(odd_tree / "train", lambda image: torch.zeros(1))
    assert sorted(sample.names) == [
        *(f"china/00{number}.png" for number in range(6)), "china/folder.png/inside.png",
        *(f"flower/00{number}.png" for number in range(6)),
    ]  # fmt: skip
    check_odd(sample.skipped, "china/")


@pytest.mark.parametrize("whole", [False, True])
def test_what_nobody_may_read(photos: dict[str, Image.Image], whole: bool) -> None:
    """One folder of a class without permission is left out; a class without any other is named with the reason."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to others than root
        root = Path(name)
        for split in ("train", "val"):
            for label, photo in photos.items():
                (root / split / label / "inner").mkdir(parents=True)
                photo.crop((0, 0, 40, 32)).save(root / split / label / "inner" / "0.png")
                photo.crop((0, 0, 40, 32)).save(root / split / label / "1.png")
        closed = root / "train" / "china" / ("" if whole else "inner")
        (root / "cache").mkdir()
        for folder in (root, root / "cache"):
            folder.chmod(0o777)
        (root / "train" / "flower" / "1.png").chmod(0)
        closed.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            if whole:
                says = r"train/china holds no image \(train/china cannot be read: Permission denied\)"
                with pytest.raises(ValueError, match=says):
                    open_small(root, root / "cache")
            else:
                data = open_small(root, root / "cache")
                denied = {"train/china/inner": "Permission denied", "train/flower/1.png": "Permission denied"}
                assert dict(data.skipped) == denied
                assert len(data.train) == 2
        finally:
            os.seteuid(user)
            closed.chmod(0o700)


def test_a_class_folder_that_is_not_utf8_is_named(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    """A whole class is not left out in silence."""
    tree = make_tree()
    for split in ("train", "val"):
        os.rename(os.fsencode(tree / split / "china"), os.path.join(os.fsencode(tree / split), b"caf\xe9"))
    with pytest.raises(ValueError, match=r"class folder caf\\xe9 in .*train is not UTF-8; rename it"):
        open_small(tree, tmp_path / "cache")


def test_a_set_in_a_folder_that_is_not_utf8(make_tree: Callable[..., Path], check_photos: Any, tmp_path: Path) -> None:
    tree = make_tree()
    odd = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9")))
    tree.rename(odd)
    for _ in range(2):
        data = open_small(odd, tmp_path / "cache")
        check_photos(data, odd)
        assert data.name == r"caf\xe9"


@pytest.mark.parametrize("form", ["folders", "names"])
def test_classes_with_the_names_of_numbers(make_tree: Callable[..., Path], tmp_path: Path, form: str) -> None:
    tree = make_tree()
    for split in ("train", "val"):
        (tree / split / "china").rename(tree / split / "Infinity")
        (tree / split / "flower").rename(tree / split / "NaN")
        if form == "names":
            with tarfile.open(tmp_path / f"{split}-0.tar", "w") as archive:
                for file in sorted(tree.glob(f"{split}/*/*")):
                    archive.add(file, f"{file.parent.name}_{file.stem}.png")
                    add(archive, f"{file.parent.name}_{file.stem}.cls", file.parent.name.encode())
    spec = tree if form == "folders" else f"wds:{tmp_path}"
    for _ in range(2):
        data = open_small(spec, tmp_path / "cache")
        assert data.classes == ["Infinity", "NaN"]
        assert data.train.labels.bincount().tolist() == [6, 6]


# ---- archives


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(content))


def add_hole(path: Path, info: tarfile.TarInfo, size: int) -> None:
    """A member of zeros, which take no room on the disk, after the others."""
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    info.size = size
    with open(path, "r+b") as file:
        file.seek(last.offset_data + -(-last.size // 512) * 512)
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(file.tell() + -(-size // 512) * 512 + 1024)


Fill = Callable[[tarfile.TarFile, bytes], None]


@pytest.fixture
def make_archives(make_tree: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """train.tar and val.tar of two classes, and what `fill` adds to train.tar."""
    tree = make_tree()

    def make(fill: Fill) -> Path:
        folder = tmp_path / "tars"
        folder.mkdir()
        for split in ("train", "val"):
            with tarfile.open(folder / f"{split}.tar", "w", format=tarfile.GNU_FORMAT) as archive:
                files = sorted(tree.glob(f"{split}/*/*"))
                for file in files:
                    archive.add(file, f"{file.parent.name}/{file.name}")
                if split == "train":
                    fill(archive, files[0].read_bytes())
        return folder

    return make


def test_odd_members_of_an_archive(make_archives: Callable[..., Path], tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile, picture: bytes) -> None:
        add(archive, "china/" + os.fsdecode(LATIN), picture)
        add(archive, "china/link.png", type=tarfile.SYMTYPE, linkname="000.png")
        add(archive, "china/fifo.png", type=tarfile.FIFOTYPE)
        add(archive, "china/same.png", type=tarfile.LNKTYPE, linkname="china/000.png")  # as tar stores a file twice
        add(archive, "china/lost.png", type=tarfile.LNKTYPE, linkname="elsewhere.png")
        add(archive, "china/bomb.png", large_png(13312, 13312))
        add(archive, "china/moving.gif", picture)
        add(archive, "china/._moving.gif", picture)
        add(archive, "../china/above.png", picture)
        add(archive, "flower/../china/beside.png", picture)
        add(archive, "./../../train/china/far.png", picture)

    folder = make_archives(fill)
    files = [r"caf\xe9.png", "link.png", "fifo.png", "lost.png", "bomb.png", "moving.gif"]
    names = [f"china/{file}" for file in files]
    data = open_small(folder, tmp_path / "cache")
    assert data.classes == ["china", "flower"]
    assert data.train.labels.bincount().tolist() == [6 + 4, 6]
    assert {name for name, _ in data.skipped} == {f"train.tar:{name}" for name in names}
    assert len(data.skipped) == len(names)
    sample = read_images(folder / "train.tar", lambda image: torch.zeros(1))
    assert len(sample.names) == 16
    assert {name.removeprefix("train.tar:") for name, _ in sample.skipped} == set(names)


def test_a_class_folder_in_an_archive_that_is_not_utf8(make_archives: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_archives(lambda archive, picture: add(archive, os.fsdecode(b"caf\xe9/1.png"), picture))
    with pytest.raises(ValueError, match=r"class folder caf\\xe9 in .*train.tar is not UTF-8"):
        open_small(folder, tmp_path / "cache")


def test_a_folder_above_is_no_class(make_archives: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_archives(lambda archive, picture: add(archive, "../loose.png", picture))
    with pytest.raises(ValueError, match=r"\.\./loose.png in .* has no label"):
        open_small(folder, tmp_path / "cache")


def test_a_header_as_long_as_an_archive(make_archives: Callable[..., Path], tmp_path: Path) -> None:
    """A member's name of 300 MB: it stands in a header, which tarfile would read whole."""
    folder = make_archives(lambda archive, picture: None)
    header = tarfile.TarInfo("././@LongLink")
    header.type = tarfile.GNUTYPE_LONGNAME
    add_hole(folder / "train.tar", header, 300_000_000)
    tracemalloc.start()
    data = open_small(folder, tmp_path / "cache")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000
    assert data.train.labels.bincount().tolist() == [6, 6]
    assert [(name, "header of 300000256 bytes" in why) for name, why in data.skipped] == [("train.tar", True)]


def test_odd_shards_are_named(make_archives: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_archives(lambda archive, picture: None)
    for split in ("train", "val"):
        (folder / f"{split}.tar").rename(folder / f"{split}-0.tar")
    (folder / "train-1.tar").symlink_to("nowhere.tar")
    os.mkfifo(folder / "train-2.tar.gz")
    (folder / "train-3.tar").mkdir()
    (folder / "train-4.tar.gz").write_bytes(b"no gzip")
    for spec in (folder, f"wds:{folder}/*"):
        data = open_small(spec, tmp_path / "cache")
        assert data.train.labels.bincount().tolist() == [6, 6]
        names = ["train-1.tar", "train-2.tar.gz", "train-4.tar.gz"] + ["train-3.tar"] * (spec != folder)
        assert {name for name, _ in data.skipped} == set(names)


# ---- bombs


def test_an_archive_that_unpacks_to_a_thousand_times_its_size(
    make_archives: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_archives(lambda archive, picture: None)
    with gzip.open(folder / "train-0.tar.gz", "wb", compresslevel=9) as packed:
        packed.write((folder / "train.tar").read_bytes()[:-10240])
        for _ in range(100):
            packed.write(bytes(1 << 20))
    (folder / "val.tar").rename(folder / "val-0.tar")
    (folder / "train.tar").unlink()
    with pytest.raises(ValueError, match=r"train-0.tar.gz unpacks to more than 100 times its size.*gunzip it"):
        open_small(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(".*.tmp"))


@pytest.mark.parametrize(
    ("ending", "content", "says"),
    [
        ("cls", 600_000_000, "a.cls has 600,000,000 bytes.* is no label"),
        ("json", 600_000_000, "a.json has 600,000,000 bytes"),
        ("json", b"[" * 100_000, "a.json is no JSON"),
        ("json", b'{"label": ["china"]}', "is no label"),
        ("cls", b"caf\xe9", "a.cls holds b'caf.*not UTF-8"),
        ("cls", b"9" * 2000, "a.cls has 2,000 bytes"),
    ],
)
def test_labels_that_are_none(
    make_archives: Callable[..., Path], tmp_path: Path, ending: str, content: bytes | int, says: str
) -> None:
    def fill(archive: tarfile.TarFile, picture: bytes) -> None:
        add(archive, "china/a.png", picture)
        if isinstance(content, bytes):
            add(archive, f"china/a.{ending}", content)

    folder = make_archives(fill)
    if isinstance(content, int):
        add_hole(folder / "train.tar", tarfile.TarInfo(f"china/a.{ending}"), content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=says):
        open_small(folder, tmp_path / "cache")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000


def test_labels_far_apart(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    """The numbers between them are not listed to find the first that is missing."""
    picture = (make_tree() / "train" / "china" / "000.png").read_bytes()
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as archive:
            for label in ("0", "1", "50000000"):
                add(archive, f"{label}/a.png", picture)
    tracemalloc.start()
    with pytest.raises(ValueError, match="numbers from 0 to 50000000, but none is 2"):
        open_small(tmp_path, tmp_path / "cache")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000
