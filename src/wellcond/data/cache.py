"""Cache of decoded images for small sets: uint8 files, memory-mapped, so that each image is decoded only once.

    data = open_cached(source, image_size=64, cache_dir=Path("cache"))

A set's folder, NAME-64px-HASH, holds train.npy and val.npy (rows, 3, 64, 64), their labels and sums, and cache.json
with the source, its fingerprint, the size, the counts and what was skipped. It is written to a temporary folder and
renamed. If its source has changed, or something is missing, it is rebuilt, by one process while others wait.
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap

from wellcond.data.dataset import DataSet, Images, pixel_sums
from wellcond.data.files import (
    FilePart,
    ImageFile,
    ImageFiles,
    Listing,
    Part,
    Skipped,
    Source,
    check_labels,
    say_why,
    saying_full,
    strict_decoding,
)
from wellcond.data.workers import cores, in_interpreters
from wellcond.records import read_json, write_json

__all__ = ["CACHE_LIMIT", "Progress", "default_cache_dir", "open_cached"]

FORMAT = 1
CACHE_LIMIT = 16 << 30
"""Bytes of decoded pixels above which a set is streamed from its files instead."""
CHUNK = 512  # images decoded between two progress calls
THREADS = 4  # at first; MANY where they wait for files, or keep the cores busy
MANY = 16
WAITING = 0.5  # they wait if less of a core is busy
WORTH = 6.0  # seconds to be saved for which processes are started
STARTING = 1.3  # seconds that a process takes to begin, so there is one
EACH = 3.0  # for so many seconds of a core's work,
PROCESSES = 16  # and no more than these: each has some 300 MB of memory

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and of how many."""


def default_cache_dir() -> Path:
    """Return $WELLCOND_CACHE, or a folder in $XDG_CACHE_HOME or ~/.cache."""
    if os.environ.get("WELLCOND_CACHE"):
        return Path(os.environ["WELLCOND_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wellcond"


def open_cached(
    source: Source, *, image_size: int, cache_dir: Path, limit: int = CACHE_LIMIT, progress: Progress | None = None
) -> DataSet:
    """Open a set from its cache, built if need be, or stream it from its files if it is larger than `limit` bytes."""
    from filelock import FileLock

    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name)[:60] or "data"
    folder = cache_dir / f"{slug}-{image_size}px-{sha256(os.fsencode(source.where)).hexdigest()[:8]}"
    found = _load(folder, source, image_size, limit)
    if found is not None:
        return found
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"), saying_full(cache_dir):  # the system releases the lock if its holder dies
        found = _load(folder, source, image_size, limit)
        if found is not None:
            return found
        for left in cache_dir.glob(f".{folder.name}.*.tmp"):  # left by a process that died while building
            shutil.rmtree(left, ignore_errors=True)
        aside = cache_dir / f".{folder.name}.{secrets.token_hex(4)}.tmp"
        aside.mkdir()
        try:
            listing = source.list(aside)
            listing.check(source.name)
            count = len(listing.train.labels) + len(listing.val.labels)
            if _too_large(count, image_size, limit):
                return _streamed(source, listing, image_size, limit)
            _check_disk(cache_dir, count, image_size)
            _build(aside, source, listing, image_size, progress)
            _put(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    found = _load(folder, source, image_size, limit)
    assert found is not None, f"{folder} cannot be read back"
    return found


def _too_large(count: int, image_size: int, limit: int) -> bool:
    return count * 3 * image_size**2 > limit


def _streamed(source: Source, listing: Listing, image_size: int, limit: int) -> DataSet:
    if not source.random_access:
        raise ValueError(
            f"{source.name} is too large for a cache of {limit / 2**30:.3g} GiB, and compressed shards cannot be "
            "streamed; unpack them to .tar (gunzip), or raise cache_limit"
        )
    train, val = (ImageFiles(part, image_size=image_size) for part in (listing.train, listing.val))
    return DataSet(name=source.name, classes=listing.classes, train=train, val=val, skipped=listing.skipped)


# ---- building


def _check_disk(cache_dir: Path, count: int, image_size: int) -> None:
    needed, free = count * 3 * image_size**2, shutil.disk_usage(cache_dir).free
    if needed > free:
        raise ValueError(
            f"decoding {count} images of {image_size} × {image_size} takes {needed / 2**30:.1f} GiB, but the disk of "
            f"{cache_dir} has {free / 2**30:.1f} GiB free; name another cache_dir, or lower cache_limit to stream them"
        )


def _build(aside: Path, source: Source, listing: Listing, image_size: int, progress: Progress | None) -> None:
    skipped: Skipped = list(listing.skipped)
    counts: dict[str, int] = {}
    for split, part in (("train", listing.train), ("val", listing.val)):
        total = len(part.labels)
        pixels = open_memmap(
            aside / f"{split}.npy", mode="w+", dtype=np.uint8, shape=(total, 3, image_size, image_size)
        )
        _reserve(aside / f"{split}.npy")
        tell = None if progress is None else partial(progress, f"decoding {source.name} ({split})")
        unreadable = _decode(part, pixels, tell)
        skipped += [(part.name(row), why) for row, why in sorted(unreadable.items())]
        kept = [row for row in range(total) if row not in unreadable]
        for place, row in enumerate(kept):
            if place != row:  # something before it was left out
                pixels[place] = pixels[row]
        labels = [int(part.labels[row]) for row in kept]
        pixels.flush()
        check_labels(labels, listing.classes, f"the {split} part of {source.name}{_say_skipped(skipped)}")
        np.save(aside / f"{split}.labels.npy", np.asarray(labels, np.int64))
        np.save(aside / f"{split}.sums.npy", pixel_sums(torch.from_numpy(pixels[: len(labels)])).numpy())
        counts[split] = len(labels)
    files = [f"{split}{kind}.npy" for split in counts for kind in ("", ".labels", ".sums")]
    for name in files:
        with open(aside / name, "rb") as file:
            os.fsync(file.fileno())
    about: dict[str, Any] = {
        "format": FORMAT, "source": source.name, "fingerprint": source.fingerprint, "image_size": image_size,
        "classes": listing.classes, "counts": counts, "skipped": skipped,
        "bytes": {name: (aside / name).stat().st_size for name in files},
    }  # fmt: skip
    for unpacked in aside.glob("*.tar"):
        unpacked.unlink()
    write_json(aside / "cache.json", about)


def _reserve(path: Path) -> None:
    """Allocate the disk space now, which may raise: later, a mapped file on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _say_skipped(skipped: Skipped) -> str:
    return f" ({len(skipped)} files could not be read, such as {skipped[0][0]}: {skipped[0][1]})" if skipped else ""


def _decode(part: Part, pixels: "np.memmap[Any, Any]", tell: Callable[[int, int], None] | None) -> dict[int, str]:
    """Fill `pixels`; return the rows that cannot be read, and why. `tell` gets how many are done, of how many.

    Threads help only where files have to be waited for, and where Pillow, which releases the GIL while it decodes, has
    much to do: with 16 of them small pictures took three times as long as with one. So processes decode all but the
    first ones where the time that these took, and the work, say that it saves seconds.
    """
    total, began, worked = len(part.labels), time.monotonic(), time.process_time()
    first, rows = range(min(CHUNK, total)), range(min(CHUNK, total), total)

    def progress(done: int) -> None:
        if tell is not None and done < total:
            tell(done, total)

    few = min(THREADS, cores())
    unreadable = _decode_rows(part, first, pixels, few, progress)
    times = len(rows) / len(first)
    by_threads, work = times * (time.monotonic() - began), times * (time.process_time() - worked)
    waited = work < WAITING * by_threads
    workers = min(cores(), PROCESSES, 1 + int(work // EACH))
    # A subclass may read its files in another way, which the processes would not know.
    if type(part) is FilePart and not waited and by_threads - work / workers - STARTING > WORTH:
        rows = _decode_in_processes(part, rows, pixels, workers, progress)
    threads = MANY if waited else min(MANY, cores()) if work > 0.75 * few * by_threads else few
    unreadable |= _decode_rows(part, rows, pixels, threads, lambda done: progress(total - len(rows) + done))
    if tell is not None:
        tell(total, total)
    return unreadable


def _decode_rows(
    part: Part, rows: Sequence[int], pixels: "np.memmap[Any, Any]", threads: int, progress: Callable[[int], None]
) -> dict[int, str]:
    """Decode these rows in threads. `progress` gets how many of them are done."""

    def one(row: int) -> str:
        try:
            pixels[row] = _fit(part.read(row), pixels.shape[-1])
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise all sorts of things on damaged files
            return say_why(error)
        return ""

    unreadable = dict[int, str]()
    with strict_decoding(), ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            for start in range(0, len(rows), CHUNK):
                some = rows[start : start + CHUNK]
                unreadable |= {row: why for row, why in zip(some, pool.map(one, some), strict=True) if why}
                progress(start + len(some))
        finally:
            pool.shutdown(cancel_futures=True)  # after an interruption, start no more
    return unreadable


def _decode_in_processes(
    part: FilePart, rows: Sequence[int], pixels: "np.memmap[Any, Any]", workers: int, progress: Callable[[int], None]
) -> list[int]:
    """Decode these rows in processes; return those left over: what cannot be read, and what a dead process left."""
    path = Path(str(pixels.filename))
    done = open_memmap(path.with_suffix(".done.npy"), mode="w+", dtype=np.uint8, shape=(len(part.labels),))
    _reserve(path.with_suffix(".done.npy"))
    jobs = [
        {"files": {row: part.files[row] for row in rows[first::workers]}, "pixels": path, "done": done.filename}
        for first in range(workers)
    ]
    before = len(part.labels) - len(rows)
    in_interpreters(
        "wellcond.data.cache:decode_files", jobs, meanwhile=lambda: progress(before + int(np.count_nonzero(done)))
    )
    left = [row for row in rows if not done[row]]
    os.unlink(str(done.filename))
    return left


def decode_files(job: Mapping[str, Any], alive: Callable[[], bool]) -> None:
    """Decode the files of one of these processes into its rows, and mark those that could be read."""
    pixels, done = np.load(job["pixels"], mmap_mode="r+"), np.load(job["done"], mmap_mode="r+")
    files: dict[int, ImageFile] = job["files"]
    part = FilePart(list(files.values()), [])
    with strict_decoding():
        for place, row in enumerate(files):
            if not alive():
                return
            with contextlib.suppress(Exception):  # it is read again by `_decode_rows`, which says why
                pixels[row] = _fit(part.read(place), pixels.shape[-1])
                done[row] = 1


def _fit(image: Any, image_size: int) -> "np.ndarray[Any, Any]":
    """Return (3, size, size): shorter side resized, centre of the longer one cropped; nothing done if it fits."""
    from PIL import Image

    width, height = image.size
    if min(width, height) != image_size:
        scale = image_size / min(width, height)
        width, height = max(image_size, round(width * scale)), max(image_size, round(height * scale))
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - image_size) // 2, (height - image_size) // 2
    if (width, height) != (image_size, image_size):
        image = image.crop((left, top, left + image_size, top + image_size))
    return np.asarray(image).transpose(2, 0, 1)


def _put(aside: Path, folder: Path) -> None:
    if folder.exists():  # stale; processes that have it mapped keep their mapping
        old = aside.with_suffix(".old.tmp")
        os.replace(folder, old)
        shutil.rmtree(old, ignore_errors=True)
    os.replace(aside, folder)


# ---- reading


def _load(folder: Path, source: Source, image_size: int, limit: int) -> DataSet | None:
    """Load the set; None if the cache is missing, stale, incomplete or larger than the limit."""
    try:
        about = read_json(folder / "cache.json")
        if (about["format"], about["fingerprint"], about["image_size"]) != (FORMAT, source.fingerprint, image_size):
            return None
        if any((folder / name).stat().st_size != size for name, size in about["bytes"].items()):
            return None
        if _too_large(sum(about["counts"].values()), image_size, limit):
            return None
        train, val = (_map(folder, split, about["counts"][split]) for split in ("train", "val"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    train = train.measured()
    val = val.normalised_by(train.mean, train.std)
    skipped = [(str(name), str(why)) for name, why in about["skipped"]]
    return DataSet(name=source.name, classes=list(about["classes"]), train=train, val=val, skipped=skipped)


def _map(folder: Path, split: str, count: int) -> Images:
    # "c" is copy-on-write: torch wants writable memory, and writes never reach the file.
    pixels = torch.from_numpy(np.load(folder / f"{split}.npy", mmap_mode="c")[:count])
    labels, sums = (torch.from_numpy(np.load(folder / f"{split}.{kind}.npy")) for kind in ("labels", "sums"))
    if len(labels) != count or len(pixels) != count:
        raise ValueError("the counts do not fit")
    unknown = torch.zeros(3)  # until the training part is measured
    return Images(pixels, labels, mean=unknown, std=unknown, sums=sums)
