"""JSON on disk: rows, one line each, and whole files, all safe to interrupt.

    append_rows("rows.jsonl", rows)                                  # one line per row
    rows = read_rows("rows.jsonl")
    write_record("benchmarks/kappa.json", {"ratio": 120.0}, seed=0)  # the payload, the seed and the environment

Every file is strict JSON, so that any reader can parse it. JSON has no NaN and no infinity: they are written as the
strings "NaN", "Infinity" and "-Infinity", which `float()` in Python and `Number()` in a browser turn into numbers, and
which `read_rows` and `read_json` turn back on their own. (null would not tell NaN from inf, and κ may be either.) Text
that equals one of these words, such as a class name, is written with a backslash before it: "\\\\NaN" in the file.
"""

import contextlib
import errno
import json
import math
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, Unpack

from wellcond.environment import environment
from wellcond.words import SITES, STATUSES, Site, Status

__all__ = [
    "Row",
    "Site",
    "Status",
    "append_rows",
    "check_writable",
    "finite_or_inf",
    "fsync",
    "read_json",
    "read_rows",
    "replace_rows",
    "row",
    "write_json",
    "write_record",
    "write_text",
]

MARKS: dict[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The strings that stand in JSON for numbers that JSON does not have."""
WIDTH = 120  # characters per line of a JSON file


def finite_or_inf(value: float) -> float:
    """Return a finite value as it is, and infinity for any other: where the worst is looked for, NaN is worse."""
    return value if math.isfinite(value) else math.inf


class Row(TypedDict):
    """One measurement, as a flat dict."""

    run: str
    step: int
    block: str  # module path: "blocks.3"
    index: int  # 3
    site: Site
    name: str  # what was measured: "log_kappa"
    value: float
    count: int  # how many samples the value stands for
    dtype: str  # of the measured tensor: "float32"
    status: Status


def row(**fields: Unpack[Row]) -> Row:
    """Return a row, checked: every field is there, and a value that is not finite has a status that says why."""
    if fields.keys() != Row.__required_keys__:
        raise ValueError(f"a row has the fields {', '.join(Row.__annotations__)}; these were {', '.join(fields)}")
    site, status, value = fields["site"], fields["status"], float(fields["value"])
    if site not in SITES:
        raise ValueError(f"unknown site {site!r}; the sites are {', '.join(SITES)}")
    if status not in STATUSES:
        raise ValueError(f"unknown status {status!r}; the statuses are {', '.join(STATUSES)}")
    if status == "ok" and not math.isfinite(value):
        raise ValueError(
            f"{fields['name']} of {fields['block']} is {value}, but its status is 'ok'; say why in its status"
        )
    return {**fields, "value": value}


def _plain(value: Any) -> Any:
    """Convert `value` to the types of JSON. Raises ValueError for what JSON could not give back unchanged."""
    if isinstance(value, str):
        return f"\\{value}" if value.lstrip("\\") in MARKS else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not a string, and JSON has no other keys")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value))
    if hasattr(value, "tolist"):  # numpy and torch, arrays and scalars, without importing either
        return _plain(value.tolist())
    raise ValueError(
        f"a {type(value).__name__} cannot be written as JSON; turn it into numbers, strings, lists or dicts"
    )


def _numbers(value: Any) -> Any:
    """Turn marks back into the numbers they stand for."""
    if isinstance(value, str):
        return value[1:] if value[:1] == "\\" and value.lstrip("\\") in MARKS else MARKS.get(value, value)
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return value


def _dumps(plain: Any) -> str:
    return json.dumps(plain, ensure_ascii=False, allow_nan=False)


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per row, all in one write, after removing a torn last line left by an earlier interruption."""
    data = "".join(_dumps(_plain(row)) + "\n" for row in rows).encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), open(path, "a+b") as file:
        tail = _unfinished(file)
        if tail and _is_json(tail):  # a whole row that only lacks its newline, as some editors leave it
            data = b"\n" + data
        elif tail:
            warnings.warn(f"{path}: the last line was torn by an interruption and has been removed", stacklevel=2)
            file.truncate(file.seek(0, os.SEEK_END) - len(tail))
        file.write(data)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file. A torn last line is left out with a warning; other bad lines raise."""
    *lines, tail = Path(path).read_bytes().split(b"\n")
    if tail and _is_json(tail):
        lines.append(tail)
    elif tail:
        warnings.warn(f"{path}: the last line, {len(lines) + 1}, is torn and was left out", stacklevel=2)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_numbers(json.loads(line)))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}); remove that line to read the rest"
            ) from None
    return rows


def replace_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace all rows of a file, by writing a temporary file and renaming it."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    append_rows(aside, rows)
    fsync(aside)
    aside.replace(path)


def _unfinished(file: BinaryIO) -> bytes:
    """Return what follows the last newline, read from the end because the file may be large."""
    start, tail = file.seek(0, os.SEEK_END), b""
    while start > 0 and b"\n" not in tail:
        size = min(start, 65536)
        start = file.seek(start - size)
        tail = file.read(size) + tail
    return tail.rpartition(b"\n")[2]


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def write_text(path: str | Path, text: str) -> None:
    """Write a temporary file and rename it: even after a crash, readers find the old file or the new, never half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with _naming(path):
            with open(aside, "x", encoding="utf-8", newline="\n") as file:
                file.write(text)
            fsync(aside)
            os.replace(aside, path)
        fsync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def fsync(path: str | Path) -> None:
    """Flush a file's content, or a folder's entries, to disk (fsync), so that they survive a power failure."""
    if os.name == "nt" and Path(path).is_dir():  # Windows cannot open folders
        return
    with _naming(path):
        handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems do not support it for folders
                raise
        finally:
            os.close(handle)


@contextlib.contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Add the file's name to errors that come without it, such as that of writing to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: str | Path, payload: Any) -> None:
    """Write `payload` as indented JSON, with short values on one line, to a temporary file, and rename it."""
    write_text(path, _laid_out(_plain(payload), "") + "\n")


def _laid_out(value: Any, indent: str, used: int = 0) -> str:
    """Return JSON of plain values, to follow `used` characters of a line: what fits on that line stays on it. Long
    lists of numbers fill their lines, because a curve has hundreds."""
    line = _dumps(value)
    if not isinstance(value, dict | list) or len(indent) + used + len(line) < WIDTH:
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        keys = [f"{_dumps(key)}: " for key in value]
        parts = [key + _laid_out(one, inner, len(key)) for key, one in zip(keys, value.values(), strict=True)]
    elif any(isinstance(one, dict | list) for one in value):
        parts = [_laid_out(one, inner) for one in value]
    else:
        parts = [""]
        for one in map(_dumps, value):
            if len(inner) + len(parts[-1]) + len(one) + 2 < WIDTH:
                parts[-1] += f", {one}" if parts[-1] else one
            else:
                parts.append(one)
    inside = f",\n{inner}".join(filter(None, parts))
    return f"{line[0]}\n{inner}{inside}\n{indent}{line[-1]}"


def read_json(path: str | Path) -> Any:
    """Return what `write_json` wrote, including non-finite numbers. ValueError names a file that is damaged."""
    try:
        return _numbers(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): put it back from a copy, or move it away") from None


def write_record(path: str | Path, payload: Mapping[str, Any], *, seed: int | None) -> None:
    """Write a file of evidence or of a benchmark: payload, seed (None if nothing is random) and environment.

    A file with the same payload and seed is left as it is, with the environment that it was first made in."""
    taken = {"seed", "environment"} & payload.keys()
    if taken:
        raise ValueError(
            f"the payload already has {', '.join(sorted(taken))}, which write_record adds itself; rename it"
        )
    content = {**payload, "seed": seed}
    if not _holds(Path(path), content):
        write_json(path, {**content, "environment": environment()})


def _holds(path: Path, content: Mapping[str, Any]) -> bool:
    """Whether a file has this content beside its environment."""
    try:
        before = read_json(path)
    except (OSError, ValueError):
        return False
    if not isinstance(before, dict) or "environment" not in before:
        return False
    before.pop("environment")
    return _dumps(_plain(before)) == _dumps(_plain(content))


def check_writable(*files: Path) -> None:
    """Check that files can be written, before the work whose results they will hold.

    Creates the folders and a file in each, and removes all of it again. Raises ValueError if that fails, or if a folder
    is in a file's place. Permissions are not consulted: they do not show that a file system is full or read-only, or
    is none at all.
    """
    for file in files:
        if file.is_dir():
            raise ValueError(f"{file} is a folder, and a file has to be written there; choose another output")
    for folder in dict.fromkeys(file.parent for file in files):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".wellcond-", dir=folder) as file:
                file.write(b"?")
        except OSError as error:
            raise ValueError(
                f"nothing can be written to {folder} ({error.strerror or error}); choose another output"
            ) from None
        finally:
            for made in missing:
                with contextlib.suppress(OSError):  # it was not created, or something has been put there meanwhile
                    made.rmdir()
