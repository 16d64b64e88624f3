"""Images for measuring: every kind of file, evenly over the classes, and a broken one is named and replaced."""

import io
import os
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from sklearn.datasets import load_sample_image
from torch import Tensor

from wellcond.data import read_images, sample_images
from wellcond.data.files import SUFFIXES

SIDE = 16


def to_tensor(image: Image.Image) -> Tensor:
    """8-bit RGB, exactly."""
    assert image.mode == "RGB"
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resized(image: Image.Image) -> Tensor:
    return to_tensor(image.resize((SIDE, SIDE)))


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    return Image.fromarray(load_sample_image("china.jpg")).crop((200, 100, 232, 124))  # 32 × 24: not square


def read_one(folder: Path, transform=to_tensor) -> Tensor:
    return read_images(folder, transform).images[0]


def save_many(folder: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (4, 4), (index, 0, 0)).save(folder / name / f"{index}.png")


# ---- which files


def test_every_suffix_in_any_case_at_any_depth(tmp_path: Path, photograph: Image.Image) -> None:
    for index, suffix in enumerate(SUFFIXES):
        place = tmp_path.joinpath(*"abcdefg"[:index])
        place.mkdir(exist_ok=True)
        photograph.save(place / f"photo{suffix.upper() if index % 2 else suffix}")
    (tmp_path / "labels.csv").write_text("photo.jpg,3")
    (tmp_path / "._photo.jpg").write_bytes(b"resource fork")
    (tmp_path / ".thumbnails").mkdir()
    photograph.save(tmp_path / ".thumbnails" / "small.png")
    sample = read_images(tmp_path, to_tensor)
    assert len(sample.names) == sample.found == len(SUFFIXES)
    assert sample.images.shape == (len(SUFFIXES), 3, 24, 32)
    assert sample.skipped == []
    assert sample.source == tmp_path.name
    for name, image in zip(sample.names, sample.images, strict=True):
        if name.lower().endswith((".png", ".bmp", ".tif", ".tiff")):
            assert torch.equal(image, to_tensor(photograph))  # each tensor belongs to its name


def test_classes_share_the_sample(tmp_path: Path) -> None:
    save_many(tmp_path, {"train/cat": 40, "train/dog": 3, "val/cat": 40})
    sample = read_images(tmp_path, to_tensor, limit=13)
    assert Counter(name.rpartition("/")[0] for name in sample.names) == {"train/cat": 5, "train/dog": 3, "val/cat": 5}
    assert len(set(sample.names)) == 13
    assert sample.found == 83
    assert len(read_images(tmp_path, to_tensor, limit=1000).names) == 83


def test_the_seed_alone_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_many(tmp_path, {"a": 20, "b": 20, "c": 20})
    first = read_images(tmp_path, to_tensor, limit=6, seed=1)
    walk = os.walk

    def backwards(*args, **kwargs):  # file systems list in an order of their own
        for here, folders, names in walk(*args, **kwargs):
            yield here, folders, names[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    again = read_images(tmp_path, to_tensor, limit=6, seed=1)
    assert again.names == first.names
    assert torch.equal(again.images, first.images)
    assert {tuple(read_images(tmp_path, to_tensor, limit=6, seed=seed).names) for seed in range(5)} != {
        tuple(first.names)
    }


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    save_many(tmp_path / "elsewhere", {"cat": 3})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    (tmp_path / "data" / "up").symlink_to(tmp_path / "data")
    assert sorted(read_images(tmp_path / "data", to_tensor).names) == ["cat/0.png", "cat/1.png", "cat/2.png"]


# ---- what becomes of their pixels


def test_gray_cmyk_and_palette(tmp_path: Path, photograph: Image.Image) -> None:
    for mode in ("L", "1", "P"):
        folder = tmp_path / mode
        folder.mkdir()
        photograph.convert(mode).save(folder / "a.png")
        assert torch.equal(read_one(folder), to_tensor(photograph.convert(mode).convert("RGB")))
    (tmp_path / "CMYK").mkdir()
    photograph.convert("CMYK").save(tmp_path / "CMYK" / "a.tif")
    assert torch.equal(read_one(tmp_path / "CMYK"), to_tensor(photograph))
    (tmp_path / "JPEG").mkdir()
    photograph.convert("CMYK").save(tmp_path / "JPEG" / "a.jpg", quality=95)
    close = read_one(tmp_path / "JPEG").double() - to_tensor(photograph).double()
    assert close.abs().mean() < 6  # a negative would be a hundred away


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_whatever_hides_below(tmp_path: Path, photograph: Image.Image, mode: str) -> None:
    if mode == "P":
        image = photograph.quantize(8)
        image.info["transparency"] = image.getpixel((0, 0))
        clear = np.asarray(image) == image.getpixel((0, 0))
        shown = np.array(image.convert("RGB"))
        image.save(tmp_path / "a.png", transparency=image.info["transparency"])
    else:
        image = photograph.convert(mode)
        alpha = Image.new("L", image.size, 255)
        alpha.paste(0, (0, 0, 10, 10))
        image.putalpha(alpha)
        clear = np.asarray(alpha) == 0
        shown = np.array(photograph.convert("L" if mode == "LA" else "RGB").convert("RGB"))
        image.save(tmp_path / "a.png")
    shown[clear] = 255
    assert torch.equal(read_one(tmp_path), torch.from_numpy(shown).permute(2, 0, 1))


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, photograph: Image.Image, suffix: str) -> None:
    gray = np.asarray(photograph.convert("L"))
    Image.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / f"a{suffix}")
    assert torch.equal(read_one(tmp_path), to_tensor(photograph.convert("L").convert("RGB")))


def test_floats_and_numbers_of_no_known_range(tmp_path: Path, photograph: Image.Image) -> None:
    gray = np.asarray(photograph.convert("L"))
    Image.fromarray((gray / 255).astype(np.float32)).save(tmp_path / "a.tif")
    assert torch.equal(read_one(tmp_path), to_tensor(photograph.convert("L").convert("RGB")))
    Image.fromarray(gray.astype(np.float32) - 100).save(tmp_path / "elevation.tif")
    ((name, why),) = read_images(tmp_path, to_tensor).skipped
    assert name == "elevation.tif"
    assert "no known range" in why


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, photograph: Image.Image, orientation: int) -> None:
    turns = {
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    turn = turns[orientation]  # how the camera was held: what the file stores for the scene before it
    stored = photograph if turn is None else photograph.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    assert torch.equal(read_one(tmp_path), to_tensor(photograph))


# ---- what cannot be read


def cut(image: Image.Image, file: Path, share: float = 0.6) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format=Image.registered_extensions()[file.suffix.lower()])
    file.write_bytes(buffer.getvalue()[: int(len(buffer.getvalue()) * share)])


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp", ".tif"])
def test_a_truncated_file_is_named_and_another_takes_its_place(
    tmp_path: Path, photograph: Image.Image, suffix: str
) -> None:
    for index in range(3):
        photograph.save(tmp_path / f"{index}.png")
        cut(photograph, tmp_path / f"bad{index}{suffix}")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    sample = read_images(tmp_path, resized, limit=3)
    assert sorted(sample.names) == ["0.png", "1.png", "2.png"]
    every = read_images(tmp_path, resized)
    assert {name for name, _ in every.skipped} == {*(f"bad{i}{suffix}" for i in range(3)), "empty.jpg", "page.jpg"}
    assert all(why and str(tmp_path) not in why for _, why in every.skipped)


def test_a_truncated_file_counts_as_one_whatever_pillow_was_told(
    tmp_path: Path, photograph: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    photograph.save(tmp_path / "whole.jpg")
    cut(photograph, tmp_path / "half.jpg", 0.9)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    sample = read_images(tmp_path, to_tensor)
    assert sample.names == ["whole.jpg"]
    assert "truncated" in sample.skipped[0][1]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True  # theirs again


def test_damaged_exif_data_do_not_cost_the_picture(tmp_path: Path, photograph: Image.Image) -> None:
    photograph.save(tmp_path / "a.jpg", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x05\x00\x12\x01")
    sample = read_images(tmp_path, to_tensor)
    assert (sample.names, sample.skipped) == (["a.jpg"], [])


def test_nothing_to_read_says_what_was_looked_for(tmp_path: Path, photograph: Image.Image) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        read_images(tmp_path / "nowhere", to_tensor)
    photograph.save(tmp_path / "one.png")
    with pytest.raises(ValueError, match=r"one\.png is a file; name the folder"):
        read_images(tmp_path / "one.png", to_tensor)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no images in .*empty or below \(looked for \.jpg, .*\.webp"):
        read_images(tmp_path / "empty", to_tensor)
    (tmp_path / "empty" / "shard-0.tar").touch()
    with pytest.raises(ValueError, match=r"holds shard-0\.tar: name one"):
        read_images(tmp_path / "empty", to_tensor)
    (tmp_path / "bad").mkdir()
    for index in range(5):
        cut(photograph, tmp_path / "bad" / f"{index}.jpg")
    with pytest.raises(ValueError, match=r"none of the 5 images in .*bad can be read \(\d\.jpg: .*runcated"):
        read_images(tmp_path / "bad", to_tensor)
    with pytest.raises(ValueError, match="limit is 0"):
        read_images(tmp_path, to_tensor, limit=0)


def test_mistakes_of_the_transform_are_not_laid_on_the_files(tmp_path: Path, photograph: Image.Image) -> None:
    photograph.save(tmp_path / "a.png")
    photograph.crop((0, 0, 8, 8)).save(tmp_path / "b.png")

    def fails(image: Image.Image) -> Tensor:
        raise RuntimeError("no such colour")

    with pytest.raises(ValueError, match=r"the transform failed on [ab]\.png .*no such colour"):
        read_images(tmp_path, fails)
    with pytest.raises(ValueError, match="crop to one size"):
        read_images(tmp_path, to_tensor)
    with pytest.raises(ValueError, match="gave a Image"):
        read_images(tmp_path, lambda image: image)


# ---- archives


@pytest.fixture
def archive(tmp_path: Path, photograph: Image.Image) -> Path:
    folder = tmp_path / "data"
    save_many(folder, {"cat": 5, "dog": 5})
    (folder / "cat" / "0.cls").write_text("3")
    cut(photograph, folder / "dog" / "half.jpg")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(folder, arcname=".")
    return tmp_path / "data.tar"


def test_an_archive_reads_like_its_folder(archive: Path) -> None:
    inside, outside = read_images(archive, resized), read_images(archive.with_suffix(""), resized)
    assert [name.removeprefix("./") for name in inside.names] == outside.names
    assert torch.equal(inside.images, outside.images)
    assert [why for _, why in inside.skipped] == [why for _, why in outside.skipped]


def test_a_damaged_archive(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2 - 700])
    sample = read_images(archive, to_tensor)
    assert 0 < len(sample.names) < 10
    assert any("ends too early" in why for _, why in sample.skipped)
    archive.write_bytes(b"noise" * 1000)
    with pytest.raises(ValueError, match=r"data\.tar is no uncompressed tar archive"):
        read_images(archive, to_tensor)
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as tar:
        tar.add(tmp_path / "data", arcname="data")
    with pytest.raises(ValueError, match=r"packed\.tar is no uncompressed tar archive .*unpack it"):
        read_images(tmp_path / "packed.tar", to_tensor)


# ---- no data at all


def test_embedded_crops() -> None:
    sample = sample_images(resized, limit=9)
    assert sample.images.shape == (9, 3, SIDE, SIDE)
    assert len(set(sample.names)) == 9
    assert sample.names[0] == "china.jpg[106:533,0:427]"
    assert Counter(name.partition("[")[0] for name in sample.names) == {"china.jpg": 5, "flower.jpg": 4}
    assert len({image.numpy().tobytes() for image in sample.images}) == 9
    assert torch.equal(sample_images(resized, limit=9).images, sample.images)
    assert not torch.equal(sample_images(resized, limit=9, seed=1).images, sample.images)
    whole = Image.fromarray(load_sample_image("china.jpg")).crop((106, 0, 533, 427))
    assert torch.equal(sample.images[0], resized(whole))
