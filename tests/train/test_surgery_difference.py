"""A file whose weights were trained with other surgery says so, with the settings that take it over."""

import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import wellcond
from wellcond import records
from wellcond.data.digits import load_digits
from wellcond.models import GrayingSettings
from wellcond.models.mae import MaskedAutoencoder
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.tasks import make_task

Make = Callable[..., Config]
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}


def notes_of(config: Config) -> list[str]:
    task = make_task(config, load_digits())
    task.build()
    return task.notes


def settings_in(note: str) -> list[str]:
    words = shlex.split(note.partition("to take over what the file had: ")[2])
    return [word for word in words if word != "--set"]


def saved(config: Config, path: Path) -> str:
    model = make_task(config, load_digits()).build()
    wellcond.save(getattr(model, "encoder", model), path)
    return str(path)


@pytest.mark.parametrize(
    ("surgery", "words"),
    [
        ({"gray": "dct"}, "trained with graying (dct, epsilon 0.95), and this run has no graying"),
        ({"gray": "svd", "epsilon": 0.7}, "graying (svd, epsilon 0.7)"),
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
    path = saved(make_config(**surgery), tmp_path / "with.safetensors")
    plain = make_config(checkpoint=path, **more)
    told = [note for note in notes_of(plain) if "to take over" in note]
    assert len(told) == 1
    assert words in told[0]
    assert "to take over" not in " ".join(notes_of(plain.changed(settings_in(told[0]))))  # they do
    # The other way round: the file has none, and the run has.
    path = saved(make_config(), tmp_path / "without.safetensors")
    changed = make_config(checkpoint=path, **surgery, **more)
    told = [note for note in notes_of(changed) if "to take over" in note]
    assert len(told) == 1
    assert "to take over" not in " ".join(notes_of(changed.changed(settings_in(told[0]))))


def test_surgery_of_some_blocks_is_told_from_that_of_all(make_config: Make, tmp_path: Path) -> None:
    model: Any = make_task(make_config(), load_digits()).build()
    wellcond.remove_skip(model, "sa", blocks="blocks.1")
    wellcond.save(model, tmp_path / "one.safetensors")
    (note,) = notes_of(make_config(checkpoint=str(tmp_path / "one.safetensors")))
    assert "removed skips (sa in blocks.1)" in note
    assert "--set remove_skips=sa (in all blocks alike, which the file's are not)" in note
    (other,) = notes_of(make_config(checkpoint=str(tmp_path / "one.safetensors"), remove_skips=["sa"]))
    assert "this run has removed skips (sa in 2 blocks)" in other


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
