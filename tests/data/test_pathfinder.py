from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from wellcond.data import open_data, pathfinder
from wellcond.data.pathfinder import draw_image, draw_images

# Share of pixels that are not 0, and curves of distractors times their dashes, by the length of the targets.
LEVELS = {14: 0.34, 9: 0.267, 6: 0.225}


@pytest.fixture(scope="module")
def drawn() -> dict[int, Any]:
    return {contour: draw_images(seed=3, first=0, count=120, contour=contour) for contour in LEVELS}


@pytest.mark.parametrize("contour", LEVELS)
def test_the_share_of_pixels_that_are_not_black(drawn: dict[int, Any], contour: int) -> None:
    pixels = drawn[contour].tokens.reshape(-1, 1024)
    shares = (pixels > 0).mean(1)
    assert abs(shares.mean() - LEVELS[contour]) < 4 * shares.std() / len(shares) ** 0.5 + 0.004
    assert (pixels.min(1) == 0).all()
    assert (pixels.max(1) == 255).all()


def test_half_of_the_labels_are_1() -> None:
    # The label is the first number that an image draws.
    labels = [pathfinder._drawing(0, index)() < 0.5 for index in range(2000)]
    assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / 2000**0.5


@pytest.mark.parametrize("index", range(12))
def test_the_label_says_whether_both_markers_are_on_one_curve(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tips: list[Any] = []
    marked: list[tuple[int, int]] = []
    targets, marker = pathfinder._targets, pathfinder._marker

    def watched(*given: Any) -> Any:
        found = targets(*given)
        tips[:] = [] if found is None else found[2]
        return found

    monkeypatch.setattr(pathfinder, "_targets", watched)
    monkeypatch.setattr(pathfinder, "_marker", lambda y, x: marked.append((y, x)) or marker(y, x))
    pixels, label = draw_image(seed=1, index=index, contour=9)
    begin, end = marked
    (origin,) = [number for number in (0, 1) if tips[number][0] == begin]
    assert end == tips[origin if label else 1 - origin][1]
    assert np.hypot(*np.subtract(tips[0][0], tips[1][0])) == pytest.approx(7, abs=1)  # where the targets begin
    image = pixels.reshape(32, 32)
    for y, x in marked:  # the brightest part of a marker, and what is left of 255 where dashes are brighter
        assert image[y, x] >= 100


def test_targets_have_their_dashes_and_keep_apart() -> None:
    draw = pathfinder._drawing(5, 5)
    found = None
    while found is None:
        found = pathfinder._targets(14, draw)
    pictures, mask, _ = found
    assert len(pictures) == 28
    assert mask.max() <= 1
    first, second = pictures[0::2], pictures[1::2]
    lines = [np.zeros(1024), np.zeros(1024)]
    for image, own in zip(lines, (first, second), strict=True):
        for picture in own:
            image[picture.line_at] = np.maximum(image[picture.line_at], picture.line)
    assert np.minimum(*lines).max() < 0.6  # no pixel is in the middle of dashes of both


def test_an_image_depends_on_seed_and_number_alone() -> None:
    whole = draw_images(seed=0, first=0, count=6, contour=6)
    part = draw_images(seed=0, first=3, count=3, contour=6)
    assert np.array_equal(whole.tokens[3 * 1024 :], part.tokens)
    assert not np.array_equal(draw_image(seed=1, index=3, contour=6)[0], draw_image(seed=0, index=3, contour=6)[0])


def test_the_set(tmp_path: Path) -> None:
    options = {"samples": 60, "contour": 6}
    told: list[Any] = []
    data = open_data("lra_pathfinder", cache_dir=tmp_path, options=options, progress=lambda *what: told.append(what))
    assert told[-1] == ("generating lra_pathfinder", 60, 60)
    assert (len(data.train), len(data.val), len(data.test)) == (48, 6, 6)  # pyright: ignore[reportArgumentType]
    assert data.train.vocab == 512  # pyright: ignore[reportAttributeAccessIssue]
    first, label = draw_image(seed=0, index=0, contour=6)
    assert data.train.tokens[0].tolist() == first.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    assert data.train.labels[0] == label
    (folder,) = tmp_path.iterdir()
    per_image = sum(file.stat().st_size for file in folder.glob("*.npz")) / 100  # 60 are made of two files of 50
    assert per_image < 300
    again = open_data("lra_pathfinder", cache_dir=tmp_path, seed=5, options={**options, "mask": "fixed"})
    assert again.train.content() == data.train.content()  # whatever the training's seed
    assert again.train.unpadded  # pyright: ignore[reportAttributeAccessIssue]
    assert not data.train.unpadded  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("as_array", [False, True])
def test_the_published_files(tmp_path: Path, as_array: bool) -> None:
    lines, images = [], []
    for number in range(20):
        pixels = np.full((32, 32), number + 1, np.uint8)
        folder = tmp_path / "imgs" / str(number // 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"sample_{number}.png")
        images.append((number + 1, number % 2))
        lines.append(f"imgs/{number // 10} sample_{number}.png {number} {number % 2} 1.0 14 4 2 0.5 1 1")
    (tmp_path / "imgs/0/sample_3.png").write_bytes(b"")  # as one is in the easy level
    (tmp_path / "metadata").mkdir()
    for number in (0, 1):
        some = lines[10 * number : 10 * number + 10]
        if as_array:
            np.save(tmp_path / f"metadata/{number}.npy", np.array([line.split() for line in some]))
        else:
            (tmp_path / f"metadata/{number}.npy").write_text("\n".join(some) + "\n")
    data = open_data(f"lra_pathfinder:{tmp_path}", cache_dir=tmp_path / "cache")
    parts: Any = (data.train, data.val, data.test)
    assert [len(part) for part in parts] == [15, 2, 2]
    found = sorted((int(t[0]), int(y)) for part in parts for t, y in zip(part.tokens, part.labels, strict=True))
    assert found == [image for image in images if image[0] != 4]
    assert [int(t[0]) for t in parts[0].tokens] != sorted(int(t[0]) for t in parts[0].tokens)  # shuffled
    (tmp_path / "imgs/1/sample_12.png").unlink()
    (tmp_path / "metadata/1.npy").write_text("\n".join(lines[10:]))
    with pytest.raises(ValueError, match=r"sample_12.png.* cannot be read"):
        open_data(f"lra_pathfinder:{tmp_path}", cache_dir=tmp_path / "cache")
