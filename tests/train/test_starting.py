"""A training starts from weights of a file: all that fit, to the bit, and a word on what does not."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import wellcond
from wellcond.data.digits import load_digits
from wellcond.train.config import Config
from wellcond.train.tasks import Task, make_task

Make = Callable[..., Config]
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}


def built(config: Config) -> tuple[Any, Task]:
    task = make_task(config, load_digits())
    return task.build(), task


def saved(state: dict[str, Tensor], path: Path) -> str:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return str(path)


def without_head(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith("head.")}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert len(one) > 20
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_masked_autoencoder_starts_from_another(make_config: Make, tmp_path: Path) -> None:
    before, _ = built(make_config(task="mae", seed=1, **DECODER))
    path = saved(before.state_dict(), tmp_path / "mae.safetensors")
    model, task = built(make_config(task="mae", checkpoint=path, **DECODER))
    assert_same(model.state_dict(), before.state_dict())
    assert task.notes == []
    assert not model.encoder.pos_embed.requires_grad
    with pytest.raises(ValueError, match=r"does not fit the model: .*decoder\..*decoder_dim, decoder_depth"):
        built(make_config(task="mae", checkpoint=path, **{**DECODER, "decoder_dim": 32}))


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_masked_autoencoder_starts_from_an_encoder(make_config: Make, tmp_path: Path, pool: str) -> None:
    """That of a classifier: its head goes, its positions stay, and are trained on; its pooling may differ."""
    kwargs = {**make_config().model_kwargs, "global_pool": pool}
    before, _ = built(make_config(seed=1, model_kwargs=kwargs))
    path = tmp_path / "vit.safetensors"
    wellcond.save(before, path)
    model, task = built(make_config(task="mae", checkpoint=str(path), **DECODER))
    wanted = {name.replace("fc_norm.", "norm."): t for name, t in without_head(before.state_dict()).items()}
    assert_same(model.encoder.state_dict(), wanted)
    assert model.encoder.pos_embed.requires_grad
    assert len(task.notes) == 1
    assert "holds an encoder without a masked autoencoder's decoder, which starts at random" in task.notes[0]


def test_an_autoencoders_encoder_keeps_its_fixed_positions(make_config: Make, tmp_path: Path) -> None:
    before, _ = built(make_config(task="mae", seed=1, **DECODER))
    path = saved(before.encoder.state_dict(), tmp_path / "encoder.safetensors")
    model, _ = built(make_config(task="mae", checkpoint=path, **DECODER))
    assert_same(model.encoder.state_dict(), before.encoder.state_dict())
    assert not model.encoder.pos_embed.requires_grad


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_classifier_starts_from_an_autoencoder(make_config: Make, tmp_path: Path, pool: str, whole: bool) -> None:
    before, _ = built(make_config(task="mae", seed=1, **DECODER))
    state = before.state_dict() if whole else before.encoder.state_dict()
    path = saved(state, tmp_path / "mae.safetensors")
    kwargs = {**make_config().model_kwargs, "global_pool": pool}
    model, task = built(make_config(checkpoint=path, model_kwargs=kwargs))
    found = {name.replace("fc_norm.", "norm."): t for name, t in without_head(model.state_dict()).items()}
    assert_same(found, before.encoder.state_dict())
    assert task.notes == []


def test_tensors_that_are_left_out_are_named(make_config: Make, tmp_path: Path) -> None:
    deeper = {**make_config().model_kwargs, "depth": 3}
    before, _ = built(make_config(model_kwargs=deeper))
    wellcond.save(before, tmp_path / "deep.safetensors")
    assert "blocks.2.norm1.weight" in load_file(tmp_path / "deep.safetensors")
    _, task = built(make_config(checkpoint=str(tmp_path / "deep.safetensors")))
    assert len(task.notes) == 1
    assert "no place for, and that are left out: blocks.2.attn" in task.notes[0]


@pytest.mark.parametrize("task", ["classify", "mae"])
def test_what_does_not_fit_is_refused(make_config: Make, tmp_path: Path, task: str) -> None:
    path = saved({"conv.weight": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not fit the model"):
        built(make_config(task=task, checkpoint=path, **(DECODER if task == "mae" else {})))


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("task", ["classify", "mae"])
def test_a_training_runs_no_pickle_whatever_timm_asks_for(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """timm 1.0.23 reads the weights of a folder as a free pickle."""
    settings = make_config().model_kwargs
    about = {"architecture": "vit_tiny_patch16_224", "num_classes": 10, "model_args": {**settings, "in_chans": 1}}
    (tmp_path / "config.json").write_text(json.dumps(about | {"pretrained_cfg": {"input_size": [1, 8, 8]}}))
    torch.save({"state_dict": {}, "args": Trap(tmp_path / "trap")}, tmp_path / "pytorch_model.bin")
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **how: load(*args, **{**how, "weights_only": False}))
    config = make_config(model=f"local-dir:{tmp_path}", pretrained=True, model_kwargs={}, task=task)
    with pytest.raises(ValueError, match="more than tensors"):
        built(config)
    assert not (tmp_path / "trap").exists()
    monkeypatch.undo()
    load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "trap").exists()  # the trap works
