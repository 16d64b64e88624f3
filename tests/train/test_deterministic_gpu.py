"""kill -9 on a GPU: in deterministic mode the same command goes on to the same bits, compiled or not; without it, it
goes on. The same is done on the CPU, where every machine can run it.

The processes of all cases run at once. For a GPU none is forked: a fork cannot use CUDA that its parent has looked at.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wellcond import records
from wellcond.train.checkpoint import SavedState, latest, saved_steps

# Everything that draws random numbers on the device, or adds in an order that a GPU may change.
SETTINGS = (
    "image_size=16", "model_kwargs=img_size=16,patch_size=4,depth=2,embed_dim=64,num_heads=2", "batch_size=128",
    "epochs=3", "warmup_epochs=0", "save_every=2", "log_every=1", "amp_dtype=bfloat16", "clip_grad=1.0",
    "ema_decay=0.9", "drop_path=0.2", "probe_every=5", "probe_samples=16", "scale_min=0.5", "flip=0.5",
    "color_jitter=0.3", "erasing=0.25", "mixup=0.8", "cutmix=1.0", "label_smoothing=0.1",
)  # fmt: skip
STEPS = 33  # 3 epochs of 1437 // 128 steps
SAME_BITS = {"eager": ("deterministic=true",), "compiled": ("deterministic=true", "compile=true")}
FREE = ("deterministic=false",)
PATIENCE = 300.0  # seconds; only a process that hangs takes so long
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import launcher
launcher.slow_down(float(sys.argv.pop(1)))
launcher.run_command(sys.argv[1:])
"""


class OfItsOwn:
    """A process that imports everything itself; otherwise as those that are forked."""

    def __init__(self, arguments: list[str], *, log: Path, slow_disk: float):
        command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1]), str(slow_disk), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WELLCOND_COMMIT": "test", "COLUMNS": "1000"}
        with open(log, "a") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> list[int]:
        return [self.process.wait(PATIENCE)]

    def kill(self) -> list[int]:
        self.process.kill()
        return self.wait()


class Training:
    """`wellcond train digits` in a process of its own; with `slow_disk` each file takes so many seconds to write."""

    def __init__(self, start: Callable[..., Any], folder: Path, device: str, *settings: str, slow_disk: float = 0.0):
        self.folder, self.log = folder, folder.with_suffix(".log")
        arguments = ["train", "digits", "--output", str(folder), "--device", device]
        for setting in (*SETTINGS, *settings):
            arguments += ["--set", setting]
        self.process = start(arguments, log=self.log, slow_disk=slow_disk)

    def killed_in_the_middle(self) -> bool:
        """Whether it was, now that it has come far enough."""
        if max(saved_steps(self.folder / "checkpoints"), default=0) < 6:
            assert self.process.alive(), self.log.read_text()
            return False
        assert self.process.kill() == [-9], self.log.read_text()
        assert max(saved_steps(self.folder / "checkpoints")) < STEPS
        return True

    def finish(self) -> None:
        assert self.process.wait() == [0], self.log.read_text()


@pytest.fixture
def train(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Training]]:
    """Starts trainings in folders of the test's; ends what it left."""
    begun: list[Training] = []

    def start(name: str, device: str, *settings: str, slow_disk: float = 0.0) -> Training:
        how = OfItsOwn if device == "cuda" else request.getfixturevalue("launcher").start
        begun.append(Training(how, tmp_path / name, device, *settings, slow_disk=slow_disk))
        return begun[-1]

    yield start
    for training in begun:
        if training.process.alive():
            training.process.kill()


# On the CPU test_compiled_resume.py has the compiled training.
@pytest.mark.parametrize(
    ("device", "cases"),
    [
        pytest.param("cpu", ("eager",), marks=pytest.mark.slow),
        pytest.param("cuda", ("eager", "compiled"), marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cuda"],
)
def test_killed_in_the_middle(
    train: Callable[..., Training], assert_same_run: Callable[[Path, Path], None], device: str, cases: tuple[str, ...]
) -> None:
    undisturbed = {case: train(f"undisturbed-{case}", device, *SAME_BITS[case]) for case in cases}
    doomed = {case: SAME_BITS[case] for case in cases} | {"free": FREE}
    # The disk takes its time, so that no machine is too fast to be killed in the middle.
    killed = {case: train(f"killed-{case}", device, *doomed[case], slow_disk=0.05) for case in doomed}
    alive, end = list(killed.values()), time.monotonic() + PATIENCE
    while alive:
        alive = [training for training in alive if not training.killed_in_the_middle()]
        assert time.monotonic() < end, "\n".join(training.log.read_text() for training in alive)
        time.sleep(0.005)
    again = {case: train(f"killed-{case}", device, *doomed[case]) for case in doomed}
    for training in (*undisturbed.values(), *again.values()):
        training.finish()
    for case in cases:
        assert_same_run(again[case].folder, undisturbed[case].folder)
    check_whole(again["free"].folder)


def check_whole(folder: Path) -> None:
    """All steps done, each with its row, and finite weights."""
    state: SavedState | None = latest(folder / "checkpoints")
    assert state is not None
    assert state.step == STEPS
    assert all(tensor.isfinite().all() for tensor in state.model.values())
    losses = [row for row in records.read_rows(folder / "metrics.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in losses] == list(range(1, STEPS + 1))
