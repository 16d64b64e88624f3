"""Models by name: the right weights, the right pictures for them, and clear words where either cannot be had."""

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import wellcond
from wellcond.models.build import build_model, create_model
from wellcond.models.surgery import GrayingSettings, gray, graying_of, remove_skip, replace_attention
from wellcond.models.weights import save

Make = Callable[..., nn.Module]
NAME = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}  # as the fixture make_vit has it


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    return Image.fromarray(load_sample_image("china.jpg"))


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    mine = model.state_dict()
    return mine.keys() == state.keys() and all(torch.equal(mine[name], state[name]) for name in state)


# ---- names and settings


def test_an_untrained_model_says_so() -> None:
    built = build_model(NAME, model_kwargs={**SMALL, "num_classes": 7})
    assert not built.trained
    assert built.notes == ["random weights, never trained"]
    assert not built.model.training
    assert built.model.head.out_features == 7


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("vit_tiny_patch16", "vit_tiny_patch16_224"),
        ("vit_tny_patch16_224", "vit_tiny_patch16_224"),
        ("swin_tiny_patch4_window8_224.ms_in1k", "swin_tiny_patch4_window7_224"),
        ("owner/model", "hf-hub:owner/model"),
        ("zzzzzzzzzzzz", "timm.list_models()"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="timm knows no model") as caught:
        build_model(name)
    assert nearest in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (NAME, {"model_kwargs": {"depht": 2}}, r"depht=2: .*unexpected keyword argument 'depht'; did you mean depth"),
        (NAME, {"model_kwargs": {**SMALL, "embed_dim": 50}}, "embed_dim=50.*divisible"),
        (NAME, {"model_kwargs": {**SMALL, "img_size": (64, 8)}}, "images of 64 × 8 pixels are smaller than a patch"),
        (f"{NAME}.nonsense", {}, r"tag \(nonsense\).*It has .*augreg_in21k"),
        ("local-dir:nowhere", {}, r"cannot build local-dir:nowhere: .*config\.json"),
        (NAME, {"model_kwargs": SMALL, "pretrained": True}, "name a file of weights as the checkpoint"),  # no network
        (NAME, {"pretrained": True, "checkpoint": "a.pth"}, "two sources of weights; choose one"),
        (NAME, {"ema": True}, "ema chooses among the weights of a checkpoint"),
    ],
)
def test_what_cannot_be_built(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, **options)


# ---- pictures


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [
        (NAME, {**SMALL}, (3, 64, 64)),
        (NAME, {**SMALL, "img_size": (32, 64)}, (3, 32, 64)),
        (NAME, {**SMALL, "in_chans": 1}, (1, 64, 64)),
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "depths": (1, 1)}, (3, 64, 64)),
        ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, (3, 224, 224)),
    ],
)
def test_pictures_fit_the_model_as_it_was_built(
    name: str, settings: dict[str, Any], size: tuple[int, int, int], photograph: Image.Image
) -> None:
    built = build_model(name, model_kwargs=settings)
    assert built.data_config["input_size"] == size
    image = built.transform()(photograph)
    assert image.shape == size
    with torch.no_grad():
        assert built.model(image[None]).isfinite().all()


def test_pictures_are_normalised_as_the_model_was_trained() -> None:
    built = build_model(NAME, model_kwargs=SMALL)  # mean and std of 0.5, where most have ImageNet's
    white = built.transform()(Image.new("RGB", (80, 80), "white"))
    torch.testing.assert_close(white, torch.ones(3, 64, 64))
    built = build_model("deit_tiny_patch16_224", model_kwargs=SMALL)
    red = built.transform()(Image.new("RGB", (80, 80), (255, 0, 0)))
    expected = (torch.tensor([1.0, 0.0, 0.0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(red[:, 5, 5], expected)


def test_more_channels_than_pictures_have() -> None:
    built = build_model(NAME, model_kwargs={**SMALL, "in_chans": 6})
    assert len(built.data_config["mean"]) == 6
    with pytest.raises(ValueError, match="reads 6 channels"):
        built.transform()


# ---- checkpoints


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_a_file(make_vit: Make, tmp_path: Path, suffix: str) -> None:
    state = make_vit().state_dict()
    file = tmp_path / f"last{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}, file)
    else:
        save_file(state, file)
    built = build_model(NAME, model_kwargs=SMALL, checkpoint=file)  # timm's own 1000 classes give way to the file's 7
    assert built.trained
    assert built.notes == [f"weights of last{suffix}", "7 classes, as its head has them"]
    assert same(built.model, state)
    with pytest.raises(ValueError, match=r"does not fit.*head\.weight \(7, 48\), not \(10, 48\)"):
        build_model(NAME, model_kwargs={**SMALL, "num_classes": 10}, checkpoint=file)  # said is said


def test_heads_of_all_kinds(tmp_path: Path) -> None:
    swin: dict[str, Any] = {"img_size": 64, "window_size": 4, "depths": (1, 1), "embed_dim": 16, "num_heads": (2, 4)}
    for name, settings in [
        ("swin_tiny_patch4_window7_224", swin),
        ("deit_tiny_distilled_patch16_224", SMALL),
        ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 1}),  # it has no head by default
    ]:
        model = timm.create_model(name, num_classes=5, **settings)
        save(model, tmp_path / "a.safetensors")
        built = build_model(name, model_kwargs=settings, checkpoint=tmp_path / "a.safetensors")
        assert same(built.model, model.state_dict())
    encoder = timm.create_model(NAME, num_classes=0, **SMALL)
    save(encoder, tmp_path / "a.safetensors")
    built = build_model(NAME, model_kwargs=SMALL, checkpoint=tmp_path / "a.safetensors")
    assert built.notes[1] == "no head, as it has none"
    assert same(built.model, encoder.state_dict())


def test_averaged_weights(make_vit: Make, tmp_path: Path) -> None:
    last, averaged = make_vit().state_dict(), make_vit(num_classes=9).state_dict()
    torch.save({"state_dict": last, "state_dict_ema": averaged}, tmp_path / "a.pth")
    built = build_model(NAME, model_kwargs=SMALL, checkpoint=tmp_path / "a.pth", ema=True)
    assert same(built.model, averaged)
    assert built.notes[0] == "averaged weights of a.pth"


def test_graying_comes_with_the_weights(make_vit: Make, tmp_path: Path) -> None:
    save(gray(make_vit(), "dct", epsilon=0.7), tmp_path / "a.safetensors")
    built = build_model(NAME, model_kwargs=SMALL, checkpoint=tmp_path / "a.safetensors")
    assert graying_of(built.model) == GrayingSettings(method="dct", epsilon=0.7)
    assert "grayed as when it was saved: dct, epsilon 0.7" in built.notes


def test_removed_skips_come_with_the_weights(make_vit: Make, images: Tensor, tmp_path: Path) -> None:
    model = make_vit()
    remove_skip(model, "sa")
    save(model, tmp_path / "a.safetensors")
    built = build_model(NAME, model_kwargs=SMALL, checkpoint=tmp_path / "a.safetensors")
    assert torch.equal(built.model(images), model(images))
    assert "the skip sa is removed in 2 blocks, as when it was saved" in built.notes


def test_another_attention_comes_with_the_weights(make_vit: Make, images: Tensor, tmp_path: Path) -> None:
    model = make_vit(depth=3)
    replace_attention(model, "skyformer", num_landmarks=8, landmarks="spread")
    replace_attention(model, "kernelized", blocks=1)
    remove_skip(model, "mlp", blocks=1)
    save(model, tmp_path / "a.safetensors")
    built = build_model(NAME, model_kwargs={**SMALL, "depth": 3}, checkpoint=tmp_path / "a.safetensors")
    assert torch.equal(built.model(images), model(images))
    assert built.notes[2:] == [
        "the skip mlp is removed in blocks.1, as when it was saved",
        "the attention is skyformer (num_landmarks=8, landmarks='spread') in 2 blocks, as when it was saved",
        "the attention is kernelized in blocks.1, as when it was saved",
    ]


def test_a_misfit_names_all_three_kinds_of_keys(make_vit: Make, tmp_path: Path) -> None:
    save(make_vit(depth=3, img_size=32), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors does not fit") as caught:
        build_model(NAME, model_kwargs={**SMALL, "qk_norm": True}, checkpoint=tmp_path / "a.safetensors")
    for part in (
        "it lacks: blocks.0.attn.q_norm.weight",
        "the model lacks: blocks.2.",
        "and 9 more",
        "pos_embed (1, 5, 48)",
        "num_classes, img_size",
    ):
        assert part in str(caught.value)


def test_names_left_out_are_counted(make_vit: Make, tmp_path: Path) -> None:
    save(make_vit(depth=3), tmp_path / "a.safetensors")
    built = build_model(
        NAME,
        model_kwargs={**SMALL, "num_classes": 7, "qk_norm": True},
        checkpoint=tmp_path / "a.safetensors",
        strict=False,
    )
    assert any("q_norm" in note and "left random" in note for note in built.notes)
    assert any("blocks.2." in note and "and 9 more" in note and "left out" in note for note in built.notes)


def test_damaged_and_missing_files(make_vit: Make, tmp_path: Path) -> None:
    save(make_vit(), tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged"):
        build_model(NAME, model_kwargs=SMALL, checkpoint=tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        build_model(NAME, model_kwargs=SMALL, checkpoint=tmp_path / "b.safetensors")


# ---- folders in the Hub's form


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "architecture": NAME,
        "num_classes": 7,
        "num_features": 48,
        "model_args": SMALL,
        "pretrained_cfg": {"input_size": [3, 64, 64], "mean": [0.1, 0.2, 0.3], "num_classes": 7, "classifier": "head"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_of_timm(make_vit: Make, folder: Path) -> None:
    state = make_vit().state_dict()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    built = build_model(f"local-dir:{folder}", pretrained=True)
    assert same(built.model, state)
    assert built.trained
    assert built.notes == ["pretrained weights"]
    assert built.data_config["input_size"] == (3, 64, 64)
    assert built.data_config["mean"] == (0.1, 0.2, 0.3)
    assert not build_model(f"local-dir:{folder}").trained


def test_a_grayed_folder_is_never_read_without_its_graying(make_vit: Make, folder: Path) -> None:
    model = gray(make_vit(), "dct", epsilon=0.7)
    save(model, folder / "model.safetensors")
    built = build_model(f"local-dir:{folder}", pretrained=True)
    assert graying_of(built.model) == graying_of(model)
    assert same(built.model, model.state_dict())
    assert any("epsilon" in note for note in built.notes)


def test_a_folder_of_transformers_is_told_from_one_of_timm(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["ViTModel"], "model_type": "vit"}')
    with pytest.raises(ValueError, match=rf"its config.json is not timm's.* is called hf:{folder}$"):
        create_model(f"local-dir:{folder}", {})


def test_no_pickle_is_run_whatever_timm_asks_for(make_vit: Make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = folder / "trap"
    torch.save({"state_dict": make_vit().state_dict(), "args": Malicious(trap)}, folder / "pytorch_model.bin")
    torch_load = torch.load

    def as_older_timm_does(*args: Any, **kwargs: Any) -> Any:
        return torch_load(*args, **{**kwargs, "weights_only": False})

    monkeypatch.setattr(torch, "load", as_older_timm_does)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ValueError, match=r"cannot build local-dir.* more than tensors.* wellcond.save"):
        build_model(f"local-dir:{folder}", pretrained=True)
    with pytest.raises(ValueError, match="more than tensors"):
        create_model(NAME, {**SMALL, "num_classes": 7, "checkpoint_path": str(folder / "pytorch_model.bin")})
    assert not trap.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"  # as it was
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    monkeypatch.undo()
    trap.mkdir()
    with pytest.raises(FileExistsError):  # the trap works, and only the guard held it
        torch.load(folder / "pytorch_model.bin", weights_only=False)


def test_all_of_wellcond_builds_models_here_and_unpickles_tensors_alone() -> None:
    source = Path(wellcond.__file__).parent
    for file in source.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            if called == "timm.create_model" or called.endswith("load_checkpoint"):
                assert file == source / "models" / "build.py" or called == "_load_checkpoint", (file, call.lineno)
            if called == "torch.load":
                assert "weights_only=True" in ast.unparse(call), (file, call.lineno)
        assert not re.search(r"from timm\S* import .*create_model", file.read_text()), file
