"""Labelled images in folders, tar archives and shards, in the layouts of torchvision, timm and WebDataset.

    folder_source(Path("imagenette"))            # train/CLASS/FILE and val/CLASS/FILE; or one with train.tar, or shards
    folder_source(Path("photos"))                # CLASS/FILE: one image in five is held out for validation
    archive_source([Path("train.tar")], [Path("val.tar")], name="pets")    # members train/CLASS/FILE
    shard_source("shards/{train,val}-*.tar")                               # members KEY.jpg and KEY.cls, or as above

Nothing is extracted from an archive. A label in a shard is the number or name in KEY.cls, KEY.label or the "label" (or
"cls") of KEY.json; without these, it is the first folder in the member's name, after the split. Compressed shards are
decompressed first, since their members cannot be looked up.
"""

import glob
import gzip
import hashlib
import json
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

from wellcond.data.files import (
    DISK_FULL,
    NOT_UTF8,
    SUFFIXES,
    FilePart,
    ImageFile,
    Listing,
    Skipped,
    Source,
    check_regular,
    compare_classes,
    is_image,
    is_utf8,
    list_members,
    printable,
    say_why,
    sort_names,
    stat_line,
    walk_images,
)
from wellcond.data.sources import Settings, register_source

__all__ = [
    "FOUND_SHARDS",
    "VALIDATION",
    "archive_source",
    "expand_braces",
    "find_shards",
    "folder_source",
    "shard_source",
]

VALIDATION = ("val", "validation", "valid", "test")  # the first that exists is used
HELD_OUT = 5  # one image in so many, if a folder has no validation part
ENDINGS = (".tar", ".tar.gz", ".tgz")
FOUND_SHARDS = "train-*.tar[.gz] and val-*.tar[.gz]"
LABELS = {"cls": 1 << 10, "label": 1 << 10, "json": 1 << 24}  # extensions of label files, with size limits
UNPACKED_TIMES, UNPACKED_BYTES = 100, 64 << 20  # how much a compressed archive may unpack to: the larger one
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "val"}


def folder_source(path: Path) -> Source:
    """Return the source in the folder `path`: class folders, train.tar and val.tar, or shards."""
    if not path.exists():
        raise ValueError(f"there is no folder {path}; name one with train/CLASS/FILE and val/CLASS/FILE")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; name the folder that holds train/ and val/, or train.tar and val.tar")
    train, val = path / "train", _first(path, "")
    if train.is_dir() and val is not None and val.is_dir():
        return _tree_source(path, train, val)
    tar = _first(path, ".tar")
    if (path / "train.tar").is_file() and tar is not None:
        return archive_source([path / "train.tar"], [tar], name=printable(path.resolve().name))
    shards = find_shards(str(path))
    if all(shards):
        return archive_source(*shards, name=printable(path.resolve().name))
    classes = train if train.is_dir() else path
    filled = _with_images(classes)
    if val is None and len(filled) > 1:
        return _divided_source(path, classes)
    if val is None and len(filled) == 1:
        raise ValueError(f"{classes} has images of one class only, {filled[0]}/; two are needed to tell apart")
    there = sorted(other.name + "/" * other.is_dir() for other in path.iterdir() if not other.name.startswith("."))
    holds = ", ".join(there[:8]) + (", …" if len(there) > 8 else "") or "nothing"
    raise ValueError(
        f"{path} needs train/ and one of {', '.join(name + '/' for name in VALIDATION)}, in each a folder of images "
        f"for each class (or these alone, or train.tar and val.tar, or {FOUND_SHARDS}); it holds {holds}"
    )


def _first(path: Path, suffix: str) -> Path | None:
    return next((path / (name + suffix) for name in VALIDATION if (path / (name + suffix)).exists()), None)


def _tree_source(path: Path, train: Path, val: Path) -> Source:
    skipped: Skipped = []
    found: dict[str, list[tuple[str, Path]]] = {}
    for split in (train, val):
        odd: Skipped = []
        found[split.name] = sorted(walk_images(split, odd))
        skipped += [(f"{split.name}/{name}", why) for name, why in odd]
    lines = [f"{split} {name} {stat_line(file)}" for split, files in found.items() for name, file in files]
    lines += [f"{split.name} {printable(name)}" for split in (train, val) for name in _folders(split)]
    lines += [f"{name} {why}" for name, why in skipped]

    def listing(scratch: Path) -> Listing:
        classes = {
            split: _class_names(split, [name for name, _ in found[split.name]], skipped) for split in (train, val)
        }
        compare_classes(classes[train], classes[val], where=str(path))
        parts = [_part(found[split.name], classes[train], f"{split.name}/") for split in (train, val)]
        return Listing(classes=classes[train], train=parts[0], val=parts[1], skipped=skipped)

    return _source(path, lines, listing)


def _divided_source(path: Path, folder: Path) -> Source:
    """Return the source of class folders without a validation part: one in `HELD_OUT` images of each is held out."""
    skipped: Skipped = []
    found = sorted(walk_images(folder, skipped))
    lines = [f"{name} {stat_line(file)}" for name, file in found]
    lines += [*map(printable, _folders(folder)), *(f"{name} {why}" for name, why in skipped)]

    def listing(scratch: Path) -> Listing:
        classes = _class_names(folder, [name for name, _ in found], skipped)
        held = _held_out([name for name, _ in found], folder)
        parts = [[(name, file) for name, file in found if (name in held) is out] for out in (False, True)]
        train, val = (_part(part, classes) for part in parts)
        return Listing(classes=classes, train=train, val=val, skipped=skipped)

    note = f"it has no val/, so one picture of {HELD_OUT} of each class is held out for validation"
    return _source(path, ["held out", *lines], listing, note)


def _part(files: Sequence[tuple[str, Path]], classes: Sequence[str], within: str = "") -> FilePart:
    """Return the part of these images, named CLASS/FILE in the folder `within`."""
    place = {name: label for label, name in enumerate(classes)}
    labels = [place[PurePosixPath(name).parts[0]] for name, _ in files]
    return FilePart([ImageFile(within + name, str(file)) for name, file in files], labels)


def _source(path: Path, lines: Sequence[str], listing: Callable[[Path], Listing], note: str = "") -> Source:
    """Return the source of a folder; `lines` change when its files do."""
    fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    where = path.resolve()
    return Source(name=printable(where.name), where=str(where), fingerprint=fingerprint, list=listing, note=note)


def _held_out(names: Sequence[str], folder: Path) -> set[str]:
    """Choose one image in `HELD_OUT` of each class, by a hash of the name: the same wherever the folder is."""
    classes: dict[str, list[str]] = {}
    for name in names:
        classes.setdefault(PurePosixPath(name).parts[0], []).append(name)
    held: set[str] = set()
    for label, members in classes.items():
        if len(members) < 2:
            raise ValueError(f"the class folder {folder / label} holds one image; two are needed, one to validate on")
        members.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        held.update(members[: max(1, round(len(members) / HELD_OUT))])
    return held


def _with_images(folder: Path) -> list[str]:
    return [name for name in _folders(folder) if next(walk_images(folder / name, []), None) is not None]


def _folders(split: Path) -> list[str]:
    return sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_names(split: Path, names: Iterable[str], skipped: Skipped) -> list[str]:
    """Return the class folders in `split`; each has to hold an image, and no image may lie outside them."""
    with_images = {PurePosixPath(name).parts[0] if "/" in name else "" for name in names}
    if not with_images:
        raise ValueError(f"no images in {split} or below (looked for {', '.join(SUFFIXES)} in any case){_say(skipped)}")
    if "" in with_images:
        loose = next(name for name in names if "/" not in name)
        raise ValueError(f"{split / loose} lies in no class folder, so it has no label; move it into {split}/CLASS/")
    folders = _folders(split)
    odd = [printable(name) for name in folders if not is_utf8(name)]
    if odd:
        raise ValueError(f"the name of the class folder {odd[0]} in {split} is not UTF-8; rename it, as with convmv")
    empty = [name for name in folders if name not in with_images]
    if empty:
        inside = [(name, why) for name, why in skipped if f"{name}/".startswith(f"{split.name}/{empty[0]}/")]
        raise ValueError(
            f"the class folder {split / empty[0]} holds no image{_say(inside)}; add some, or remove the folder"
        )
    return folders


def _say(skipped: Skipped) -> str:
    return f" ({skipped[0][0]} cannot be read: {skipped[0][1]})" if skipped else ""


@register_source("folder")
def _folder(rest: str, _settings: Settings) -> Source:
    return folder_source(Path(rest).expanduser())


# ---- archives and shards


def shard_source(pattern: str) -> Source:
    """Return the source for shards in a folder, or given by a pattern with *, ?, {train,val} and {000..009}."""
    train, val = find_shards(pattern)
    for files, split in ((train, "train"), (val, "val")):
        if not files:
            raise ValueError(
                f"no {split} shards in {pattern}; their names start with it ({FOUND_SHARDS}), "
                "so name their folder, or both parts, as in 'wds:shards/{train,val}-*.tar'"
            )
    return archive_source(train, val, name=printable(train[0].resolve().parent.name))


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
        fingerprint=hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest(),
        random_access=not any(file.name.endswith("gz") for file in files),
    )  # fmt: skip


def _name_classes(labels: set[str], where: str) -> list[str]:
    classes = sort_names(labels)
    if classes[0] in ("0", "1") and all(label.isdecimal() for label in classes):
        numbers = [int(label) for label in classes]
        gap = next((low + 1 for low, high in pairwise(numbers) if high > low + 1), None)
        if gap is not None:
            raise ValueError(
                f"the labels in {where} are numbers from {numbers[0]} to {numbers[-1]}, but none is {gap}: "
                "that class is empty, or the labels do not fit"
            )
    return classes


# ---- members


def _list_members(archives: Sequence[Path], split: str, scratch: Path, skipped: Skipped) -> list[tuple[ImageFile, str]]:
    """Return images with their class names, in the order of the archives."""
    found: list[tuple[ImageFile, str]] = []
    for number, archive in enumerate(archives):
        images: dict[str, ImageFile] = {}
        labels: dict[str, str] = {}
        folders: set[str] = set()
        plain = archive
        try:
            check_regular(archive)
        except (OSError, ValueError) as error:
            skipped.append((archive.name, say_why(error)))
            continue
        try:
            if archive.name.endswith("gz"):
                plain = scratch / f"{split}-{number}.tar"
                _unpack(archive, plain, skipped)
            for member in list_members(plain, skipped, name=archive.name):
                file = ImageFile(member.name, str(plain), member.offset_data, member.size)
                if member.isdir():
                    folders.add(_class_of(f"{member.name}/x"))
                elif PurePosixPath(member.name).name.startswith("."):
                    continue
                elif is_image(PurePosixPath(member.name).name):
                    images[member.name] = file._replace(name=f"{archive.name}:{printable(member.name)}")
                elif _key(member.name)[1] in LABELS:
                    labels.update(_read_label(file, archive))
        except (tarfile.TarError, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            skipped.append((archive.name, f"it cannot be read as a tar archive ({say_why(error)})"))
        here: list[tuple[ImageFile, str]] = []
        for name, image in images.items():
            label = labels.get(_key(name)[0]) or _class_of(name)
            if not label:
                raise ValueError(
                    f"{printable(name)} in {archive} has no label: put {printable(_key(name)[0])}.cls beside it in the "
                    "archive, or put it into a folder named after its class"
                )
            if not is_utf8(label):
                raise ValueError(
                    f"the name of the class folder {printable(label)} in {archive} is not UTF-8; rename it"
                )
            if is_utf8(name):
                here.append((image, label))
            else:
                skipped.append((image.name, NOT_UTF8))
        found += here
        empty = folders - {label for _, label in here} - {""}
        if empty and not labels and len(archives) == 1:
            raise ValueError(
                f"the class folder {printable(min(empty))} in {archive} holds no image; add some, or remove the folder"
            )
    return found


def _unpack(archive: Path, plain: Path, skipped: Skipped) -> None:
    most = max(UNPACKED_BYTES, UNPACKED_TIMES * archive.stat().st_size)
    with gzip.open(archive, "rb") as packed, open(plain, "wb") as file:
        try:
            while block := packed.read(1 << 20):
                if file.tell() + len(block) > most:
                    raise ValueError(
                        f"{archive} unpacks to more than {UNPACKED_TIMES} times its size, as no images do; if it "
                        "should, gunzip it and name the .tar"
                    )
                file.write(block)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            skipped.append((archive.name, f"its compression is damaged ({error}); what comes before is used"))


def _key(name: str) -> tuple[str, str]:
    """Split a name into WebDataset's key and extension, at the first dot of its last part."""
    folder, slash, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return folder + slash + key, ending.lower()


def _class_of(name: str) -> str:
    """Return the class in train/CLASS/… or CLASS/…; empty if there is no folder. `..` is never a class."""
    folders = [part for part in posixpath.normpath(name).split("/")[:-1] if part not in ("", ".", "..")]
    if folders and folders[0] in SPLITS:
        folders = folders[1:]
    return folders[0] if folders else ""


def _read_label(file: ImageFile, archive: Path) -> dict[str, str]:
    key, ending = _key(file.name)
    name = f"{archive}: {printable(file.name)}"
    if file.size > LABELS[ending]:
        raise ValueError(f"{name} has {file.size:,} bytes, and a label up to {LABELS[ending]:,}: it is no label")
    with file.open() as opened:
        content = opened.read()
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"{name} holds {content[:40]!r}, which is not UTF-8; write the label anew") from None
    if ending == "json":
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is no JSON ({error})") from error
        found = record.get("label", record.get("cls")) if isinstance(record, dict) else None
        if found is None:
            return {}
        text = str(found).strip() if isinstance(found, str | int | float) else ""
    if not text or "\n" in text or len(text) > LABELS["cls"]:
        raise ValueError(f"{name} holds {text[:40]!r}, which is no label: one number or name is needed")
    return {key: text}


# ---- which shards


def find_shards(pattern: str) -> tuple[list[Path], list[Path]]:
    """Return the training and the validation shards of a folder or a pattern, sorted by name."""
    found: list[Path] = []
    if Path(pattern).is_dir():
        found = [file for file in Path(pattern).iterdir() if file.name.endswith(ENDINGS) and not file.is_dir()]
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
    """Expand {a,b} and {000..009} as shells do."""
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


@register_source("wds", takes="PATTERN")
def _shards(rest: str, _settings: Settings) -> Source:
    return shard_source(os.path.expanduser(rest))
