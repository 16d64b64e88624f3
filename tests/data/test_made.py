import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest

from wellcond.data.made import Made
from wellcond.data.pathfinder import make_piece
from wellcond.data.sequences import Rows

SLOW = """
import sys, time
from pathlib import Path
import numpy as np
from wellcond.data.made import Made
from wellcond.data.sequences import Rows
def make(i):
    time.sleep(0.05)
    return Rows(np.full(1000, i, np.uint8), np.array([400, 600], np.int32), np.array([0, 1], np.uint8))
made = Made(Path(sys.argv[1]), "slow", {"seed": 1}, make)
for i in range(1000):
    made.piece(i)
"""


def rows(number: int) -> Rows:
    return Rows(np.full(1000, number, np.uint8), np.array([400, 600], np.int32), np.array([0, 1], np.uint8))


class Counted:
    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, number: int) -> Rows:
        self.made.append(number)
        return rows(number)


def same(one: Rows, other: Rows) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_piece_is_made_once(tmp_path: Path) -> None:
    make = Counted()
    for _ in range(2):
        made = Made(tmp_path, "x", {"seed": 1}, make)
        assert same(made.piece(2), rows(2))
    assert make.made == [2]
    assert not made.was_made
    Made(tmp_path, "x", {"seed": 2}, make).piece(2)
    assert make.made == [2, 2]
    assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "nonsense", "another", "gone"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_damaged_piece_is_made_again(tmp_path: Path, damage: str, compression: int) -> None:
    make = Counted()
    made = Made(tmp_path, "x", {}, make, compression=compression)
    made.piece(0)
    path, content = made.path(0), bytearray(made.path(0).read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "another":
        np.savez(path, tokens=np.zeros(3, np.uint8), lengths=np.array([9]), labels=np.array([1]))
    else:
        content[60:64] = b"\0\1\2\3"  # within the compressed bytes of the first array
        changed = {"cut": content[: len(content) // 2], "empty": b"", "flipped": content, "nonsense": b"x" * 999}
        path.write_bytes(changed[damage])
    again = Made(tmp_path, "x", {}, make)
    assert same(again.piece(0), rows(0))
    assert make.made == [0, 0]
    assert same(Made(tmp_path, "x", {}, make).piece(0), rows(0))
    assert make.made == [0, 0]


def test_what_was_made_before_a_kill_stays(launcher, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    process = launcher.program(SLOW, tmp_path, log=tmp_path_factory.mktemp("log") / "log.txt")
    process.until(lambda: len(list(tmp_path.rglob("*.npz"))) >= 3)
    assert process.kill() == [-signal.SIGKILL], process.output()
    before = len(list(tmp_path.rglob("*.npz")))
    (next(tmp_path.iterdir()) / f".{before:05d}.half.tmp").write_bytes(b"as a kill in the middle of writing leaves it")
    assert before >= 3
    make = Counted()
    made = Made(tmp_path, "slow", {"seed": 1}, make)
    for number in range(before + 2):
        assert same(made.piece(number), rows(number))
    assert make.made == [before, before + 1]
    assert not list(tmp_path.rglob("*.tmp"))


def test_workers_make_what_one_process_makes(tmp_path: Path) -> None:
    settings = {"seed": 5, "contour": 6, "piece": 4}
    made = Made(tmp_path, "pathfinder", settings, lambda number: pytest.fail("a worker has made it"))
    told: list[tuple[str, int, int]] = []
    made.fill(
        3, "wellcond.data.pathfinder:make_piece", settings, unit=4, workers=1,
        progress=lambda what, done, total: told.append((what, done, total)),
    )  # fmt: skip
    for number in range(3):
        assert same(made.piece(number), make_piece(number, **settings))
    assert told[-1] == ("generating pathfinder", 12, 12)
