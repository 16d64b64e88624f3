"""kill -9 while images are streamed out of WebDataset shards: worker processes decode ahead of the step, and none of
what they hold is saved. The same command goes on, with any number of workers, and ends at the same bits."""

import io
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from wellcond.train.checkpoint import saved_steps

webdataset = pytest.importorskip("webdataset")
Start = Callable[..., Any]
SETTINGS = (
    "image_size=8", "cache_limit=0", "batch_size=16", "epochs=3", "save_every=2", "probe_every=3", "probe_samples=8",
    "drop_path=0.2", "scale_min=0.3", "flip=0.5", "auto_augment=rand-m5", "erasing=0.2", "mixup=0.5", "cutmix=0.5",
)  # fmt: skip
STEPS_PER_EPOCH = 6  # 101 images in batches of 16
STEPS = 3 * STEPS_PER_EPOCH
KILLS = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of two photographs, as WebDataset writes them, in three training shards; one of the files is damaged."""
    folder = tmp_path_factory.mktemp("shards")
    photos = [Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")]
    for shard, count, top in (
        ("train-000", 40, 0),
        ("train-001", 40, 60),
        ("train-002", 21, 120),
        ("val-000", 18, 300),
    ):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for index in range(count):
                corner = (12 * index, top)
                encoded = io.BytesIO()
                photos[index % 2].crop((*corner, corner[0] + 12, top + 10)).save(encoded, "PNG")
                picture = encoded.getvalue()
                if (shard, index) == ("train-001", 7):
                    picture = picture[: len(picture) // 2]
                writer.write({"__key__": f"{shard}-{index:04d}", "png": picture, "cls": index % 2})
    return folder


@pytest.fixture
def stream(command: Start, shards: Path, tmp_path: Path) -> Start:
    """Starts the training on the shards, in one process or several, with so many workers each."""

    def start(folder: Path, *, workers: int = 1, **how: Any) -> Any:
        data = (f"data=wds:{shards}", f"cache_dir={tmp_path / 'cache'}", f"workers={workers}")
        return command(folder, *SETTINGS, *data, **how)

    return start


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return []


def last_saved(folder: Path) -> int:
    return max(saved_steps(folder / "checkpoints"), default=0)


def test_a_signal_to_all_processes_of_a_job_saves_and_ends_with_130(stream: Start, tmp_path: Path) -> None:
    """As schedulers and systemd send it; and a process that dies with its workers leaves none."""
    started = stream(tmp_path / "stopped", workers=2)
    main = started.pids[0]
    workers = started.until(lambda: (tmp_path / "stopped" / "metrics.jsonl").exists() and children_of(main))
    assert workers
    for pid in (*workers, main):
        os.kill(pid, signal.SIGTERM)
    assert started.wait() == [130], started.output()
    assert last_saved(tmp_path / "stopped") > 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_worker_that_is_killed_is_named(stream: Start, tmp_path: Path) -> None:
    started = stream(tmp_path / "run", workers=2)
    killed: list[int] = []
    while started.alive():  # every one, in any epoch
        for pid in children_of(started.pids[0]):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        time.sleep(0.01)
    assert started.wait() == [1], started.output()
    said = re.search(
        r"error: the decoding worker with pid (\d+) was killed by SIGKILL, .*memory.*fewer workers", started.output()
    )
    assert said is not None, started.output()
    assert int(said[1]) in killed


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_random_moments(
    stream: Start, assert_same_run: Callable[[Path, Path], None], tmp_path: Path, world: int
) -> None:
    undisturbed = stream(tmp_path / "undisturbed", world=world)
    assert set(undisturbed.wait()) == {0}, undisturbed.output()
    assert f"{STEPS} steps" in undisturbed.output()

    folder, moments, left = tmp_path / "killed", random.Random(world), []
    for attempt in range(KILLS):
        # A disk that takes its time: however fast the machine is, an attempt comes no further than a few states.
        started = stream(folder, workers=attempt % 3, world=world, slow_disk=0.05)
        if attempt:  # the first is killed somewhere in its start
            before = last_saved(folder)
            started.until(lambda before=before: last_saved(folder) > before)
        time.sleep(moments.uniform(0, 0.1))
        assert -9 in started.kill(), started.output()
        left.append(last_saved(folder))
    assert any(step % STEPS_PER_EPOCH for step in left), left  # in the middle of an epoch, where a position matters
    last = stream(folder, workers=2, world=world)
    assert set(last.wait()) == {0}, last.output()
    assert_same_run(folder, tmp_path / "undisturbed")
