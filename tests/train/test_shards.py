"""Sharded states: written while training goes on, whole or not there, read by any number of processes, not trusted."""

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from wellcond import records
from wellcond.data import Batch
from wellcond.train import checkpoint
from wellcond.train.checkpoint import SavedState, export, latest, saved_steps, state_path
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.processes import Processes
from wellcond.train.shards import METADATA, Shards, read_shards, shapes_of
from wellcond.train.tasks import Classify

Make = Callable[..., Config]
Start = Callable[..., Any]
SETTINGS = ("epochs=2", "save_every=2", "drop_path=0.2")


def newest(folder: Path) -> SavedState:
    state = latest(folder / "checkpoints")
    assert state is not None
    return state


def assert_same(one: SavedState, other: SavedState) -> None:
    ours, others = one.tensors, other.tensors
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == others[name].dtype
        assert torch.equal(tensor, others[name]), name
    assert one.optimizer["param_groups"] == other.optimizer["param_groups"]


def test_one_process_gives_the_same_in_either_form(make_config: Make, tmp_path: Path) -> None:
    """And the weights besides: of the last state, and of the best."""
    for form in ("whole", "sharded"):
        config = make_config(ema_decay=0.9, save_format=form, keep_best=True)
        train(config, tmp_path / form, device="cpu", quiet=True)
    whole, sharded = newest(tmp_path / "whole"), newest(tmp_path / "sharded")
    assert_same(sharded, whole)
    assert sharded.counters == whole.counters
    states = tmp_path / "sharded/checkpoints"
    last = state_path(states, 10)
    for name, kept in (("model", whole.model), ("ema", whole.ema)):
        assert kept is not None
        written = load_file(last / f"{name}.safetensors")
        assert all(torch.equal(written[key], tensor) for key, tensor in kept.items())
    assert (states / "best/model.safetensors").exists()
    export(last, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()
    assert (tmp_path / "ema-out.safetensors").exists()


@pytest.mark.gpu
def test_parameters_on_a_gpu(make_config: Make, tmp_path: Path) -> None:
    """Copied to the CPU, written beside the training, and taken up again."""
    config = make_config(save_every=3, save_format="sharded", ema_decay=0.9)
    first = train(config, tmp_path, device="cuda", quiet=True)
    written, state = load_file(state_path(tmp_path / "checkpoints", 10) / "model.safetensors"), newest(tmp_path)
    assert all(torch.equal(written[name], tensor) for name, tensor in state.model.items())
    again = train(config, tmp_path, device="cuda", quiet=True)  # validates the state that it finds
    assert again.metrics == pytest.approx(first.metrics, rel=1e-4)


def test_any_number_of_processes_reads_it(command: Start, tmp_path: Path) -> None:
    """4 → 2 → 1 → 2: each loads it and saves it again, without a step between."""
    started = command(tmp_path / "4", "epochs=1", "shard=true", world=4)
    assert set(started.wait()) == {0}, started.output()
    first, before = newest(tmp_path / "4"), "4"
    for name, world in (("2", 2), ("1", 1), ("2 again", 2)):
        shutil.copytree(tmp_path / before, tmp_path / name)
        started = command(
            tmp_path / name, "epochs=1", f"shard={world > 1}", "save_format=sharded", world=world, again=True
        )
        assert set(started.wait()) == {0}, started.output()
        assert len(list(state_path(tmp_path / name / "checkpoints", 5).glob("__*.distcp"))) == world
        assert_same(newest(tmp_path / name), first)
        before = name


def test_a_sharded_run_goes_on_in_one_process_which_is_told(command: Start, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert command(folder, "epochs=1", "save_every=3", "shard=true", world=2).wait() == [0, 0]
    shutil.rmtree(state_path(folder / "checkpoints", 5))
    started = command(folder, "epochs=1", "save_every=3")
    assert started.wait() == [0], started.output()
    assert "going on from step 3: the run began with 2 processes and goes on with 1" in started.output()
    assert not checkpoint.is_sharded(state_path(folder / "checkpoints", 5))


def writing(folder: Path) -> bool:
    """Whether a state is being written, and the training is beyond it."""
    aside = [path.name for path in (folder / "checkpoints").glob(".step-*.tmp")]
    rows = records.read_rows(folder / "metrics.jsonl") if aside else []
    last = max((row["step"] for row in rows if row["split"] == "train"), default=0)
    return any(int(name.split(".")[1].removeprefix("step-")) < last for name in aside)


def test_killed_while_a_state_is_written_and_training_goes_on(
    command: Start, assert_same_run: Any, tmp_path: Path
) -> None:
    expected, folder = tmp_path / "expected", tmp_path / "killed"
    assert command(expected, *SETTINGS, "shard=true", world=2).wait() == [0, 0]
    started = command(folder, *SETTINGS, "shard=true", world=2, slow_disk=0.15)
    assert started.until(lambda: saved_steps(folder / "checkpoints") and writing(folder)), started.output()
    there = saved_steps(folder / "checkpoints")
    assert -9 in started.kill(), started.output()
    assert set(there) <= set(saved_steps(folder / "checkpoints"))
    started = command(folder, *SETTINGS, "shard=true", world=2)
    assert started.wait() == [0, 0], started.output()
    assert not list((folder / "checkpoints").glob(".*.tmp"))
    assert_same_run(folder, expected)


def test_a_signal_waits_for_the_state(command: Start, tmp_path: Path) -> None:
    started = command(tmp_path / "run", *SETTINGS, "save_format=sharded", "save_every=1", world=2, slow_disk=0.1)
    started.until(lambda: writing(tmp_path / "run"))
    os.kill(started.pids[-1], signal.SIGTERM)
    assert started.wait() == [130, 130], started.output()
    step = saved_steps(tmp_path / "run/checkpoints")[-1]
    assert f"stopped at step {step} of 10" in started.output()
    assert newest(tmp_path / "run").step == step


# ---- what goes wrong


def test_a_state_that_cannot_be_written_is_told_and_the_last_one_is_an_error(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, write = [6], Shards.write

    def full(self: Shards, folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
        if any(f"{step:08d}" in folder.name for step in fails):
            raise OSError("no room")
        return write(self, folder, tensors)

    monkeypatch.setattr(Shards, "write", full)
    config = make_config(save_every=3, save_format="sharded", keep=9)
    with pytest.warns(
        UserWarning, match=r"step 6 could not be saved: .*no room\. That of step 3 is still there; train"
    ):
        train(config, tmp_path / "a", device="cpu", quiet=True)
    assert saved_steps(tmp_path / "a/checkpoints") == [3, 9, 10]
    fails[:] = [10]
    with pytest.raises(OSError, match=r"step 10 could not be saved.*no room.*That of step 9 is still there; make room"):
        train(config, tmp_path / "b", device="cpu", quiet=True)
    assert not list((tmp_path / "b/checkpoints").glob(".*.tmp"))


def test_an_exception_finds_the_state_before_it_written(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, whole = [0], Classify.loss

    def broken(self: Classify, model: nn.Module, batch: Batch) -> Tensor:
        calls[0] += 1
        if calls[0] == 5:
            raise RuntimeError("a bug")
        return whole(self, model, batch)

    monkeypatch.setattr(Classify, "loss", broken)
    with pytest.raises(RuntimeError, match="a bug") as caught:
        train(make_config(save_every=3, save_format="sharded"), tmp_path, device="cpu", quiet=True)
    assert "the state after step 4 is saved" in caught.value.__notes__[0]
    assert saved_steps(tmp_path / "checkpoints") == [3, 4]


@pytest.fixture
def trained(make_config: Make, tmp_path: Path) -> Path:
    train(make_config(epochs=1, save_every=4, save_format="sharded"), tmp_path, device="cpu", quiet=True)
    return state_path(tmp_path / "checkpoints", 5)


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp", "state.pt"])
def test_a_damaged_file_is_named_and_the_state_before_taken(trained: Path, name: str) -> None:
    content = bytearray((trained / name).read_bytes())
    content[len(content) // 2] ^= 1
    (trained / name).write_bytes(content)
    with pytest.warns(UserWarning, match=rf"step-00000005 is not a whole .*{name} is not what was saved.*state before"):
        assert newest(trained.parents[1]).step == 4


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_hostile_pickle_is_not_unpickled(trained: Path, tmp_path: Path) -> None:
    """In the metadata, in the files of tensors, and in the rest; a file of checksums does not keep anybody from it."""
    trap = tmp_path / "trapped"
    bomb = Hostile(f"touch {trap}")
    (trained / "SHA256SUMS").unlink()
    good = {name: (trained / name).read_bytes() for name in (METADATA, "__0_0.distcp", "state.pt")}
    metadata = pickle.loads(good[METADATA])
    inside = pickle.loads(good[METADATA])
    inside.planner_data = bomb
    for content in (pickle.dumps(bomb), pickle.dumps([metadata, bomb]), pickle.dumps(inside)):
        (trained / METADATA).write_bytes(content)
        with pytest.raises(
            ValueError, match=r"\.metadata holds no metadata of tensors alone.*it asks for posix\.system"
        ):
            checkpoint.read(trained)
    (trained / METADATA).write_bytes(good[METADATA])
    assert checkpoint.read(trained).step == 5  # without a file of checksums, too

    torch.save(bomb, trained / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.read(trained)
    (trained / "state.pt").write_bytes(good["state.pt"])

    torch.save(bomb, trained / "__0_0.distcp")
    size = (trained / "__0_0.distcp").stat().st_size
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, size
    (trained / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.read(trained)
    assert not trap.exists()
    os.system(bomb.command)
    assert trap.exists()  # it would have been


def test_metadata_that_are_more_than_of_tensors_are_refused(trained: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    good = (trained / METADATA).read_bytes()

    def refused(content: bytes, match: str) -> None:
        (trained / METADATA).write_bytes(content)
        with pytest.raises(ValueError, match=match):
            shapes_of(trained)

    changed = pickle.loads(good)
    next(iter(changed.storage_data.values())).relative_path = "../../../secret.pt"
    refused(pickle.dumps(changed), "leads to '../../../secret.pt', which is no file of this state")
    changed = pickle.loads(good)
    changed.state_dict_metadata["more"] = BytesStorageMetadata()
    refused(pickle.dumps(changed), "asks for .*BytesStorageMetadata")
    changed = pickle.loads(good)
    changed.storage_data = dict.fromkeys(changed.storage_data, 1)
    refused(pickle.dumps(changed), "holds no metadata of saved tensors")
    refused(good[:-200], "holds no metadata of tensors alone")
    refused(pickle.dumps({"a": 1}), "holds no metadata of saved tensors")
    refused(pickle.dumps(torch.load), r"asks for torch\.serialization\.load")
    # The class itself as the object whose fields are set: all later metadata of this program would be changed.
    name = f"c{Metadata.__module__}\n{Metadata.__name__}\n".encode()
    refused(b"\x80\x02" + name + b"(N}X\x01\x00\x00\x00aK\x01stb.", "it sets fields of")
    assert not hasattr(Metadata, "a")


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    """Empty ones, numbers, other precisions and strides."""
    tensors = {
        "model.half": torch.randn(3, 4).bfloat16(),
        "model.turned": torch.randn(3, 4).t(),
        "model.empty": torch.empty(0, 4),
        "model.flag": torch.tensor([True, False]),
        "optimizer.0.step": torch.tensor(3.0),
        "optimizer.0.count": torch.arange(5),
    }
    shards = Shards(Processes(rank=0, world=1, device=torch.device("cpu")))
    sums = shards.write(tmp_path, {name: shards.copied(tensor) for name, tensor in tensors.items()})
    assert sums.keys() == {METADATA, "__0_0.distcp"}
    found = {name: torch.empty_like(like, device="cpu") for name, like in shapes_of(tmp_path).items()}
    read_shards(tmp_path, found)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
