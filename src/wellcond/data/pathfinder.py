"""Pathfinder, a task of the Long Range Arena: do the two marked ends belong to one dashed curve?

    data = open_data("lra_pathfinder")                                    # hard: curves of 14 dashes; 200,000 images
    data = open_data("lra_pathfinder", options={"contour": 9})            # the intermediate level; 6 is the easy one
    data = open_data("lra_pathfinder:lra_release/pathfinder32/curv_contour_length_14")
    pixels, label = draw_image(seed=0, index=17)                          # (1024,) uint8: image 17 of seed 0, always

An image has two target curves of dashes that grow in turns and never cross, short distractor curves in the remaining
space, and two markers: one at the start of a target, the other at the end of the same target (label 1) or of the other
one (label 0). The background is 0 and the brightest pixel 255. Lengths below are in pixels of a 32 × 32 image; dashes
and markers are drawn twice as large and then reduced.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from zipfile import ZIP_LZMA

import numpy as np
import torch
from numpy.typing import NDArray

from wellcond.data.dataset import DataSet
from wellcond.data.draws import make_key
from wellcond.data.made import Made, stat_key
from wellcond.data.sequences import MaskRule, Rows, SequenceSet, check_choice, spread
from wellcond.data.sources import Settings, register_source

__all__ = ["Contour", "draw_image", "draw_images"]

Contour = Literal[14, 9, 6]
SIDE = 32
PIXELS = SIDE * SIDE
LENGTH, MARGIN, FINE = 2, 1, 2  # of a dash, around it, and the factor by which it is drawn larger
REACH = LENGTH + 1 + MARGIN  # of a dash's picture, around its starting point
SEED_DISTANCE = 7
MARKER_RADIUS = 1.5
TARGET_CONTRAST, DISTRACTOR_CONTRAST = 1.5, 2.0
CROSSING = 1.8  # sum of two masks, each up to 1, at which they overlap
DEAD_END = 1e-4  # the total weight of all directions, below which a curve cannot go on
OCCUPIED = 0.3
LEAST_FREE = 0.01  # share of the image, needed for one more distractor
TRIES, SNAKE_TRIES = 3, 5
DASHES_OF_DISTRACTORS = 20
DEGREES = 360
DRAWN = 1 << 10  # random numbers drawn at once
PIECE, SMALL_PIECE = 1000, 50  # images per file, in a set of more than PIECE and in a smaller one
WORTH_WORKERS = 4  # pieces; fewer are made in this process
SAMPLES = 200_000
VOCAB = 512
WANTED = (
    "a folder with imgs/NUMBER/*.png and metadata/NUMBER.npy, as pathfinder32/curv_contour_length_14 of "
    "lra_release.gz (google-research/long-range-arena); without a folder, lra_pathfinder generates its own"
)

Floats = NDArray[np.float32]


# ---- what is drawn: small pictures, made once


class _Picture(NamedTuple):
    """The nonzero pixels of a dash's line and of its mask: their flat indices and values."""

    line_at: NDArray[np.intp]
    line: Floats
    mask_at: NDArray[np.intp]
    mask: Floats


def _reduce(fine: NDArray[Any], side: int) -> NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.fromarray(fine.astype(np.uint8) * 255).resize((side, side), Image.Resampling.LANCZOS))


@cache
def _dash(end: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw a dash from the middle of a square of 2 · REACH + 1 pixels to `end`, given in fine pixels, and its mask."""
    from PIL import Image, ImageDraw
    from scipy.ndimage import binary_dilation

    side, middle = 2 * REACH * FINE + 1, REACH * FINE
    canvas = Image.new("L", (side, side))
    ImageDraw.Draw(canvas).line([(middle, middle), (middle + end[1], middle + end[0])], fill=1, width=1)
    line = np.asarray(canvas) > 0
    y, x = np.ogrid[-MARGIN * FINE : MARGIN * FINE + 1, -MARGIN * FINE : MARGIN * FINE + 1]
    disc = y**2 + x**2 <= (MARGIN * FINE) ** 2
    return _reduce(line, 2 * REACH + 1), _reduce(binary_dilation(line, disc), 2 * REACH + 1)


@cache
def _picture(end: tuple[int, int], y: int, x: int) -> _Picture:
    """Return a dash that starts at (y, x), clipped to the image."""
    places = np.arange(-REACH, REACH + 1)
    rows, columns = np.meshgrid(places + y, places + x, indexing="ij")
    inside = (rows >= 0) & (rows < SIDE) & (columns >= 0) & (columns < SIDE)
    found: list[Any] = []
    for pixels in _dash(end):
        chosen = inside & (pixels > 0)
        found += [(rows * SIDE + columns)[chosen], pixels[chosen].astype(np.float32) / 255]
    return _Picture(*found)


@cache
def _marker(y: int, x: int) -> tuple[NDArray[np.intp], Floats]:
    rows, columns = np.ogrid[: SIDE * FINE, : SIDE * FINE]
    disc = (rows - y * FINE) ** 2 + (columns - x * FINE) ** 2 <= (MARKER_RADIUS * FINE) ** 2
    pixels = _reduce(disc, SIDE).reshape(-1)
    places = np.flatnonzero(pixels)
    return places, pixels[places].astype(np.float32) / np.float32(255)


# ---- directions: 360 in which a curve may start, then those in which it may continue


def _step(angle: float, distance: float) -> tuple[int, int]:
    """Return the step to the pixel at this distance, rounded up; adding 8 first rounds tiny errors to an exact 0."""
    return math.ceil(8 + distance * math.sin(angle)) - 8, math.ceil(8 + distance * math.cos(angle)) - 8


def _turned(angle: float) -> float:
    return angle + math.pi if angle < 0 else angle - math.pi


def _ring() -> list[tuple[int, int]]:
    """Return the pixels on a circle of radius LENGTH + MARGIN around (0, 0)."""
    radius = LENGTH + MARGIN
    angles = np.deg2rad(np.arange(0, 360, 360 / (2 * radius * np.pi)))
    return sorted({(math.floor(radius * math.sin(a)), math.floor(radius * math.cos(a))) for a in angles})


RING = _ring()
ANGLES = [math.radians(degree) for degree in range(-180, 180)] + [math.atan2(y, x) for y, x in RING]
FORWARD = [_step(angle, LENGTH) for angle in ANGLES]
ONWARD = [_step(angle, LENGTH + 2 * MARGIN) for angle in ANGLES]
BACK = [_step(_turned(angle), LENGTH + MARGIN) for angle in ANGLES]
ENDS = [_step(angle, LENGTH * FINE) for angle in ANGLES]
ENDS_BACK = [_step(_turned(angle), LENGTH * FINE) for angle in ANGLES]


def _straightness() -> NDArray[np.float64]:
    """Return (direction, direction on the ring): cos² of the turn, 0 for a right angle or more."""
    turn = np.abs(np.subtract.outer(ANGLES, ANGLES[DEGREES:]))
    return np.cos(np.minimum(np.minimum(turn, 2 * np.pi - turn), np.pi / 2)) ** 2


STRAIGHT = _straightness()


class _Ends(NamedTuple):
    """The pixels where a dash that pivots about a given pixel may end."""

    which: NDArray[np.intp]
    """Indices of the ring's pixels that lie in the image."""
    around: NDArray[np.intp]
    """(5, ends): those pixels and their four neighbours; for a neighbour outside, the pixel itself."""


@cache
def _ends(y: int, x: int) -> _Ends:
    which, around = [], []
    for number, (dy, dx) in enumerate(RING):
        row, column = y + dy, x + dx
        if 0 <= row < SIDE and 0 <= column < SIDE:
            cross = [(row, column), (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
            kept = [(r, c) if 0 <= r < SIDE and 0 <= c < SIDE else (row, column) for r, c in cross]
            which.append(number)
            around.append([r * SIDE + c for r, c in kept])
    return _Ends(np.array(which, np.intp), np.array(around, np.intp).reshape(-1, 5).T.copy())


# ---- free places for a curve to start. A set of pixels is the bits of an integer, with empty columns between the rows.

STRIDE = SIDE + 8
ROOM = 4 * STRIDE + 4  # bits before the first pixel, so that shifting in either direction loses nothing


@cache
def _footprint(end: tuple[int, int]) -> list[int]:
    """Return by how much to shift the occupied pixels to find where a dash in this direction would touch one of them.

    Empty for a direction in which no curve starts. As published, those are most: if the footprint of some pixel at the
    border lies wholly outside the image, its dilation is minus infinity, and the direction is given up.
    """
    full = _dash(end)[1][: 2 * REACH - 1, : 2 * REACH - 1] == 255
    offsets = np.argwhere(full) - (REACH - 1)  # from the pixel next to the dash's own, as published
    outside = np.ones((SIDE, SIDE), bool)
    for y, x in offsets:
        rows, columns = np.arange(SIDE) + y, np.arange(SIDE) + x
        outside &= ~np.outer((rows >= 0) & (rows < SIDE), (columns >= 0) & (columns < SIDE))
    return [] if outside.any() else [int(y) * STRIDE + int(x) for y, x in offsets]


def _bits(pixels: NDArray[np.bool_]) -> int:
    wide = np.zeros((SIDE, STRIDE), np.uint8)
    wide[:, :SIDE] = pixels.reshape(SIDE, SIDE)
    return int.from_bytes(np.packbits(wide, bitorder="little").tobytes(), "little") << ROOM


WINDOW = _bits(np.ones((SIDE, SIDE), bool))
FRAME = np.pad(np.zeros((SIDE - 2, SIDE - 2), bool), 1, constant_values=True)


def _free(occupied: int, end: tuple[int, int]) -> NDArray[np.intp]:
    """Return the flat indices of the pixels at which a dash in this direction may start."""
    reached = 0 if _footprint(end) else WINDOW
    for shift in _footprint(end):
        reached |= occupied >> shift if shift >= 0 else occupied << -shift
    left = (WINDOW & ~reached) >> ROOM
    if not left:
        return np.zeros(0, np.intp)
    bits = np.unpackbits(np.frombuffer(left.to_bytes(SIDE * STRIDE // 8, "little"), np.uint8), bitorder="little")
    return np.flatnonzero(bits.reshape(SIDE, STRIDE)[:, :SIDE])


@cache
def _first_places(end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return where the first target may start: in the middle."""
    border = np.ones((SIDE, SIDE), bool)
    border[2 * SEED_DISTANCE : -2 * SEED_DISTANCE, 2 * SEED_DISTANCE : -2 * SEED_DISTANCE] = False
    return [divmod(int(place), SIDE) for place in _free(_bits(border), end)]


# ---- an image


class _Snake:
    """A growing curve."""

    def __init__(self, tail: tuple[int, int], direction: int) -> None:
        """Start with a dash from `tail` in this direction."""
        (dy, dx), (by, bx) = FORWARD[direction], BACK[direction]
        head = tail[0] + dy, tail[1] + dx
        self.pivot, self.direction = (head[0] + by, head[1] + bx), direction
        self.fits = all(0 <= place < SIDE for place in (*head, *self.pivot))
        self.last = _picture(ENDS[direction], *tail) if self.fits else None
        self.tip = tail

    def grow(self, mask: Floats, draw: Callable[[], float]) -> _Picture | None:
        """Add a dash, and the one before it to the mask. Returns None at a dead end."""
        dy, dx = ONWARD[self.direction]
        y, x = self.pivot[0] + dy, self.pivot[1] + dx
        which, around = _ends(y, x)
        if not len(which):
            return None
        weights = (1 - mask[around].max(0)) * STRAIGHT[self.direction][which]
        sums = weights.cumsum()
        if sums[-1] < DEAD_END:
            return None
        for _ in range(TRIES):
            chosen = int(which[min(int(sums.searchsorted(draw() * sums[-1], "right")), len(which) - 1)])
            tip = y + RING[chosen][0], x + RING[chosen][1]
            picture = _picture(ENDS_BACK[DEGREES + chosen], *tip)
            if (mask[picture.mask_at] + picture.mask).max() < CROSSING:
                assert self.last is not None
                _cover(mask, self.last)
                self.last, self.pivot, self.direction, self.tip = picture, (y, x), DEGREES + chosen, tip
                return picture
        return None


def _cover(mask: Floats, picture: _Picture) -> None:
    mask[picture.mask_at] = np.maximum(mask[picture.mask_at], picture.mask)


def draw_image(*, seed: int, index: int, contour: int = 14) -> tuple[NDArray[np.uint8], int]:
    """Return image `index` of a set, flat, and its label, which depend only on the arguments."""
    draw = _drawing(seed, index)
    label = int(draw() < 0.5)
    while (targets := _targets(contour, draw)) is None:
        pass
    pictures, mask, tips = targets
    image = np.zeros(PIXELS, np.float32)
    for picture in pictures:
        image[picture.line_at] = np.maximum(image[picture.line_at], picture.line * TARGET_CONTRAST)
    dashes = contour // 3
    for _ in range(DASHES_OF_DISTRACTORS // dashes):
        for picture in _distractor(mask, dashes, draw):
            image[picture.line_at] = np.maximum(image[picture.line_at], picture.line * DISTRACTOR_CONTRAST)
    origin = int(draw() < 0.5)
    for tip in (tips[origin][0], tips[origin if label else 1 - origin][1]):
        places, values = _marker(*tip)
        image[places] = np.maximum(image[places], values)
    return (image * (255 / image.max()) + 0.5).astype(np.uint8), label


def _drawing(seed: int, index: int) -> Callable[[], float]:
    generator = np.random.default_rng(make_key(seed, 0x9A7F, index))

    def numbers() -> Any:
        while True:
            yield from generator.random(DRAWN).tolist()

    return numbers().__next__


Tips = tuple[tuple[int, int], tuple[int, int]]


def _targets(contour: int, draw: Callable[[], float]) -> tuple[list[_Picture], Floats, list[Tips]] | None:
    """Return both targets' dashes, the mask, and where each target starts and ends; None at a dead end."""
    while not (places := _first_places(ENDS[direction := int(draw() * DEGREES)])):
        pass
    y, x = places[int(draw() * len(places))]
    snakes = [_Snake((y, x), direction)]
    for _ in range(TRIES):
        direction, angle = int(draw() * DEGREES), math.radians(int(draw() * DEGREES))
        tail = round(y + SEED_DISTANCE * math.sin(angle)), round(x + SEED_DISTANCE * math.cos(angle))
        second = _Snake(tail, direction)
        if second.fits:
            snakes.append(second)
            break
    else:
        return None
    mask = FRAME.reshape(-1).astype(np.float32)
    begins = [snake.tip for snake in snakes]
    pictures = [snake.last for snake in snakes if snake.last is not None]
    for _ in range(contour - 1):
        for snake in snakes:
            picture = snake.grow(mask, draw)
            if picture is None:
                return None
            pictures.append(picture)
    _cover(mask, pictures[-1])  # of the second target only, as published
    return pictures, mask, list(zip(begins, (snake.tip for snake in snakes), strict=True))


def _distractor(mask: Floats, dashes: int, draw: Callable[[], float]) -> list[_Picture]:
    """Draw a short curve in the free space and add it to the mask. Returns its dashes, or none if it found no place."""
    occupied = mask > OCCUPIED
    if PIXELS - np.count_nonzero(occupied) < LEAST_FREE * PIXELS:
        return []
    bits = _bits(occupied | FRAME.reshape(-1))
    for _ in range(SNAKE_TRIES):
        snake = _seeded(bits, draw)
        if snake is None or snake.last is None:
            continue
        tried, pictures = mask.copy(), [snake.last]
        while len(pictures) < dashes:
            picture = snake.grow(tried, draw)
            if picture is None:
                break
            pictures.append(picture)
        else:
            _cover(tried, pictures[-1])
            mask[:] = tried
            return pictures
    return []


def _seeded(occupied: int, draw: Callable[[], float]) -> _Snake | None:
    for _ in range(TRIES):
        direction = int(draw() * DEGREES)
        places = _free(occupied, ENDS[direction])
        if not len(places):
            return None
        snake = _Snake(divmod(int(places[int(draw() * len(places))]), SIDE), direction)
        if snake.fits:
            return snake
    return None


def draw_images(*, seed: int, first: int, count: int, contour: int = 14) -> Rows:
    """Return `count` images of a set: `first`, `first` + 1, …"""
    drawn = [draw_image(seed=seed, index=index, contour=contour) for index in range(first, first + count)]
    tokens = np.concatenate([pixels for pixels, _ in drawn])
    return Rows(tokens, np.full(count, PIXELS, np.int32), np.array([label for _, label in drawn], np.uint8))


# ---- the source


@register_source("lra_pathfinder", takes="[FOLDER]", wants=WANTED)
def _pathfinder(
    rest: str, settings: Settings, *, samples: int | None = None, contour: Contour = 14, mask: MaskRule = "published",
    data_seed: int = 0,
) -> DataSet:  # fmt: skip
    check_choice("contour", contour, get_args(Contour))
    if rest:
        pieces = _read(Path(rest).expanduser(), settings)
    else:
        pieces = _generated(settings, SAMPLES if samples is None else samples, contour, data_seed)
    whole = SequenceSet.of(pieces, length=PIXELS, vocab=VOCAB, mask=mask)
    train, val, test = _split(whole, data_seed if rest else None)
    if rest:
        train, val, test = (spread(part, samples) for part in (train, val, test))
    return DataSet(
        name="lra_pathfinder", classes=["apart", "connected"], train=train, val=val, test=test, skipped=[]
    )  # fmt: skip


def _split(whole: SequenceSet, seed: int | None) -> list[SequenceSet]:
    """Split 80 %, 10 % and 10 %, in a random order given by the seed; without one, images are random already."""
    count = len(whole)
    if count < 10:
        raise ValueError(f"{count} images are too few for train, val and test; ten are the least")
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(make_key(seed, 0x5B17) >> 1))
    cuts = [0, count * 8 // 10, count * 9 // 10, count]
    return [whole.part(order[low:high]) for low, high in pairwise(cuts)]


def _generated(settings: Settings, samples: int, contour: int, seed: int) -> list[Rows]:
    piece = PIECE if samples > PIECE else SMALL_PIECE
    key = {"seed": seed, "contour": contour, "piece": piece}
    made = Made(
        settings.cache_dir, "lra_pathfinder", key, lambda number: make_piece(number, **key), compression=ZIP_LZMA
    )  # fmt: skip
    count = -(-samples // piece)
    if count >= WORTH_WORKERS and piece == PIECE:
        made.fill(count, "wellcond.data.pathfinder:make_piece", key, progress=settings.progress, unit=piece)
    pieces, have = [], 0
    for number in range(count):
        pieces.append(made.piece(number).between(0, samples - have))
        have += len(pieces[-1].labels)
        if settings.progress is not None and made.was_made:
            settings.progress("generating lra_pathfinder", have, samples)
    return pieces


def make_piece(number: int, *, seed: int, contour: int, piece: int) -> Rows:
    """Return one file of a set."""
    return draw_images(seed=seed, first=number * piece, count=piece, contour=contour)


# ---- the published files


def _read(folder: Path, settings: Settings) -> list[Rows]:
    lists = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name))
    if not lists:
        raise ValueError(f"there is no {folder / 'metadata'} with .npy files; lra_pathfinder:FOLDER is {WANTED}")
    key = stat_key(folder, [f"metadata/{path.name}" for path in lists])
    made = Made(
        settings.cache_dir, "lra_pathfinder-files", key, lambda i: _read_images(folder, lists[i]), compression=ZIP_LZMA
    )  # fmt: skip
    pieces = []
    for number in range(len(lists)):
        pieces.append(made.piece(number))
        if settings.progress is not None and made.was_made:
            settings.progress("reading lra_pathfinder", number + 1, len(lists))
    return pieces


def _read_images(folder: Path, listed: Path) -> Rows:
    """Read the images that one metadata file lists, leaving out empty files: the easy level has one."""
    from PIL import Image

    pixels, labels = [], []
    for line in _lines(listed):
        try:
            where, name, label = folder / line[0] / line[1], line[1], int(float(line[3]))
            if where.stat().st_size == 0:
                continue
            with Image.open(where) as image:
                found = np.asarray(image.convert("L"))
        except (OSError, ValueError, IndexError) as error:
            raise ValueError(f"{listed} says {' '.join(line)!r}, which cannot be read: {error}") from error
        if found.shape != (SIDE, SIDE) or label not in (0, 1):
            raise ValueError(
                f"{name} of {listed} has {found.shape} pixels and the label {label}; wanted: 32 × 32, 0 or 1"
            )
        pixels.append(found.reshape(-1))
        labels.append(label)
    tokens = np.concatenate(pixels) if pixels else np.zeros(0, np.uint8)
    return Rows(tokens, np.full(len(labels), PIXELS, np.int32), np.array(labels, np.uint8))


def _lines(listed: Path) -> list[list[str]]:
    """Return rows of folder, file, number, label, …: from lines of text, as in the arena's .npy files, or an array."""
    content = listed.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        return [[str(cell) for cell in row] for row in np.load(listed, allow_pickle=False)]
    return [line.split() for line in content.decode(errors="replace").splitlines() if line.strip()]
