"""Tar archives of images: train.tar with val.tar, and shards in WebDataset's form. Nothing is extracted from them.

    archive_source([Path("train.tar")], [Path("val.tar")], name="pets")    # members train/CLASS/FILE
    shard_source("shards/{train,val}-*.tar")                               # members KEY.jpg and KEY.cls, or the same

A label is what KEY.cls, KEY.label or the "label" of KEY.json says, as a number or a name; without these, the first
folder of the member's name after the split. Compressed shards are unpacked first: their members cannot be
looked up.
"""

import glob
import gzip
import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from wellcond.data.files import FilePart, ImageFile, Listing, Skipped, Source, stat_line
from wellcond.data.images import is_image
from wellcond.data.labels import compare_classes, sort_names

__all__ = ["FOUND_SHARDS", "archive_source", "expand_braces", "find_shards", "shard_source"]

ENDINGS = (".tar", ".tar.gz", ".tgz")
FOUND_SHARDS = "train-*.tar[.gz] and val-*.tar[.gz]"
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "val"}


def shard_source(pattern: str) -> Source:
    """Shards by a folder or a pattern with *, ?, {train,val} and {000..009}."""
    train, val = find_shards(pattern)
    for files, split in ((train, "train"), (val, "val")):
        if not files:
            raise ValueError(
                f"no {split} shards in {pattern}; their names start with it ({FOUND_SHARDS}), "
                "so name their folder, or both parts, as in 'wds:shards/{train,val}-*.tar'"
            )
    return archive_source(train, val, name=train[0].resolve().parent.name)


def archive_source(train: Sequence[Path], val: Sequence[Path], *, name: str) -> Source:
    files = [*train, *val]
    lines = [f"{file.name} {stat_line(file)}" for file in files]

    def listing(scratch: Path) -> Listing:
        skipped: Skipped = []
        found = {
            "train": _list_members(train, "train", scratch, skipped),
            "val": _list_members(val, "val", scratch, skipped),
        }
        where = str(train[0].parent)
        for split, members in found.items():
            if not members:
                said = f" ({skipped[0][0]}: {skipped[0][1]})" if skipped else ""
                raise ValueError(f"no images in the {split} archives of {where}{said}")
        compare_classes(*({label for _, label in members} for members in found.values()), where=where)
        classes = _name_classes({label for _, label in found["train"]}, where)
        place = {label: index for index, label in enumerate(classes)}
        parts = {
            split: FilePart([file for file, _ in members], [place[label] for _, label in members])
            for split, members in found.items()
        }
        return Listing(classes=classes, train=parts["train"], val=parts["val"], skipped=skipped)

    return Source(
        name=name, where="\n".join(str(file.resolve()) for file in files), list=listing,
        fingerprint=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        random_access=not any(file.name.endswith("gz") for file in files),
    )  # fmt: skip


def _name_classes(labels: set[str], where: str) -> list[str]:
    classes = sort_names(labels)
    if classes[0] in ("0", "1") and all(label.isdecimal() for label in classes):
        numbers = [int(label) for label in classes]
        gaps = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
        if gaps:
            raise ValueError(
                f"the labels in {where} are numbers from {numbers[0]} to {numbers[-1]}, but none is {gaps[0]}: "
                "that class is empty, or the labels do not fit"
            )
    return classes


# ---- members


def _list_members(archives: Sequence[Path], split: str, scratch: Path, skipped: Skipped) -> list[tuple[ImageFile, str]]:
    """Images with the names of their classes, in the order of the archives."""
    found: list[tuple[ImageFile, str]] = []
    for number, archive in enumerate(archives):
        plain = archive
        if archive.name.endswith("gz"):
            plain = scratch / f"{split}-{number}.tar"
            _unpack(archive, plain, skipped)
        images: dict[str, ImageFile] = {}
        labels: dict[str, str] = {}
        folders: set[str] = set()
        for member in _members(plain, archive.name, skipped):
            if member.isdir():
                folders.add(_class_of(f"{member.name}/."))
            elif not member.isreg() or PurePosixPath(member.name).name.startswith("."):
                continue
            elif is_image(PurePosixPath(member.name).name):
                name = f"{archive.name}:{member.name}"
                images[member.name] = ImageFile(name, str(plain), member.offset_data, member.size)
            elif _key(member.name)[1] in ("cls", "label", "json"):
                labels.update(_read_label(ImageFile(member.name, str(plain), member.offset_data, member.size), archive))
        here = [(image, labels.get(_key(name)[0]) or _class_of(name)) for name, image in images.items()]
        for name, (_, label) in zip(images, here, strict=True):
            if not label:
                raise ValueError(
                    f"{name} in {archive} has no label: put {_key(name)[0]}.cls beside it in the archive, or put it "
                    "into a folder named after its class"
                )
        found += here
        empty = folders - {label for _, label in here} - {""}
        if empty and not labels and len(archives) == 1:
            raise ValueError(
                f"the class folder {min(empty)} in {archive} holds no image; add some, or remove the folder"
            )
    return found


def _members(plain: Path, name: str, skipped: Skipped) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(plain, "r:") as archive:
            size = plain.stat().st_size
            for member in archive:
                if member.isreg() and member.offset_data + member.size > size:
                    skipped.append((f"{name}:{member.name}", "the archive ends in the middle of it"))
                else:
                    yield member
    except (tarfile.TarError, OSError) as error:
        skipped.append((name, f"the archive ends too early or is damaged ({error}); what comes before is used"))


def _unpack(archive: Path, plain: Path, skipped: Skipped) -> None:
    with gzip.open(archive, "rb") as packed, open(plain, "wb") as file:
        try:
            while block := packed.read(1 << 20):
                file.write(block)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            skipped.append((archive.name, f"its compression is damaged ({error}); what comes before is used"))


def _key(name: str) -> tuple[str, str]:
    """WebDataset's key and extension: the name is cut at the first dot of its last part."""
    folder, slash, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return folder + slash + key, ending.lower()


def _class_of(name: str) -> str:
    """train/CLASS/… or CLASS/…; empty where there is no folder."""
    folders = [part for part in PurePosixPath(name).parts[:-1] if part not in (".", "/")]
    if folders and folders[0] in SPLITS:
        folders = folders[1:]
    return folders[0] if folders else ""


def _read_label(file: ImageFile, archive: Path) -> dict[str, str]:
    key, ending = _key(file.name)
    with file.open() as opened:
        text = opened.read().decode("utf-8", errors="replace").strip()
    if ending == "json":
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{archive}: {file.name} is no JSON ({error})") from error
        found = record.get("label", record.get("cls")) if isinstance(record, dict) else None
        return {} if found is None else {key: str(found)}
    if not text or "\n" in text:
        raise ValueError(f"{archive}: {file.name} holds {text[:40]!r}, which is no label: one number or name is needed")
    return {key: text}


# ---- which shards


def find_shards(pattern: str) -> tuple[list[Path], list[Path]]:
    """The training and the validation shards of a folder or a pattern, in the order of their names."""
    found: list[Path] = []
    if Path(pattern).is_dir():
        found = [file for file in Path(pattern).iterdir() if file.name.endswith(ENDINGS) and file.is_file()]
    else:
        for name in expand_braces(pattern):
            if glob.has_magic(name):
                found += [Path(match) for match in glob.glob(name)]
            elif Path(name).is_file():
                found.append(Path(name))
            else:
                raise ValueError(f"there is no shard {name}, which {pattern} names")
    parts: dict[str, list[Path]] = {"train": [], "val": []}
    for file in sorted(set(found)):
        split = SPLITS.get(re.split(r"[^a-z]", file.name.lower())[0])
        if split:
            parts[split].append(file)
    return parts["train"], parts["val"]


def expand_braces(pattern: str) -> list[str]:
    """{a,b} and {000..009}, as shells do it."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if numbers:
        low, high = int(numbers[1]), int(numbers[2])
        choices = [str(number).zfill(len(numbers[1])) for number in range(low, high + 1)]
    else:
        choices = match[1].split(",")
    return [
        name for choice in choices for name in expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]
