"""Find, open and decode images in folders, tar archives, arrays or tables, and list them with their labels.

    for name, file in walk_images(Path("photos"), skipped): …           # "cat/1.jpg", photos/cat/1.jpg
    for member in list_members(Path("train.tar"), skipped): …           # files and folders, as tarfile has them
    decode_image(ImageFile("cat/1.jpg", "photos/cat/1.jpg").open)       # a PIL image, RGB, the right way up
    part = FilePart([ImageFile(name="cat/1.jpg", path="data/train/cat/1.jpg")], labels=[0])
    part.read(0)                                                        # wrap many such calls in strict_decoding()
    listing.check("pets")            # ValueError for an empty class, or classes that train and val do not share

Members of an archive are addressed by their offset, so any process can read any of them at any time. One bad file (a
dangling link, a FIFO, a device, a name that is not UTF-8, a file or a header of implausible size) does not spoil a set:
it is listed in `skipped` with the reason, or raises when it is opened.
"""

import contextlib
import errno
import io
import os
import stat
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "DISK_FULL", "NOT_UTF8", "SUFFIXES", "ArrayPart", "FilePart", "ImageFile", "ImageFiles", "Listing", "Part",
    "Skipped", "Source", "compare_classes", "decode_image", "decode_opened", "is_image", "is_utf8", "list_members",
    "open_file", "printable", "say_why", "saying_full", "shorter_side", "sort_names", "strict_decoding", "walk_images",
]  # fmt: skip

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
UNREAD = (".gif", ".jfif", ".ppm", ".pgm", ".jp2", ".jxl", ".avif", ".heic", ".heif")  # pictures all the same
MOST_BYTES = 1 << 29  # of one image's file; MOST_PIXELS take less, even uncompressed
MOST_HEADER = 1 << 20  # bytes of one header in an archive; it holds names
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_UTF8 = "its name is not UTF-8; rename it"
NOT_READ = f"only {', '.join(SUFFIXES)} are read; save it as .png"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

MOST_PIXELS = 89_478_485  # of one image, a quarter of a GiB as RGB; above this Pillow itself warns

Skipped = list[tuple[str, str]]
Opener = Callable[[], BinaryIO]


# ---- finding and opening


class ImageFile(NamedTuple):
    """A file, or a member of an archive."""

    name: str
    path: str
    offset: int = 0
    size: int = -1
    """-1 for the whole file."""

    def open(self) -> BinaryIO:
        """Open the file. Raises OSError or ValueError if that is impossible or unsafe."""
        if self.size < 0:
            return open_file(self.path)
        _check_bytes(self.size)
        with open(self.path, "rb") as archive:
            archive.seek(self.offset)
            return io.BytesIO(archive.read(self.size))


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file of plausible size; raise ValueError or OSError for anything else."""
    _check_bytes(check_regular(path).st_size)
    return open(path, "rb")


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return the stat of a regular file, else raise: opening a FIFO may block for ever, reading a device never end."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        raise ValueError(_dangling(path)) from None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file")
    return found


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and images have up to {MOST_BYTES:,}")


def _dangling(path: str | os.PathLike[str]) -> str:
    return f"it is a link to {printable(os.fspath(os.readlink(path)))}, which is not there"


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")  # ._photo.jpg is macOS metadata, not a photo


def _is_unread(name: str) -> bool:
    return name.lower().endswith(UNREAD) and not name.startswith(".")


def is_utf8(name: str) -> bool:
    """Whether a name is valid UTF-8. Other bytes come as lone surrogates, which none of our text files can hold."""
    return name.encode(errors="ignore").decode() == name


@contextlib.contextmanager
def saying_full(folder: Path) -> Iterator[None]:
    """Make a full disk the user's mistake: a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise ValueError(f"the disk of {folder} is full; free some space, or name another cache_dir") from error


def printable(name: str) -> str:
    r"""Return a name for display and for JSON, with bytes that are not UTF-8 as \xe9."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def walk_images(folder: Path, skipped: Skipped) -> Iterator[tuple[str, Path]]:
    """Yield every image file below the folder, with its relative name, without testing whether it can be opened.

    Links are followed, since data sets are often made of them, but no folder is entered twice.
    """
    seen: set[str] = set()

    def unreadable(error: OSError) -> None:
        skipped.append((printable(os.path.relpath(error.filename, folder)), error.strerror or str(error)))

    for here, folders, names in os.walk(folder, followlinks=True, onerror=unreadable):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(here, name) for name in names if not name.startswith(".")):
            name = file.relative_to(folder).as_posix()
            if is_image(file.name) and is_utf8(name):
                yield name, file
            elif is_image(file.name):
                skipped.append((printable(name), NOT_UTF8))
            elif file.is_symlink() and not os.path.exists(file):  # it may have been a class folder
                skipped.append((printable(name), _dangling(file)))
            elif _is_unread(file.name):
                skipped.append((printable(name), NOT_READ))


def list_members(path: Path, skipped: Skipped, *, name: str = "") -> Iterator[tarfile.TarInfo]:
    """Yield the files and folders in an uncompressed archive; a hard link comes as the file that it refers to.

    Raises TarError, OSError or ValueError if it cannot be opened. If it is damaged later on, what comes before that is
    yielded.
    """
    name = name or path.name
    size = check_regular(path).st_size
    files: dict[str, tuple[int, int]] = {}
    with _Headers(path) as headers, tarfile.open(fileobj=headers, mode="r:") as archive:
        try:
            for member in archive:
                if member.islnk() and member.linkname in files:
                    member.type = tarfile.REGTYPE
                    member.offset_data, member.size = files[member.linkname]
                if member.isreg() and member.offset_data + member.size > size:
                    skipped.append((f"{name}:{printable(member.name)}", "the archive ends in the middle of it"))
                elif member.isdir() or (member.isreg() and not member.issparse()):
                    files[member.name] = member.offset_data, member.size
                    if member.isreg() and _is_unread(member.name.rpartition("/")[2]):
                        skipped.append((f"{name}:{printable(member.name)}", NOT_READ))
                    yield member
                elif is_image(member.name.rpartition("/")[2]):
                    what = f"a link to {printable(member.linkname)}" if member.linkname else "a FIFO or a device"
                    what = "a sparse file" if member.issparse() else what
                    skipped.append((f"{name}:{printable(member.name)}", f"it is {what}; store the file itself"))
        except (tarfile.TarError, OSError) as error:
            skipped.append((name, f"the archive ends too early or is damaged ({error}); what comes before is used"))


class _Headers(io.FileIO):
    """An archive from which tarfile reads only headers, of limited size: a damaged one may claim any length."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


# ---- decoding


def decode_image(opener: Opener) -> "Image":
    """Decode an image file to 8-bit RGB, rotated as its EXIF data says, with transparency blended onto white.

    Sixteen bits are scaled to eight (Pillow alone would clip them to white). A truncated file raises, whatever Pillow's
    settings elsewhere in the process.
    """
    with strict_decoding():
        return decode_opened(opener)


@contextlib.contextmanager
def strict_decoding() -> Iterator[None]:
    """Make truncated files raise and silence Pillow's warnings, in the whole process: enter it outside of threads."""
    from PIL import ImageFile

    truncated, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        # Pillow warns about EXIF data it cannot read and about very large images; neither changes what is measured.
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = truncated


def decode_opened(opener: Opener) -> "Image":
    """`decode_image` for callers that are inside `strict_decoding` already, as threads have to be."""
    from PIL import Image, ImageOps

    with opener() as file, Image.open(file) as opened:  # reads only the header
        width, height = opened.size
        if width * height > MOST_PIXELS:  # however small the file is
            raise ValueError(f"it has {width} × {height} pixels, and may have up to {MOST_PIXELS:,}: scale it down")
        opened.load()
        image: Image.Image = opened
        with contextlib.suppress(Exception):  # damaged EXIF data in an intact image
            image = ImageOps.exif_transpose(opened)
        image.load()
        return _to_rgb(image)


def _to_rgb(image: "Image") -> "Image":
    from PIL import Image

    if image.mode == "I" or image.mode.startswith("I;16") or image.mode == "F":
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: "Image") -> Any:
    import numpy as np

    pixels = np.asarray(image).astype(np.float64)
    low, high = float(pixels.min()), float(pixels.max())
    if image.mode == "F" and low >= 0 and high <= 1:
        scale = 255.0
    elif image.mode != "F" and low >= 0 and high <= 65535:  # sixteen bits, which Pillow may open as 32
        scale = 1 / 257
    else:
        raise ValueError(f"its pixels run from {low:g} to {high:g}, in {image.mode} of no known range")
    return (pixels * scale).round().astype(np.uint8)


def say_why(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "no image of a known format"  # Pillow's message repeats the path, or the address of a buffer
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)  # without the path
    return " ".join(said.split())[:200] or type(error).__name__


# ---- the parts of a source


class Part(Protocol):
    """The training or validation images of a source."""

    @property
    def labels(self) -> Sequence[int]: ...
    def name(self, row: int) -> str: ...
    def read(self, row: int) -> "Image": ...


class FilePart:
    """Images in files."""

    def __init__(self, files: list[ImageFile], labels: Sequence[int]) -> None:
        self.files: list[ImageFile] = files
        self.labels: Sequence[int] = labels

    def name(self, row: int) -> str:
        return self.files[row].name

    def read(self, row: int) -> "Image":
        return decode_opened(self.files[row].open)


def shorter_side(part: "Part", row: int) -> int:
    """Return the shorter side of an image in pixels; of a file, only the header is read."""
    if not isinstance(part, FilePart):
        return min(part.read(row).size)
    from PIL import Image

    with part.files[row].open() as file, Image.open(file) as opened:
        return min(opened.size)


class ArrayPart:
    """Images in one array (rows, height, width, 3) of uint8."""

    def __init__(self, pixels: Any, labels: Sequence[int]) -> None:
        self.pixels: Any = pixels
        self.labels: Sequence[int] = labels

    def name(self, row: int) -> str:
        return str(row)

    def read(self, row: int) -> "Image":
        from PIL import Image

        return Image.fromarray(self.pixels[row])


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The contents of a source."""

    classes: list[str]
    train: Part
    val: Part
    skipped: Skipped
    """What could not even be listed, and why."""

    def check(self, where: str) -> None:
        for split, part in (("train", self.train), ("val", self.val)):
            check_labels(part.labels, self.classes, f"the {split} part of {where}")


def check_labels(labels: Sequence[int], classes: list[str], where: str) -> None:
    """Raise ValueError unless the labels are indices into `classes` and every class has one."""
    if not len(labels):
        raise ValueError(f"no images in {where}")
    found = torch.as_tensor(labels)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= len(classes):
        raise ValueError(
            f"the labels in {where} run from {low} to {high}, but there are {len(classes)} classes, "
            f"0 to {len(classes) - 1}: the labels and the list of classes do not fit"
        )
    empty = [classes[label] for label in (torch.bincount(found, minlength=len(classes)) == 0).nonzero()[:, 0].tolist()]
    if empty:
        named = ", ".join(repr(name) for name in empty[:5]) + (", …" if len(empty) > 5 else "")
        raise ValueError(
            f"no image of {len(empty)} of the {len(classes)} classes in {where}: {named}; add some, or remove the class"
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set by name, before it is read."""

    name: str
    """A short name for display."""
    where: str
    """Whatever distinguishes it from others of that name."""
    fingerprint: str
    """Changes when the data does."""
    list: Callable[[Path], Listing]
    """Lists the images. Its argument is a folder to unpack into, which lasts until the images are decoded."""
    random_access: bool = True
    """Whether the files can be read later on, in any order and without that folder."""
    note: str = ""
    """What the user must know, in one sentence."""


class ImageFiles:
    """One part of a set that is too large for the cache: images are decoded on demand."""

    device: torch.device = torch.device("cpu")
    channels = 3

    def __init__(self, part: Part, *, image_size: int, rows: Tensor | None = None) -> None:
        from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

        self.source: Part = part
        self.image_size: int = image_size
        self.rows: Tensor = torch.arange(len(part.labels)) if rows is None else rows
        self.labels: Tensor = torch.as_tensor(part.labels, dtype=torch.int64)[self.rows]
        self.mean: Tensor = torch.tensor(IMAGENET_DEFAULT_MEAN)
        self.std: Tensor = torch.tensor(IMAGENET_DEFAULT_STD)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"ImageFiles({len(self)} × 3 × {self.image_size} × {self.image_size}, streamed)"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image as the model reads it."""
        return 3, self.image_size, self.image_size

    def name(self, row: int) -> str:
        """Return the name of an image's file."""
        return self.source.name(int(self.rows[row]))

    def read(self, row: int) -> "Image":
        """Decode an image."""
        return self.source.read(int(self.rows[row]))

    def part(self, rows: Tensor) -> "ImageFiles":
        """Return some of the images, by index."""
        return ImageFiles(self.source, image_size=self.image_size, rows=self.rows[rows])

    def measured(self) -> "ImageFiles":
        """Return self: measuring would mean decoding everything, so ImageNet's mean and standard deviation are kept."""
        return self

    def normalised_by(self, mean: Tensor, std: Tensor) -> "ImageFiles":
        """Return self: streamed images use ImageNet's mean and standard deviation."""
        assert torch.equal(mean, self.mean), "streamed images are normalised by ImageNet's numbers"
        assert torch.equal(std, self.std), "streamed images are normalised by ImageNet's numbers"
        return self

    def like(self, train: "ImageFiles") -> "ImageFiles":
        """Return self, normalised as the training images are."""
        return self.normalised_by(train.mean, train.std)

    def content(self) -> list[bytes]:
        """Return what changes when the data does, besides the labels: file names, since nothing is decoded yet."""
        return ["\n".join(self.source.name(row) for row in self.rows.tolist()).encode()]

    def to(self, device: torch.device | str, *, share: float = 0.0) -> "ImageFiles":
        """Return self: there is nothing to move yet."""
        return self


def stat_line(path: Path | str) -> str:
    """Return what changes when a file does: its size and modification time."""
    try:
        found = os.stat(path)
    except OSError as error:  # a dangling link, say; reading it will report it
        return error.strerror or str(error)
    return f"{found.st_size} {found.st_mtime_ns}"


def compare_classes(train: Iterable[str], val: Iterable[str], *, where: str) -> None:
    """Raise ValueError unless both parts have the same classes: labels would mean different things otherwise."""
    trained, seen = set(train), set(val)
    for only, having, lacking in ((trained - seen, "train", "val"), (seen - trained, "val", "train")):
        if only:
            names = sorted(only)
            named = ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
            raise ValueError(f"in {where} the classes {named} are in {having} but not in {lacking}; both need the same")


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort distinct names, as numbers if all are whole numbers, else as text."""
    found = set(names)
    return sorted(found, key=int) if all(name.isdecimal() for name in found) else sorted(found)
