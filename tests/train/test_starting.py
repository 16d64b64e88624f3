"""A training starts from weights of a file: all that fit, to the bit, and a word on what does not."""

import json
import os
import shlex
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import wellcond
from wellcond import records
from wellcond.data.digits import load_digits
from wellcond.models import GrayingSettings
from wellcond.models.mae import MaskedAutoencoder
from wellcond.train.config import Config
from wellcond.train.loop import train
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


# ---- surgery that differs


def notes_of(config: Config) -> list[str]:
    task = make_task(config, load_digits())
    task.build()
    return task.notes


def settings_in(note: str) -> list[str]:
    words = shlex.split(note.partition("to take over what the file had: ")[2])
    return [word for word in words if word != "--set"]


def saved_by(config: Config, path: Path) -> str:
    model = make_task(config, load_digits()).build()
    wellcond.save(getattr(model, "encoder", model), path)
    return str(path)


@pytest.mark.parametrize(
    ("surgery", "words"),
    [
        ({"gray": "dct"}, "trained with graying (dct, epsilon 0.95), and this run has no graying"),
        ({"gray": "svd", "epsilon": 0.7}, "graying (svd, epsilon 0.7)"),
        ({"gray": "svd", "restore_scale": False}, "graying (svd, epsilon 0.95, its scale not restored)"),
        ({"remove_skips": ["mlp"]}, "removed skips (mlp in 2 blocks), and this run has all skips"),
        ({"remove_skips": ["sa", "mlp"]}, "removed skips (sa and mlp in 2 blocks)"),
        ({"attention": "linear"}, "another attention (linear in 2 blocks), and this run has the model's own attention"),
        ({"attention": "skyformer", "attention_kwargs": {"num_landmarks": 3, "landmarks": "segment"}}, "skyformer in"),
    ],
)
@pytest.mark.parametrize("task", ["classify", "mae"])
def test_what_differs_is_named_with_the_settings_that_take_it_over(
    make_config: Make, tmp_path: Path, surgery: dict[str, Any], words: str, task: str
) -> None:
    more = {"task": task, **(DECODER if task == "mae" else {})}
    path = saved_by(make_config(**surgery), tmp_path / "with.safetensors")
    plain = make_config(checkpoint=path, **more)
    told = [note for note in notes_of(plain) if "to take over" in note]
    assert len(told) == 1
    assert words in told[0]
    assert "to take over" not in " ".join(notes_of(plain.changed(settings_in(told[0]))))  # they do
    # The other way round: the file has none, and the run has.
    path = saved_by(make_config(), tmp_path / "without.safetensors")
    changed = make_config(checkpoint=path, **surgery, **more)
    told = [note for note in notes_of(changed) if "to take over" in note]
    assert len(told) == 1
    assert "to take over" not in " ".join(notes_of(changed.changed(settings_in(told[0]))))


def test_a_scale_that_graying_restored_is_restored_again(make_config: Make, tmp_path: Path) -> None:
    path = saved_by(make_config(gray="svd"), tmp_path / "restored.safetensors")
    unscaled = make_config(checkpoint=path, gray="svd", restore_scale=False)
    (note,) = notes_of(unscaled)
    assert "graying (svd, epsilon 0.95), and this run has graying (svd, epsilon 0.95, its scale not restored)" in note
    assert notes_of(unscaled.changed(settings_in(note))) == []


def test_surgery_of_some_blocks_is_told_from_that_of_all(make_config: Make, tmp_path: Path) -> None:
    model: Any = make_task(make_config(), load_digits()).build()
    wellcond.remove_skip(model, "sa", blocks="blocks.1")
    wellcond.save(model, tmp_path / "one.safetensors")
    (note,) = notes_of(make_config(checkpoint=str(tmp_path / "one.safetensors")))
    assert "removed skips (sa in blocks.1)" in note
    assert "--set remove_skips=sa (in all blocks alike, which the file's are not)" in note
    (other,) = notes_of(make_config(checkpoint=str(tmp_path / "one.safetensors"), remove_skips=["sa"]))
    assert "this run has removed skips (sa in 2 blocks)" in other


@pytest.mark.parametrize("task", ["classify", "mae", "linear_probe"])
def test_pretrained_weights_of_a_folder_may_remember_surgery_too(make_config: Make, tmp_path: Path, task: str) -> None:
    """timm reads the weights by the model's name, and not what they remember."""
    before = make_config(gray="dct", remove_skips=["mlp"], seed=1)
    model: Any = make_task(before, load_digits()).build()
    wellcond.save(model, tmp_path / "model.safetensors")
    about = {"architecture": before.model, "num_classes": 10, "model_args": {**before.model_kwargs, "in_chans": 1}}
    about["pretrained_cfg"] = {"input_size": [1, 8, 8], "num_classes": 10, "classifier": "head"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    more = {"task": task, **(DECODER if task == "mae" else {})}
    config = make_config(model=f"local-dir:{tmp_path}", model_kwargs={}, pretrained=True, **more)
    config.check()
    built_now, named = built(config)
    inside = getattr(built_now, "encoder", built_now)
    assert torch.equal(inside.patch_embed.proj.weight, model.patch_embed.proj.weight)
    assert len(named.notes) == 2
    assert "model.safetensors was trained with graying (dct, epsilon 0.95), and this run has no" in named.notes[0]
    assert "removed skips (mlp in 2 blocks)" in named.notes[1]
    settings = [setting for note in named.notes for setting in settings_in(note)]
    assert settings == ["gray=dct", "epsilon=0.95", "remove_skips=mlp"]
    assert notes_of(config.changed(settings)) == []


def test_pretrained_weights_that_say_nothing(make_config: Make, tmp_path: Path) -> None:
    before = make_config()
    model: Any = make_task(before, load_digits()).build()
    saved(model.state_dict(), tmp_path / "model.safetensors")
    about = {"architecture": before.model, "num_classes": 10, "model_args": {**before.model_kwargs, "in_chans": 1}}
    (tmp_path / "config.json").write_text(json.dumps(about | {"pretrained_cfg": {"input_size": [1, 8, 8]}}))
    config = make_config(model=f"local-dir:{tmp_path}", model_kwargs={}, pretrained=True)
    assert notes_of(config) == []
    (note,) = notes_of(config.changed({"gray": "dct"}))
    assert "does not say how its weights were trained; this run has graying (dct, epsilon 0.95)" in note


def test_a_file_of_others_does_not_say(make_config: Make, tmp_path: Path) -> None:
    config = make_config()
    model = timm.create_model(config.model, num_classes=10, in_chans=1, **config.model_kwargs)
    torch.save(model.state_dict(), tmp_path / "timm.pth")
    assert notes_of(make_config(checkpoint=str(tmp_path / "timm.pth"))) == []
    (note,) = notes_of(make_config(checkpoint=str(tmp_path / "timm.pth"), gray="dct"))
    assert "does not say how its weights were trained; this run has graying (dct, epsilon 0.95)" in note


def test_an_autoencoder_saved_whole_names_its_blocks_otherwise(make_config: Make, tmp_path: Path) -> None:
    config = make_config()
    encoder: Any = timm.create_model(config.model, num_classes=0, in_chans=1, **config.model_kwargs)
    how = GrayingSettings(method="svd", epsilon=0.8)
    model = MaskedAutoencoder(encoder, **DECODER, gray="visible", graying=how)
    wellcond.remove_skip(model, "mlp", blocks="encoder.*")
    wellcond.save(model, tmp_path / "mae.safetensors")
    settings = {"gray": "svd", "epsilon": 0.8, "remove_skips": ["mlp"]}
    assert notes_of(make_config(checkpoint=str(tmp_path / "mae.safetensors"), **settings)) == []
    assert len(notes_of(make_config(checkpoint=str(tmp_path / "mae.safetensors")))) == 2


def test_metadata_of_a_newer_version_are_refused(make_config: Make, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = make_task(make_config(), load_digits()).build().state_dict()
    for text in ("{", "[]", '{"format": 9, "graying": null}', '{"format": 1, "graying": null, "rotation": 1}'):
        save_file(state, tmp_path / "new.safetensors", metadata={"wellcond": text})
        with pytest.raises(ValueError, match="damaged, or newer than this version"):
            notes_of(make_config(checkpoint=str(tmp_path / "new.safetensors")))


def test_a_training_warns_and_logs_it_and_the_example_of_the_docs_does_not(make_config: Make, tmp_path: Path) -> None:
    """docs/training.md: mae_base with gray=dct, then fine-tuning from it."""
    before = make_config(task="mae", gray="dct", padding=0, epochs=1, **DECODER)
    train(before, tmp_path / "mae", device="cpu", quiet=True)
    file = str(tmp_path / "mae/checkpoints/step-00000005/model.safetensors")
    with pytest.warns(RuntimeWarning, match=r"trained with graying.*no graying.*--set gray=dct"):
        train(make_config(checkpoint=file, epochs=1), tmp_path / "plain", device="cpu", quiet=True)
    events = [row for row in records.read_rows(tmp_path / "plain/metrics.jsonl") if row["split"] == "event"]
    assert [row["step"] for row in events] == [0]
    assert "--set gray=dct" in events[0]["event"]
    with pytest.warns(RuntimeWarning, match="--set gray=dct"):  # said again, and written once
        train(make_config(checkpoint=file, epochs=1), tmp_path / "plain", device="cpu", quiet=True)
    again = [row for row in records.read_rows(tmp_path / "plain/metrics.jsonl") if row["split"] == "event"]
    assert again == events
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make_config(checkpoint=file, epochs=1, gray="dct"), tmp_path / "gray", device="cpu", quiet=True)


@pytest.mark.filterwarnings("ignore:.*holds an encoder without:RuntimeWarning")
@pytest.mark.parametrize("save_format", ["whole", "sharded"])
@pytest.mark.parametrize("task", ["classify", "mae", "linear_probe"])
def test_a_run_goes_on_without_the_file_that_it_started_from(
    make_config: Make, assert_same_run: Any, tmp_path: Path, task: str, save_format: str
) -> None:
    """That of a masked autoencoder decides on whether positions are trained, and so on what the optimiser has."""
    start = tmp_path / "start.safetensors"
    wellcond.save(built(make_config(seed=1))[0], start)
    decoder = DECODER if task == "mae" else {}
    config = make_config(task=task, checkpoint=str(start), epochs=2, save_format=save_format, **decoder)
    train(config, tmp_path / "whole", device="cpu", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000010")
    start.unlink()
    train(config, tmp_path / "run", device="cpu", quiet=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        train(config, tmp_path / "run", device="cpu", quiet=True)
