"""A saved state comes back to the bit, is whole or not there, and a full disk leaves the one before."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from wellcond.train.checkpoint import SavedState, latest, save, saved_steps


def make_state(step: int = 10, *, size: int = 30, ema: bool = True) -> SavedState:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(size, size, generator=generator)
    return SavedState(
        step=step,
        model={"weight": weight, "transposed": weight.T, "same": weight, "count": torch.tensor(3)},
        optimizer={"state": {0: {"exp_avg": weight * 2, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        ema={"weight": weight / 2} if ema else None,
        scaler={"scale": 2.0},
        counters={"best": float("-inf"), "watch": {"above_since": None}},
        metadata={"format": "pt", "note": "grayed"},
    )


@pytest.fixture
def full_disk() -> Iterator[Any]:
    """Files may grow to so many bytes, and a write beyond fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    state = make_state()
    path = save(tmp_path, state, keep=2)
    assert path.name == "step-00000010"
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 10
    for name, tensor in state.model.items():
        assert torch.equal(found.model[name], tensor)
    assert found.ema is not None
    assert state.ema is not None
    assert torch.equal(found.ema["weight"], state.ema["weight"])
    assert torch.equal(found.optimizer["state"][0]["exp_avg"], state.optimizer["state"][0]["exp_avg"])
    assert (found.scaler, found.counters, found.metadata) == (state.scaler, state.counters, state.metadata)
    with safe_open(path / "model.safetensors", "pt") as file:
        assert file.metadata() == state.metadata


def test_there_may_be_no_state(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (1, 5, 20, 100):
        save(tmp_path, make_state(step), keep=keep)
    assert saved_steps(tmp_path) == [1, 5, 20, 100][-keep:]


def test_a_state_after_a_broken_later_one_is_the_newest(tmp_path: Path) -> None:
    """Else the one just written would be cleared away, and the broken one kept."""
    for step in (10, 20):
        save(tmp_path, make_state(step), keep=2)
    (tmp_path / "step-00000020/state.pt").unlink()
    with pytest.warns(UserWarning, match=r"step-00000020 is not a whole saved state .* going back to the state before"):
        found = latest(tmp_path)
    assert found is not None
    assert found.step == 10
    save(tmp_path, make_state(15), keep=1)
    assert saved_steps(tmp_path) == [15]
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 15


def test_a_broken_state_is_written_anew(tmp_path: Path) -> None:
    path = save(tmp_path, make_state(), keep=1)
    os.truncate(path / "state.pt", 100)
    save(tmp_path, make_state(), keep=1)
    assert latest(tmp_path) is not None


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "state.pt"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    """In the middle of a tensor, where no reader of these files would stumble."""
    save(tmp_path, make_state(10), keep=2)
    path = save(tmp_path, make_state(20), keep=2)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.warns(UserWarning, match=rf"step-00000020 is not a whole .*{name} is not what was saved.*state before"):
        found = latest(tmp_path)
    assert found is not None
    assert found.step == 10


def test_a_state_under_another_number_is_not_taken(tmp_path: Path) -> None:
    save(tmp_path, make_state(10), keep=2).rename(tmp_path / "step-00000090")
    with pytest.warns(UserWarning, match=r"step-00000090 is not a whole saved state .*state\.pt is of step 10"):
        assert latest(tmp_path) is None


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    """Whichever process wrote them: one that went on from a file has other objects for the same words."""
    first = save(tmp_path / "first", make_state(), keep=1)
    again = latest(tmp_path / "first")
    assert again is not None
    second = save(tmp_path / "second", again, keep=1)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_one_old_state_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step in range(20):
        save(tmp_path, make_state(step, size=2), keep=2, keep_old=True)
        *old, _, newest = saved_steps(tmp_path) if step > 1 else [0, step]
        assert newest == step
        assert not old or (len(old) == 1 and old[0] >= (step - 2) // 2 - 1), (step, old)
    assert saved_steps(tmp_path) == [16, 18, 19]
    for step in range(20, 30):  # nothing takes its place while the training is not well
        save(tmp_path, make_state(step, size=2), keep=2, keep_old=True, sound=False)
    assert saved_steps(tmp_path) == [16, 28, 29]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".step-00000005.abcd.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path) is None
    save(tmp_path, make_state(), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_only_tensors_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, make_state(), keep=1)

    class Stranger:
        def __reduce__(self) -> Any:
            return os.system, ("touch " + str(tmp_path / "run-by-a-stranger"),)

    torch.save({"step": 10, "optimizer": Stranger()}, path / "state.pt")
    (path / "SHA256SUMS").unlink()  # they would notice; a stranger would have made them anew
    with pytest.warns(UserWarning, match="to the beginning, for there is no state before"):
        assert latest(tmp_path) is None
    assert not (tmp_path / "run-by-a-stranger").exists()


@pytest.mark.parametrize("size", [1000, 8000])  # no room for the weights; room for them, but not for the rest
def test_a_full_disk_leaves_the_state_before(tmp_path: Path, full_disk: Any, size: int) -> None:
    first = make_state(10, size=10)
    save(tmp_path, first, keep=1)
    second = make_state(20, size=20)
    large = SavedState(**{**vars(second), "optimizer": {"moments": torch.zeros(10000)}})
    full_disk(size)
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        save(tmp_path, large, keep=1)
    full_disk(10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    found = latest(tmp_path)
    assert found is not None
    assert torch.equal(found.model["weight"], first.model["weight"])
    save(tmp_path, large, keep=1)
    assert saved_steps(tmp_path) == [20]
