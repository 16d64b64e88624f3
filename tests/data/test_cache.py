import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from wellcond.data import DataSet, ImageFiles, Images, open_data
from wellcond.data import cache as module
from wellcond.data.files import FilePart, ImageFile
from wellcond.data.workers import in_interpreters
from wellcond.records import read_json

SIZE = 16


def open_small(tree: Path, cache: Path, **settings) -> tuple[DataSet, int]:
    """The data, and for how many parts images were decoded."""
    finished = []

    def progress(what: str, done: int, total: int) -> None:
        if done == total:
            finished.append(what)

    return open_data(str(tree), image_size=SIZE, cache_dir=cache, progress=progress, **settings), len(finished)


def pixels_of(data: DataSet) -> torch.Tensor:
    assert isinstance(data.train, Images)
    return data.train.pixels


def cache_folder(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_decoded_once_and_mapped(make_tree, cache: Path) -> None:
    tree = make_tree()
    first, built = open_small(tree, cache)
    again, rebuilt = open_small(tree, cache)
    assert (built, rebuilt) == (2, 0)
    assert torch.equal(pixels_of(first), pixels_of(again))
    assert torch.equal(first.train.labels, again.train.labels)
    about = read_json(cache_folder(cache) / "cache.json")
    assert about["counts"] == {"train": 12, "val": 6}
    assert (about["source"], about["image_size"], about["skipped"]) == ("photos", SIZE, [])
    assert str(tree.parent) not in (cache_folder(cache) / "cache.json").read_text()
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(cache_folder(cache) / "train.npy") in mapped.read_text()


def test_the_files_are_no_part_of_what_a_reader_changes(make_tree, cache: Path) -> None:
    tree = make_tree()
    data, _ = open_small(tree, cache)
    before = pixels_of(data).clone()
    pixels_of(data).zero_()  # private pages
    assert torch.equal(pixels_of(open_small(tree, cache)[0]), before)


def test_another_size_or_place_is_another_cache(make_tree, cache: Path) -> None:
    tree, other = make_tree(), make_tree("deeper/photos")
    open_small(tree, cache)
    assert open_small(other, cache)[1] == 2
    open_data(str(tree), image_size=8, cache_dir=cache)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3
    assert open_small(tree, cache)[1] == 0


def test_a_changed_source_is_read_anew(make_tree, cache: Path) -> None:
    tree = make_tree()
    old, _ = open_small(tree, cache)
    before = pixels_of(old).clone()
    file = tree / "train" / "china" / "000.png"
    Image.open(file).rotate(180).save(file)
    new, built = open_small(tree, cache)
    assert built == 2
    assert not torch.equal(pixels_of(new)[0], before[0])
    assert torch.equal(pixels_of(new)[1:], before[1:])
    assert torch.equal(pixels_of(old), before)  # whoever has the old one open keeps it
    file.unlink()
    assert len(open_small(tree, cache)[0].train) == 11


@pytest.mark.parametrize("harm", ["short", "missing", "json", "no json", "format", "labels"])
def test_an_incomplete_cache_is_built_anew(make_tree, cache: Path, harm: str) -> None:
    tree = make_tree()
    first, _ = open_small(tree, cache)
    before = pixels_of(first).clone()
    del first
    folder = cache_folder(cache)
    if harm == "short":
        os.truncate(folder / "val.npy", 1000)
    elif harm == "missing":
        (folder / "train.sums.npy").unlink()
    elif harm == "json":
        (folder / "cache.json").write_text('{"format": 1, "source"')
    elif harm == "no json":
        (folder / "cache.json").unlink()
    elif harm == "format":
        text = (folder / "cache.json").read_text()
        (folder / "cache.json").write_text(text.replace('"format": 1', '"format": 0'))
    else:
        np.save(folder / "train.labels.npy", np.zeros(3, np.int64))
    data, built = open_small(tree, cache)
    assert built == 2
    assert torch.equal(pixels_of(data), before)


def in_processes(monkeypatch: pytest.MonkeyPatch, together: int = 4) -> None:
    monkeypatch.setattr(module, "WORTH", -9.0)
    monkeypatch.setattr(module, "EACH", 1e-9)
    monkeypatch.setattr(module, "CHUNK", together)
    monkeypatch.setattr(module, "WAITING", 0.0)
    monkeypatch.setattr(module, "cores", lambda: 2)


def test_processes_decode_what_threads_do(make_tree, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(train=9)
    broken = [tree / "train" / "china" / f"{row:03d}.png" for row in (0, 5, 8)]  # of threads, and of both processes
    for file in broken:
        file.write_bytes(b"no picture")
    plain, _ = open_small(tree, cache)
    in_processes(monkeypatch)
    started = []
    run = module.in_interpreters

    def counted(function: str, jobs: list, **how) -> list[int]:
        started.append(len(jobs))
        return run(function, jobs, **how)

    monkeypatch.setattr(module, "in_interpreters", counted)
    data, finished = open_small(tree, cache.parent / "other")
    assert started == [2, 2]
    assert finished == 2
    assert data.skipped == plain.skipped
    assert [name for name, _ in data.skipped] == [file.relative_to(tree).as_posix() for file in broken]
    assert torch.equal(pixels_of(data), pixels_of(plain))
    assert torch.equal(data.train.labels, plain.train.labels)
    assert not list(cache_folder(cache.parent / "other").glob("*.done*"))


def test_what_a_dead_process_leaves_is_decoded(make_tree, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(train=9)
    before = pixels_of(open_small(tree, cache)[0]).clone()
    in_processes(monkeypatch, together=2)
    real = subprocess.Popen
    started = []

    def dying(*arguments, **settings) -> subprocess.Popen:
        started.append(real(*arguments, **settings))
        if len(started) == 1:
            started[0].kill()
            started[0].wait()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", dying)
    told: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        if "train" in what:
            told.append(done)

    with pytest.warns(UserWarning, match=r"of 2 processes .*decode_files, 1 failed .exit code -9.; this one does"):
        data = open_data(str(tree), image_size=SIZE, cache_dir=cache.parent / "other", progress=progress)
    assert told == sorted(told)
    assert told[-4:] == [12, 14, 16, 18]
    assert started[0].returncode == -signal.SIGKILL
    assert {process.returncode for process in started[1:]} == {0}
    assert torch.equal(pixels_of(data), before)
    assert data.skipped == []


@pytest.mark.parametrize("possible", [0, 1])
def test_without_memory_for_more_processes_the_rest_is_decoded(
    make_tree, cache: Path, monkeypatch: pytest.MonkeyPatch, possible: int
) -> None:
    tree = make_tree(train=9)
    before = pixels_of(open_small(tree, cache)[0]).clone()
    in_processes(monkeypatch)
    real, run = subprocess.Popen, module.in_interpreters
    started, codes = [], []

    def full(*arguments, **settings) -> subprocess.Popen:
        if len(started) == possible:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        started.append(real(*arguments, **settings))
        return started[-1]

    def noted(*arguments, **how) -> list[int]:
        codes.append(run(*arguments, **how))
        return codes[-1]

    monkeypatch.setattr(subprocess, "Popen", full)
    monkeypatch.setattr(module, "in_interpreters", noted)
    with pytest.warns(
        UserWarning, match=r"of 2 processes .*, [12] could not be started .Cannot allocate memory.; this"
    ):
        data, finished = open_small(tree, cache.parent / "other")
    assert codes == [[0] * possible, []]  # of train, and of val
    assert finished == 2
    assert torch.equal(pixels_of(data), before)


@pytest.mark.parametrize(
    ("seconds", "work", "cores", "processes"),
    [(2.0, 2.0, 64, []), (4.0, 4.0, 64, [5]), (100.0, 100.0, 64, [16]), (4.0, 4.0, 2, []), (5.0, 5.0, 2, [2]),
     (5.0, 10.0, 2, []), (100.0, 100.0, 1, []), (100.0, 40.0, 64, [])],
)  # fmt: skip
def test_there_are_as_many_processes_as_are_worth_their_start(
    make_tree, cache: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, work: float, cores: int,
    processes: list[int],
) -> None:  # fmt: skip
    """The first 4 of 18 images take `seconds`, 3.5 times as much is left, and 2 cores have to save 6 of 14 seconds.
    Nothing is saved where 2 threads were as busy (`work` is of all cores), nor where most of the time they waited."""
    clock, busy = iter([0.0, seconds, 0.0, 0.0]), iter([0.0, work, 0.0, 0.0])
    stopped = SimpleNamespace(monotonic=lambda: next(clock), process_time=lambda: next(busy))
    monkeypatch.setattr(module, "time", stopped)
    monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(module, "cores", lambda: cores)
    started: list[int] = []
    monkeypatch.setattr(module, "in_interpreters", lambda function, jobs, **how: started.append(len(jobs)))
    open_small(make_tree(train=9), cache)
    assert started == processes


class Negative(FilePart):
    def read(self, row: int) -> Any:
        return ImageOps.invert(super().read(row))


def test_a_part_that_reads_its_files_in_its_own_way_is_not_left_to_processes(
    make_tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_processes(monkeypatch)
    files = [ImageFile(file.name, str(file)) for file in sorted(make_tree(train=9).glob("train/china/*"))]
    part, expected = Negative(files, [0] * len(files)), np.zeros((len(files), 3, SIZE, SIZE), np.uint8)
    module._decode_rows(part, range(len(files)), expected, 1, lambda done: None)
    pixels = np.lib.format.open_memmap(tmp_path / "pixels.npy", mode="w+", dtype=np.uint8, shape=expected.shape)
    module._decode(part, pixels, None)
    assert np.array_equal(pixels, expected)


def test_new_interpreters_import_what_this_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from where a script or a notebook has added to sys.path."""
    (tmp_path / "known_here.py").write_text("def touch(path, alive):\n    path.touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert in_interpreters("known_here:touch", [tmp_path / "done"], meanwhile=lambda: None) == [0]
    assert (tmp_path / "done").exists()


def test_a_process_whose_parent_is_dead_decodes_nothing_more(make_tree, tmp_path: Path) -> None:
    files = sorted(make_tree().glob("train/china/*"))
    np.save(tmp_path / "pixels.npy", np.zeros((len(files), 3, SIZE, SIZE), np.uint8))
    np.save(tmp_path / "done.npy", np.zeros(len(files), np.uint8))
    asked = iter([True, True, False])
    job = {
        "files": {row: ImageFile(file.name, str(file)) for row, file in enumerate(files)},
        **{n: tmp_path / f"{n}.npy" for n in ("pixels", "done")},
    }
    module.decode_files(job, lambda: next(asked))
    assert np.load(tmp_path / "done.npy").tolist() == [1, 1, 0, 0, 0, 0]


STOPPED = """
import os, signal, sys
from pathlib import Path
from wellcond.data import cache, open_data

sys.path.insert(0, str(Path(os.environ["HERE"]).parent))
cache.WORTH, cache.EACH, cache.CHUNK, cache.WAITING, cache.cores = -9.0, 1e-9, 4, 0.0, lambda: 2
run = cache.in_interpreters

def stop():
    if len(os.listdir(os.environ["HERE"])) == 2:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))

cache.in_interpreters = lambda function, jobs, meanwhile: run("test_cache_worker:wait", jobs, meanwhile=stop)
open_data(sys.argv[1], image_size=16, cache_dir=Path(sys.argv[2]))
"""
WAITING = """
import os, time
from pathlib import Path

def wait(job, alive):
    Path(os.environ["HERE"], str(os.getpid())).touch()
    while alive():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_the_one_that_started_it(
    make_tree, cache: Path, launcher, tmp_path: Path, how: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "test_cache_worker.py").write_text(WAITING)
    process = launcher.program(
        STOPPED, make_tree(train=9), cache, how, log=tmp_path / "log.txt", env={"HERE": str(here)}
    )
    (code,) = process.wait()
    assert code == (1 if how == "SIGINT" else -signal.SIGKILL) or code == -signal.SIGINT, process.output()
    assert len(list(here.iterdir())) == 2
    until = time.monotonic() + 20
    while any(Path("/proc", one.name).exists() for one in here.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [one.name for one in here.iterdir() if Path("/proc", one.name).exists()]


KILLED = """
import os, signal, sys
from pathlib import Path
from wellcond.data import open_data

def progress(what, done, total):
    if "(val)" in what:
        os.kill(os.getpid(), signal.SIGKILL)

open_data(sys.argv[1], image_size=16, cache_dir=Path(sys.argv[2]), progress=progress)
"""


def test_killed_while_building(make_tree, cache: Path, launcher, tmp_path: Path) -> None:
    tree = make_tree()
    assert launcher.program(KILLED, tree, cache, log=tmp_path / "log.txt").wait() == [-signal.SIGKILL]
    (left,) = cache.glob(".*.tmp")
    assert (left / "train.npy").exists()
    data, built = open_small(tree, cache)  # the dead one's lock is free
    assert (built, len(data.train)) == (2, 12)
    assert not list(cache.glob(".*.tmp"))


def test_of_several_one_builds_and_the_others_wait(make_tree, cache: Path) -> None:
    """Threads with a lock each, which keeps them apart as it does processes."""
    tree = make_tree(train=20)
    together = threading.Barrier(4)
    results: list[tuple[DataSet, int]] = []

    def work() -> None:
        together.wait()
        results.append(open_small(tree, cache))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built for _, built in results) == [0, 0, 0, 2]
    assert all(torch.equal(pixels_of(data), pixels_of(results[0][0])) for data, _ in results)


BUILDER = """
import sys, time
from hashlib import sha256
from pathlib import Path
from wellcond.data import open_data

parts = []
Path(sys.argv[3]).touch()
while not all(Path(sys.argv[2], name).exists() for name in ("0", "1")):
    time.sleep(0.001)
data = open_data(sys.argv[1], image_size=16, cache_dir=Path(sys.argv[2], "cache"),
                 progress=lambda what, done, total: parts.append(what) if done == total else None)
print(len(parts), len(data.train), sha256(data.train.pixels.numpy().tobytes()).hexdigest())
"""


def test_of_two_processes_one_builds_and_the_other_waits(make_tree, launcher, tmp_path: Path) -> None:
    tree = make_tree(train=20)
    started = [
        launcher.program(BUILDER, tree, tmp_path, tmp_path / name, log=tmp_path / f"{name}.log") for name in ("0", "1")
    ]
    assert [process.wait() for process in started] == [[0], [0]], [process.output() for process in started]
    said = [process.output().split() for process in started]
    assert sorted(line[0] for line in said) == ["0", "2"]
    assert [line[1] for line in said] == ["40", "40"]
    assert said[0][2] == said[1][2]
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def test_nothing_is_left_of_a_set_that_is_refused(make_tree, cache: Path) -> None:
    tree = make_tree()
    for file in (tree / "val" / "china").iterdir():
        file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="'china'"):
        open_small(tree, cache)
    assert [path.suffix for path in cache.iterdir()] in ([".lock"], [])


def test_a_set_beyond_the_limit_is_streamed(make_tree, cache: Path) -> None:
    tree = make_tree()
    needed = 18 * 3 * SIZE**2
    data, built = open_small(tree, cache, cache_limit=needed - 1)
    assert isinstance(data.train, ImageFiles)
    assert (built, len(data.train), len(data.val)) == (0, 12, 6)
    assert isinstance(open_small(tree, cache, cache_limit=needed)[0].train, Images)
    assert isinstance(open_small(tree, cache, cache_limit=0)[0].train, ImageFiles)  # though there is a cache now


def test_a_full_disk_is_named(make_tree, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match="name another cache_dir, or lower cache_limit"):
        open_small(tree, cache)


def test_the_default_place(tmp_path: Path, make_tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "here"))
    open_data(str(make_tree()), image_size=SIZE)
    assert cache_folder(tmp_path / "here").name.startswith(f"photos-{SIZE}px-")
