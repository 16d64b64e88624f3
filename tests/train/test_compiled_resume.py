"""A compiled training that is stopped compiles again when it goes on: still the same bits."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wellcond.train.checkpoint import latest, saved_steps

Start = Callable[..., Any]
# Drop path draws random numbers inside the compiled graph, and the probe measures beside it.
SETTINGS = (
    "compile=true", "drop_path=0.3", "probe_every=4", "probe_samples=8", "ema_decay=0.9",
    "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_compiled_training_goes_on_to_the_same_bits(
    command: Start, assert_same_run: Callable[[Path, Path], None], tmp_path: Path, world: int
) -> None:
    # So that each process has batches of the same size, which are compiled once: 11 steps, or 10.
    settings = (*SETTINGS, f"batch_size={128 * world}", f"epochs={world}")
    ends = command(tmp_path / "undisturbed", *settings, world=world)
    assert set(ends.wait()) == {0}, ends.output()

    # The signal comes after the first row; every later step waits for the disk, so that it is not the last.
    stopped = command(tmp_path / "stopped", *settings, "save_every=1", slow_disk=0.1, world=world)
    stopped.until(lambda: saved_steps(tmp_path / "stopped/checkpoints"))
    os.kill(stopped.pids[-1], signal.SIGTERM)
    assert set(stopped.wait()) == {130}, stopped.output()
    assert 0 < max(saved_steps(tmp_path / "stopped/checkpoints")) < 10
    goes_on = command(tmp_path / "stopped", *settings, world=world)
    assert set(goes_on.wait()) == {0}, goes_on.output()
    assert_same_run(tmp_path / "stopped", tmp_path / "undisturbed")

    # It was compiled, and so differs from the plain one by rounding, and by its own random numbers for drop path.
    plain = command(tmp_path / "plain", *settings[1:], world=world)
    assert set(plain.wait()) == {0}, plain.output()
    compiled, eager = (latest(tmp_path / name / "checkpoints") for name in ("undisturbed", "plain"))
    assert compiled is not None
    assert eager is not None
    assert compiled.model.keys() == eager.model.keys()
    assert any((compiled.model[name] != tensor).any() for name, tensor in eager.model.items())
