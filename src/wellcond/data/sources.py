"""Data sets by name, checked before any training starts. A source is a kind of data, registered under a word.

data = open_data("digits", image_size=8)                             # built in
data = open_data("imagenette", image_size=64, holdout=0.1)           # a folder; 10 % of train is validation
data = open_data("wds:shards/{train,val}-*.tar.gz", image_size=32)
sorted(SOURCES)                                                      # ['cifar10', 'cifar100', 'digits', 'folder', …]

To add a source, write a function of the text after the colon and register it under a word:

    @register_source("pairs", takes="FILE")
    def pairs(rest: str, settings: Settings) -> DataSet: …

It returns a `Source` (images in files, which are then decoded, cached and streamed for it), or a `DataSet` of `Images`,
or one whose parts make their own batches (see loading.py).
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from wellcond.data.cache import CACHE_LIMIT, Progress, default_cache_dir, open_cached
from wellcond.data.dataset import DataSet, hold_out
from wellcond.data.files import Source, shorter_side, strict_decoding
from wellcond.words import meant

__all__ = ["SOURCES", "Looked", "MissingSizeError", "Settings", "look_at", "open_data", "register_source", "same_kind"]

PLACES = ("PATH", "FOLDER", "FILE", "PATTERN")  # what sources take that can be moved; a NAME cannot
LOOKED_AT = 100  # images whose size is read


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a source may need to know."""

    image_size: int | None
    """None: the set's own, if all its images have the same size."""
    seed: int = 0
    cache_dir: Path
    progress: Progress | None = None


Opener = Callable[..., Source | DataSet]
"""Called with the text after the colon, the settings, and by keyword the options in its signature."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A registered source."""

    open: Opener
    takes: str
    """What to write after the colon, for messages: PATH, NAME; [PATH] if it is optional; empty if there is nothing."""
    wants: str = ""
    """What that is and how to get it, for a message to someone who left it out."""

    @property
    def may_stand_alone(self) -> bool:
        return not self.takes or self.takes.startswith("[")

    @property
    def options(self) -> list[str]:
        parameters = inspect.signature(self.open).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


SOURCES: dict[str, Named] = {}
"""Every source by its word; `register_source` adds to it."""


def register_source(word: str, *, takes: str = "PATH", wants: str = "") -> Callable[[Opener], Opener]:
    """Register a function as the source `word:…`; its keyword-only arguments are the source's options.

    Raises ValueError for a word that is taken, or that could be a drive or a path.
    """
    if word in SOURCES:
        raise ValueError(f"there is a source called {word!r} already; the sources are {', '.join(sorted(SOURCES))}")
    if len(word) < 2 or not word.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"a source's word has letters and digits, at least two of them; got {word!r}")

    def register(function: Opener) -> Opener:
        SOURCES[word] = Named(open=function, takes=takes, wants=wants)
        return function

    return register


def open_data(
    spec: str, *, image_size: int | None = None, cache_dir: str | Path | None = None, holdout: float = 0.0,
    seed: int = 0, cache_limit: int = CACHE_LIMIT, progress: Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> DataSet:  # fmt: skip
    """Open the data set that `spec` names:

    - `digits`: scikit-learn's, built in, 8 × 8, one channel
    - `folder:PATH`, or a plain path: train/CLASS/FILE with val/, validation/ or test/; or CLASS/FILE, of which one in
      five is held out; or train.tar with val.tar
    - `wds:PATTERN`: shards in WebDataset's format, train-*.tar[.gz] and val-*.tar[.gz]; a folder or a pattern
    - `hf:NAME`: a Hugging Face data set (`hf:NAME:CONFIG`)
    - `cifar10:PATH`, `cifar100:PATH`: the Python version, as unpacked by torchvision
    - `lra_listops`, `lra_pathfinder` (generated), `lra_text:PATH`, `lra_image:PATH`, `lra_retrieval:PATH`: the tasks of
      the Long Range Arena, sequences of tokens
    - any other registered source

    `options` are the source's own: `open_data("lra_listops", options={"tokenizer": "brackets_kept"})`.
    Images come as RGB, the shorter side resized to `image_size` and the centre kept. Sets of up to `cache_limit` bytes
    are decoded once into `cache_dir`; larger ones are streamed from their files (`ImageFiles`). With `holdout`, that
    share of each training class, drawn by `seed`, becomes `val`, and the real validation part becomes `test`.

    Raises ValueError for a missing folder, no images, an empty class, labels that do not fit, and classes that train
    and val do not share.
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size is {image_size}; it needs to be 1 or more")
    where = Path(cache_dir) if cache_dir else default_cache_dir()
    settings = Settings(image_size=image_size, seed=seed, cache_dir=where, progress=progress)
    data = _find(spec, settings, options or {})
    if isinstance(data, Source):
        if image_size is None:
            raise MissingSizeError(f"{spec} is made of images of any size; give image_size")
        data = open_cached(
            data, image_size=image_size, cache_dir=settings.cache_dir, limit=cache_limit, progress=progress
        )
    return hold_out(data, holdout, seed=seed)


def same_kind(one: str, other: str) -> bool:
    """Whether two names of data differ at most in the place: the data may have been moved, if their content agrees."""
    return one == other or _without_place(one) == _without_place(other)


def _without_place(spec: str) -> str:
    word, colon, rest = spec.partition(":")
    source = SOURCES.get(word)
    if source is None:
        return spec if colon else "folder:"
    return f"{word}:" if rest and source.takes.strip("[]") in PLACES else spec


class MissingSizeError(ValueError):
    """The set is made of images of any size, and no `image_size` was given."""


class Looked(NamedTuple):
    """A summary of a set of images in files, made without decoding all of them."""

    train: int
    val: int
    classes: list[str]
    side: int
    """The median of the shorter sides of some of them, in pixels."""
    note: str = ""


def look_at(spec: str, *, options: Mapping[str, Any] | None = None) -> Looked | None:
    """Return how many images the set has and how large they are; None if it is not made of image files.

    Raises ValueError for missing data, as `open_data` would.
    """
    import tempfile

    found = _find(spec, Settings(image_size=None, cache_dir=default_cache_dir()), options or {})
    if not isinstance(found, Source):
        return None
    with tempfile.TemporaryDirectory() as scratch, strict_decoding():
        listing = found.list(Path(scratch))
        count = len(listing.train.labels)
        sides = []
        for row in range(0, count, max(1, count // LOOKED_AT)):
            with contextlib.suppress(Exception):  # a damaged file is reported when all are decoded
                sides.append(shorter_side(listing.train, row))
    side = int(median(sides)) if sides else 0
    return Looked(count, len(listing.val.labels), listing.classes, side, found.note)


def _find(spec: str, settings: Settings, options: Mapping[str, Any]) -> Source | DataSet:
    word, colon, rest = spec.partition(":")
    source = SOURCES.get(word)
    is_path = not colon and Path(spec).expanduser().exists()
    if source is not None and (source.may_stand_alone or not is_path):
        if not rest and not source.may_stand_alone:
            wants = f", where {source.takes} is {source.wants}" if source.wants else ""
            what = "nothing after the colon" if colon else "no data"
            raise ValueError(f"{spec!r} names {what}; write {word}:{source.takes}{wants}")
        unknown = [name for name in options if name not in source.options]
        if unknown:
            known = ", ".join(source.options) or "none"
            near = meant(unknown[0], source.options)
            raise ValueError(f"{word} has no option {unknown[0]!r}{near} (its options: {known})")
        return source.open(rest, settings, **options)
    if not is_path:
        words = [f"{name}:{known.takes}" if known.takes else name for name, known in sorted(SOURCES.items())]
        near = "" if "/" in word else meant(word, SOURCES)
        why = f"no source {word!r}{near}" if colon else f"no such folder{near}"
        raise ValueError(f"unknown data {spec!r}: there is {why} (write a path, or one of {', '.join(words)})")
    if options:
        raise ValueError(f"a folder of images has no options; got {', '.join(options)}")
    return SOURCES["folder"].open(spec, settings)
