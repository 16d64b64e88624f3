"""Rows and records: what a measurement looks like on disk.

    append_rows("runs/a/probe.jsonl", rows)                          # one line per row, safe to interrupt
    rows = read_rows("runs/a/probe.jsonl")
    write_record("benchmarks/kappa.json", {"ratio": 120.0}, seed=0)  # the payload, the seed and the environment

Every file is strict JSON, so that any reader can parse it. JSON has no NaN and no infinity: they are written as the
strings "NaN", "Infinity" and "-Infinity", which `float()` in Python and `Number()` in a browser turn into numbers, and
which `read_rows` and `read_json` turn back on their own. (null would not tell NaN from inf, and κ may be either.)

This module imports neither torch nor anything of ours, so a page can be rendered where torch is not installed.
"""

import json
import math
import os
import platform
import secrets
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypedDict, Unpack, get_args

__all__ = [
    "Row",
    "Site",
    "Status",
    "append_rows",
    "environment",
    "own_version",
    "read_json",
    "read_rows",
    "row",
    "write_json",
    "write_record",
    "write_text",
]

Site = Literal["in", "sa", "+sa", "mlp", "+mlp", "tokens", "embed"]
Status = Literal["ok", "ceiling", "low_precision", "non_finite", "zero"]
SITES: tuple[str, ...] = get_args(Site)
STATUSES: tuple[str, ...] = get_args(Status)

MARKS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
PACKAGES = ("wellcond", "torch", "timm", "torchvision", "triton", "numpy", "transformers")


class Row(TypedDict):
    """One measurement, flat."""

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
    """A row, checked: every field is there, and a value that is not finite says why, for `ok` vouches for a number."""
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
    """`value` in the types of JSON; whatever JSON could not give back is refused rather than bent."""
    if isinstance(value, str):
        if value in MARKS:
            raise ValueError(f"the string {value!r} stands for a number in our files and cannot be stored as text")
        return str(value)
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
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and torch, arrays and scalars, without importing either
        return _plain(value.tolist())
    raise ValueError(
        f"a {type(value).__name__} cannot be written as JSON; turn it into numbers, strings, lists or dicts"
    )


def _numbers(value: Any) -> Any:
    """The marks turned back into the numbers they stand for."""
    if isinstance(value, str):
        return MARKS.get(value, value)
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return value


def _dumps(value: Any, **options: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, **options)


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add one line per row, all in one write, and first take away what an earlier interruption left of a line."""
    data = "".join(_dumps(row) + "\n" for row in rows).encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        tail = _unfinished(file)
        if tail and _is_json(tail):  # a whole row that only lacks its newline, as editors leave it
            data = b"\n" + data
        elif tail:
            warnings.warn(f"{path}: the last line was torn by an interruption and has been removed", stacklevel=2)
            file.truncate(file.seek(0, os.SEEK_END) - len(tail))
        file.write(data)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file. A torn last line is left out, with a warning; a bad line elsewhere raises."""
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


def _unfinished(file: BinaryIO) -> bytes:
    """What follows the last newline, read from the end, for the file may be large."""
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
    """Write aside and rename, so that a reader, or a crash, finds the old file or the new one and never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(aside, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: str | Path, payload: Any) -> None:
    """`payload` as indented JSON, written aside and renamed."""
    write_text(path, _dumps(payload, indent=2) + "\n")


def read_json(path: str | Path) -> Any:
    """What `write_json` wrote, non-finite numbers included."""
    return _numbers(json.loads(Path(path).read_text(encoding="utf-8")))


def write_record(path: str | Path, payload: Mapping[str, Any], *, seed: int | None) -> None:
    """A file of evidence or of a benchmark: the payload, the seed (None where nothing is drawn) and the environment."""
    taken = {"seed", "environment"} & payload.keys()
    if taken:
        raise ValueError(
            f"the payload already has {', '.join(sorted(taken))}, which write_record adds itself; rename it"
        )
    write_json(path, {**payload, "seed": seed, "environment": environment()})


def environment() -> dict[str, Any]:
    """Command, versions, platform, CPU, device, commit and date: what someone needs to take the measurement again."""
    return {
        "command": _command(sys.argv),
        "versions": _versions(),
        "platform": " ".join(filter(None, [platform.system(), platform.machine(), *platform.libc_ver()])),
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count()},
        **_accelerator(),
        **_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _command(argv: list[str]) -> str:
    """One line for a shell. Absolute paths mean nothing elsewhere and may hold a person's name: they are shortened."""
    program, *arguments = argv or [""]
    name = "python -m wellcond" if program.endswith("__main__.py") else shlex.quote(Path(program).name)
    return " ".join([name, *(shlex.quote(_shorten(argument)) for argument in arguments)])


def _shorten(argument: str) -> str:
    option, value = _split_path(argument)
    path = Path(value)
    if not path.is_absolute():
        return argument
    here = Path.cwd()
    return option + (str(path.relative_to(here)) if path.is_relative_to(here) else path.name)


def _split_path(argument: str) -> tuple[str, str]:
    """What stands before an absolute path, and the path: of --data=/a, cifar10=wds:/a and folder:/a."""
    for start, letter in enumerate(argument):
        if letter == "/" and (start == 0 or argument[start - 1] in "=:") and argument[start : start + 2] != "//":
            return argument[:start], argument[start:]
    option, equals, value = argument.rpartition("=")  # an absolute path of another system has no slash in front
    return option + equals, value


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def own_version() -> str:
    """wellcond's version, also where it runs from its source tree and was never installed."""
    return _versions().get("wellcond", "(not installed)")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def _accelerator() -> dict[str, Any]:
    """The devices that torch sees, with its thread count and CUDA version; without torch, the CPU alone."""
    try:
        import torch
    except ImportError:
        return {"device": "cpu", "devices": []}
    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    if not names and torch.backends.mps.is_available():
        names = ["Apple MPS"]
    return {
        "device": names[0] if names else "cpu",
        "devices": names,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }


def _commit() -> dict[str, Any]:
    """The commit of this source tree, and whether the package's files differ from it (None: nobody can say)."""
    given = os.environ.get("WELLCOND_COMMIT", "").strip()
    if given:
        return {"commit": given, "dirty": None}
    here = Path(__file__).resolve()
    # An installed copy may lie inside some other project's checkout: only a tree that tracks this very file is ours.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return {"commit": None, "dirty": None}
    changes = _git(here.parent, "status", "--porcelain", "--", ".")
    return {"commit": _git(here.parent, "rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
