"""Finding images in folders and tar archives, and opening them, whatever else lies there.

    for name, file in walk_images(Path("photos"), skipped): …           # "cat/1.jpg", photos/cat/1.jpg
    for member in list_members(Path("train.tar"), skipped): …           # files and folders, as tarfile has them
    ImageFile("cat/1.jpg", "photos/cat/1.jpg").open()                   # or a member of an archive, by its place in it

One odd file does not stop a set: a link to nothing, a FIFO, a device, a name that is not UTF-8, a file or a header that
is too large to be honest. It is named in `skipped` with the reason, or raises when it is opened.
"""

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

__all__ = [
    "NOT_UTF8",
    "SUFFIXES",
    "ImageFile",
    "Skipped",
    "is_image",
    "is_utf8",
    "list_members",
    "open_file",
    "printable",
    "walk_images",
]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
MOST_BYTES = 1 << 29  # of one image's file; images.MOST_PIXELS take less, uncompressed
MOST_HEADER = 1 << 20  # bytes of one header in an archive, which holds names
NOT_UTF8 = "its name is not UTF-8; rename it"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

Skipped = list[tuple[str, str]]


class ImageFile(NamedTuple):
    """A file, or a member of an archive."""

    name: str
    path: str
    offset: int = 0
    size: int = -1
    """-1 is the whole file."""

    def open(self) -> BinaryIO:
        """OSError or ValueError where that cannot be, or should not."""
        if self.size < 0:
            return open_file(self.path)
        _check_bytes(self.size)
        with open(self.path, "rb") as archive:
            archive.seek(self.offset)
            return io.BytesIO(archive.read(self.size))


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """An ordinary file of a bearable size; ValueError or OSError for anything else."""
    _check_bytes(check_regular(path).st_size)
    return open(path, "rb")


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Before a file is opened: to open a FIFO would wait for ever, and to read a device may never end."""
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
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")  # ._photo.jpg is no photo but macOS's notes


def is_utf8(name: str) -> bool:
    """Other bytes of a name come as lone surrogates, which no text file of ours can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(name: str) -> str:
    r"""For people, and for JSON: what is not UTF-8 as \xe9."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def walk_images(folder: Path, skipped: Skipped) -> Iterator[tuple[str, Path]]:
    """Every image file below, with its name relative to the folder; whether it can be opened, shows when it is.

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


def list_members(path: Path, skipped: Skipped, *, name: str = "") -> Iterator[tarfile.TarInfo]:
    """The files and folders in an archive that is not compressed; a hard link comes as the file that it stands for.

    TarError, OSError or ValueError if it cannot be opened; where it is damaged later on, what comes before is given.
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
                    yield member
                elif is_image(member.name.rpartition("/")[2]):
                    what = f"a link to {printable(member.linkname)}" if member.linkname else "a FIFO or a device"
                    what = "a sparse file" if member.issparse() else what
                    skipped.append((f"{name}:{printable(member.name)}", f"it is {what}; store the file itself"))
        except (tarfile.TarError, OSError) as error:
            skipped.append((name, f"the archive ends too early or is damaged ({error}); what comes before is used"))


class _Headers(io.FileIO):
    """An archive of which tarfile reads nothing but headers: their own words may claim any length."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)
