"""Class folders: train/CLASS/FILE and val/CLASS/FILE, on disk as torchvision's ImageFolder reads them.

source = folder_source(Path("imagenette"))        # or a folder with train.tar and val.tar, or with shards
listing = source.list(scratch)
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from wellcond.data.archives import FOUND_SHARDS, archive_source, find_shards
from wellcond.data.files import FilePart, Listing, Source, compare_classes, stat_line
from wellcond.data.finding import SUFFIXES, ImageFile, Skipped, is_utf8, printable, walk_images
from wellcond.data.sources import Settings, register_source

__all__ = ["VALIDATION", "folder_source"]

VALIDATION = ("val", "validation", "valid", "test")  # the first that exists


def folder_source(path: Path) -> Source:
    """What `path` holds: folders of classes, train.tar and val.tar, or shards."""
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
    there = sorted(other.name + "/" * other.is_dir() for other in path.iterdir() if not other.name.startswith("."))
    raise ValueError(
        f"{path} needs train/ and one of {', '.join(name + '/' for name in VALIDATION)} (or train.tar and val.tar, "
        f"or {FOUND_SHARDS}); it holds {', '.join(there[:8]) + (', …' if len(there) > 8 else '') or 'nothing'}"
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
        place = {name: label for label, name in enumerate(classes[train])}
        parts = {
            split: FilePart(
                [ImageFile(f"{split.name}/{name}", str(file)) for name, file in found[split.name]],
                [place[PurePosixPath(name).parts[0]] for name, _ in found[split.name]],
            )
            for split in (train, val)
        }
        return Listing(classes=classes[train], train=parts[train], val=parts[val], skipped=skipped)

    fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Source(name=printable(path.resolve().name), where=str(path.resolve()), fingerprint=fingerprint, list=listing)


def _folders(split: Path) -> list[str]:
    return sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_names(split: Path, names: Iterable[str], skipped: Skipped) -> list[str]:
    """The folders below; each has to hold an image, and no image may lie beside them."""
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
