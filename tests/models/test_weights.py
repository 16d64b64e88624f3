"""Files of weights: plain for others, and with us a grayed checkpoint is never evaluated without graying unnoticed."""

import argparse
import functools
import json
import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wellcond.attention import NystromAttention, SkyformerAttention
from wellcond.models import sequence, weights
from wellcond.models.mae import MaskedAutoencoder
from wellcond.models.surgery import (
    GrayingSettings,
    attention_of,
    gray,
    graying_of,
    is_grayed,
    remove_skip,
    replace_attention,
    skips_of,
    ungray,
)
from wellcond.models.weights import load, read_weights, save

Make = Callable[..., nn.Module]
DCT = GrayingSettings(method="dct", epsilon=0.7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights.safetensors"


@pytest.fixture
def grayed(make_vit: Make) -> nn.Module:
    return gray(make_vit(), "dct", epsilon=0.7)


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, Any], graying: GrayingSettings | None) -> None:
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert graying_of(model) == graying


# ---- removed skips


def test_removed_skips_come_back_with_the_weights(make_vit: Make, images: Tensor, file: Path) -> None:
    model = make_vit()
    remove_skip(model, "sa", blocks=1)
    remove_skip(model, "mlp")
    save(model, file)
    assert json.loads(metadata_of(file)["wellcond"])["skips"] == {"blocks.0": ["mlp"], "blocks.1": ["sa", "mlp"]}
    timm_keys = make_vit().state_dict().keys()
    assert load_file(file).keys() == timm_keys
    other = make_vit()
    assert load(other, file).skips == {"blocks.0": ("mlp",), "blocks.1": ("sa", "mlp")}
    assert torch.equal(other(images), model(images))
    third = make_vit()
    remove_skip(third, "sa", blocks=0)
    with pytest.warns(UserWarning, match=r"saved with removed skips .*blocks\.0: mlp; .* until now .*blocks\.0: sa\)"):
        load(third, file)
    assert torch.equal(third(images), model(images))


def test_a_file_with_all_skips_restores_them(make_vit: Make, images: Tensor, file: Path) -> None:
    model = make_vit()
    save(model, file)
    assert "skips" not in metadata_of(file)["wellcond"]  # readable by versions that do not know of skips
    other = make_vit()
    remove_skip(other, "sa")
    with pytest.warns(UserWarning, match="saved with all skips"):
        loaded = load(other, file)
    assert loaded.skips == skips_of(other) == {}
    assert torch.equal(other(images), model(images))


def test_a_foreign_file_into_a_model_without_skips_warns(make_vit: Make, file: Path) -> None:
    save_file(make_vit().state_dict(), file)
    model = make_vit()
    remove_skip(model, "sa", blocks=0)
    with pytest.warns(UserWarning, match=r"does not say .* skips.*restore_skip"):
        assert load(model, file).skips == {"blocks.0": ("sa",)}


def test_a_file_without_skips_into_an_unknown_family_changes_nothing(file: Path) -> None:
    weights = nn.Linear(2, 2).state_dict()
    surgery = {"format": 1, "graying": None, "skips": {"blocks.0": ["sa"]}}
    save_file(weights, file, metadata={"wellcond": json.dumps(surgery)})
    model = nn.Linear(2, 2)
    before = snapshot(model)
    with pytest.raises(ValueError, match="this model cannot have: Linear has no blocks"):
        load(model, file)
    assert_untouched(model, before, None)


# ---- replaced attention


def test_replaced_attention_comes_back_with_the_weights(make_vit: Make, images: Tensor, file: Path) -> None:
    model = make_vit()
    replace_attention(model, "skyformer", num_landmarks=6, gamma=0.3)
    replace_attention(model, "linear", blocks=1)
    save(model, file)
    how = json.loads(metadata_of(file)["wellcond"])["attention"]
    assert how["blocks.1"] == {"name": "linear", "settings": {"divisor": 16.0}}
    make_vit().load_state_dict(load_file(file))  # the names are timm's

    other = make_vit()
    assert load(other, file).attention == attention_of(model) == attention_of(other)
    assert torch.equal(other(images), model(images))
    replace_attention(other, "kernelized", blocks=0)
    with pytest.warns(UserWarning, match=r"saved with linear and skyformer attention .* until now it had kernelized"):
        load(other, file)
    assert torch.equal(other(images), model(images))


def skyformer_of(landmarks: int) -> type[SkyformerAttention]:
    class Built(SkyformerAttention):
        __init__ = functools.partialmethod(SkyformerAttention.__init__, num_landmarks=landmarks)  # type: ignore[assignment]

    return Built


def test_an_attention_that_was_built_in_is_remembered_too(make_vit: Make, images: Tensor, file: Path) -> None:
    """By either way to it: what a model was built with, and what was replaced."""
    built, plain = make_vit(attn_layer=skyformer_of(6)), make_vit()
    save(built, file)
    assert load(plain, file).attention == attention_of(built) == attention_of(plain)
    assert torch.equal(plain(images), built(images))
    save(plain, file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(make_vit(attn_layer=skyformer_of(6)), file).attention == attention_of(plain)
    other = make_vit(attn_layer=skyformer_of(5))
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"blocks\.0 was built with .*num_landmarks=5.* not with .*num_landmarks=6"):
        load(other, file)
    assert_untouched(other, before, None)


def test_weights_of_the_models_own_attention_in_one_built_otherwise(make_vit: Make, file: Path) -> None:
    save(make_vit(), file)
    built = make_vit(attn_layer=skyformer_of(6))
    with pytest.warns(UserWarning, match=r"saved with the model's own attention; this model was built with skyformer"):
        assert load(built, file).attention == attention_of(built)


def test_a_convolution_beside_attention_has_weights_of_its_own(make_vit: Make, images: Tensor, file: Path) -> None:
    class Convolved(NystromAttention):
        __init__ = functools.partialmethod(NystromAttention.__init__, num_landmarks=4, conv_kernel=3)  # type: ignore[assignment]

    model, same = make_vit(attn_layer=Convolved), make_vit(attn_layer=Convolved)
    save(model, file)
    load(same, file)
    assert torch.equal(same(images), model(images))
    with pytest.raises(ValueError, match="conv_kernel has weights"):
        load(make_vit(), file)


def test_a_file_with_its_own_attention_restores_it(make_vit: Make, images: Tensor, file: Path) -> None:
    model, other = make_vit(), make_vit()
    save(model, file)
    assert "attention" not in metadata_of(file)["wellcond"]  # readable by versions that do not know of it
    replace_attention(other, "linear")
    with pytest.warns(UserWarning, match="saved with the model's own attention"):
        assert load(other, file).attention == {}
    assert torch.equal(other(images), model(images))


def test_a_foreign_file_into_a_model_with_another_attention_warns(make_vit: Make, file: Path) -> None:
    model = make_vit()
    save_file(model.state_dict(), file)
    replace_attention(model, "linear", blocks=0)
    with pytest.warns(UserWarning, match=r"does not say with which attention.*restore_attention"):
        assert load(model, file).attention.keys() == {"blocks.0"}


@pytest.mark.parametrize(
    ("attention", "word"),
    [
        ({"blocks.0": {"name": "performer", "settings": {}}}, "'performer', which is not registered here.*import"),
        ({"blocks.0": {"name": "linear", "settings": {"gamma": 1}}}, "damaged, or newer"),
        ({"blocks.9": {"name": "linear", "settings": {}}}, r"cannot have.*no block blocks\.9"),
    ],
)
def test_an_attention_that_cannot_be_changes_nothing(make_vit: Make, file: Path, attention: Any, word: str) -> None:
    model = make_vit()
    before = snapshot(model)
    surgery = {"format": 1, "graying": None, "attention": attention}
    save_file(make_vit().state_dict(), file, metadata={"wellcond": json.dumps(surgery)})
    with pytest.raises(ValueError, match=word):
        load(model, file)
    assert_untouched(model, before, None)
    assert attention_of(model) == {}


# ---- what is written


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_files_load_into_plain_timm_strictly(name: str, file: Path) -> None:
    small: dict[str, Any] = {"depth": 1, "embed_dim": 48, "num_heads": 3}
    if name.startswith("swin"):
        small = {"depths": (1, 1), "embed_dim": 16, "num_heads": (2, 4), "window_size": 4}
    make = lambda: timm.create_model(name, img_size=64, num_classes=7, **small)  # noqa: E731
    model = gray(make(), "dct")
    save(model, file)
    plain = make()
    plain.load_state_dict(load_file(file), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    timm.create_model(name, img_size=64, num_classes=7, checkpoint_path=str(file), **small)  # timm's own reader


def test_the_metadata_say_it_all(grayed: nn.Module, make_vit: Make, file: Path) -> None:
    save(grayed, file, metadata={"epoch": "3"})
    metadata = metadata_of(file)
    assert metadata["epoch"] == "3"
    assert metadata["format"] == "pt"  # Hugging Face's readers ask for it
    assert json.loads(metadata["wellcond"]) == {
        "format": 1,
        "graying": {"method": "dct", "epsilon": 0.7, "restore_scale": True},
    }
    save(make_vit(), file)
    assert json.loads(metadata_of(file)["wellcond"]) == {"format": 1, "graying": None}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("row", self.encode.weight.data[0])  # a view of the same memory
        self.register_buffer("columns", torch.randn(3, 4).t())  # not contiguous


def test_shared_and_strided_tensors(file: Path) -> None:
    model = Tied()
    save(model, file)
    assert load_file(file).keys() == model.state_dict().keys()  # each name is there: a plain strict load works
    fresh = Tied()
    load(fresh, file)
    assert fresh.decode.weight is fresh.encode.weight
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert torch.equal(fresh.encode.weight, model.encode.weight)


@pytest.mark.parametrize("wrapper", ["ddp", "compile", "ema", "compiled blocks"])
def test_names_are_those_of_the_model_inside(
    grayed: nn.Module, make_vit: Make, images: Tensor, file: Path, wrapper: str
) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        if wrapper == "compiled blocks":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, backend="eager")
            return model
        wrappers = {"ddp": nn.DataParallel, "compile": torch.compile, "ema": timm.utils.ModelEmaV3}
        return wrappers[wrapper](model)

    names = list(grayed.state_dict())
    expected = grayed(images).detach()
    save(wrap(grayed), file)
    assert sorted(load_file(file)) == sorted(names)
    fresh = make_vit()
    wrapped = wrap(fresh)
    assert load(wrapped, file).graying == DCT
    inner = wrapped.module if wrapper == "ema" else fresh
    with torch.no_grad():
        torch.testing.assert_close(inner.cpu()(images), expected)


def test_a_failed_write_leaves_the_old_file(
    grayed: nn.Module, make_vit: Make, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(grayed, file)
    before = file.read_bytes()

    def interrupted(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "write_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(make_vit(), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_the_same_weights_give_the_same_bytes(make_vit: Make, file: Path) -> None:
    """safetensors' own order of the metadata is another in each call: one of 720 here."""
    model, about = make_vit(), {f"key-{number}": "wörd" for number in range(6)}
    contents = set()
    for _ in range(4):
        save(model, file, metadata=about)
        contents.add(file.read_bytes())
    assert len(contents) == 1
    loaded = load(make_vit(), file)
    assert loaded.metadata == about


def test_a_new_file_takes_the_place_of_the_old_at_once(grayed: nn.Module, make_vit: Make, file: Path) -> None:
    save(grayed, file)
    before = file.read_bytes()
    with file.open("rb") as reader:  # it goes on reading the old file, whole
        save(make_vit(), file)
        assert reader.read() == before
    assert file.read_bytes() != before


def test_files_have_ordinary_permissions_and_folders_are_made(vit: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "run" / "checkpoints" / "last.safetensors"
    save(vit, file)
    (tmp_path / "ordinary").touch()
    assert file.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_what_cannot_be_saved_raises(vit: nn.Module, tmp_path: Path, file: Path) -> None:
    with pytest.raises(ValueError, match=r"name the file weights\.safetensors"):
        save(vit, tmp_path / "weights.pth")
    for folder in (tmp_path, Path()):
        with pytest.raises(ValueError, match=r"is a folder; name the file, e\.g\. .*model\.safetensors"):
            save(vit, folder)
    for taken in ("wellcond", "format"):
        with pytest.raises(ValueError, match="choose another name"):
            save(vit, file, metadata={taken: "mine"})
    with pytest.raises(ValueError, match=r"json\.dumps"):
        save(vit, file, metadata={"epoch": 3})  # pyright: ignore[reportArgumentType]
    with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
        save(nn.Linear(2, 2), file)
    assert os.listdir(tmp_path) == []


# ---- what is restored


@pytest.mark.parametrize("method", ["dct", "svd"])
def test_graying_is_restored(
    make_vit: Make, images: Tensor, file: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = gray(make_vit(), method, epsilon=0.7, restore_scale=False)
    save(model, file, metadata={"epoch": "3"})
    fresh = make_vit()
    with caplog.at_level(logging.INFO, logger="wellcond"):
        loaded = load(fresh, file)
    assert loaded.graying == graying_of(fresh) == graying_of(model)
    assert loaded.metadata == {"epoch": "3"}
    assert loaded.missing == loaded.unexpected == []
    assert "grayed the model" in caplog.text
    assert torch.equal(fresh(images), model(images))
    load(model, file)  # grayed alike already: no warning, which would be an error here


def test_a_dct_that_follows_autocast_is_remembered_and_only_then_written(
    make_vit: Make, grayed: nn.Module, file: Path
) -> None:
    save(grayed, file)
    assert "autocast" not in metadata_of(file)["wellcond"]
    save(gray(make_vit(), "dct", autocast=True), file)
    assert load(make_vit(), file).graying == GrayingSettings(method="dct", autocast=True)
    words = sequence.build("listops", dim=8, mlp_dim=8, length=32, num_heads=2)
    with pytest.raises(ValueError, match="embedded words are grayed in float32"):
        gray(words, "dct", autocast=True)


def test_the_settings_of_the_file_win(grayed: nn.Module, make_vit: Make, images: Tensor, file: Path) -> None:
    save(grayed, file)
    model = gray(make_vit(), "dct", epsilon=0.9)
    with pytest.warns(UserWarning, match=r"epsilon=0\.7.*replace the model's.*epsilon=0\.9") as caught:
        load(model, file)
    assert caught[0].filename == __file__  # the warning points at the caller
    assert graying_of(model) == DCT
    assert torch.equal(model(images), grayed(images))


def test_a_file_saved_without_graying_ungrays(grayed: nn.Module, make_vit: Make, images: Tensor, file: Path) -> None:
    plain = make_vit()
    save(plain, file)
    with pytest.warns(UserWarning, match="saved without graying") as caught:
        assert load(grayed, file).graying is None
    assert caught[0].filename == __file__
    assert not is_grayed(grayed)
    assert torch.equal(grayed(images), plain(images))


def test_a_foreign_file_into_a_grayed_model_warns(grayed: nn.Module, make_vit: Make, file: Path) -> None:
    state = make_vit().state_dict()
    save_file(state, file)
    with pytest.warns(UserWarning, match="does not say whether its weights were trained with graying") as caught:
        assert load(grayed, file).graying == DCT
    assert caught[0].filename == __file__
    assert torch.equal(grayed.head.weight, state["head.weight"])
    load(make_vit(), file)  # nothing to warn of


WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda state: state,
    "ordered": OrderedDict,
    "timm": lambda state: {"state_dict": state, "epoch": 3, "args": argparse.Namespace(lr=1e-3, model="vit")},
    "model": lambda state: {"model": state, "optimizer": {"state": {}}},
    "ddp": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "compiled": lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
    "all of it": lambda state: {"model": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}},
    "lightning": lambda state: {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}, "epoch": 3},
    "tutorial": lambda state: {"epoch": 3, "model_state_dict": state, "loss": 0.5},
    "the other way round": lambda state: {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()},
}


@pytest.mark.parametrize("name", WRAPPINGS)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_torch_files_are_read_in_their_wrappings(
    grayed: nn.Module, make_vit: Make, tmp_path: Path, name: str, zipped: bool
) -> None:
    state = make_vit().state_dict()
    file = tmp_path / "checkpoint.pth.tar"
    torch.save(WRAPPINGS[name](state), file, _use_new_zipfile_serialization=zipped)
    fresh = make_vit()
    load(fresh, file)
    assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    with pytest.warns(UserWarning, match="does not say"):
        load(grayed, file)
    assert is_grayed(grayed)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_no_free_pickle_is_loaded(vit: nn.Module, tmp_path: Path, zipped: bool) -> None:
    trap = tmp_path / "trap"
    file = tmp_path / "stranger.pth"
    torch.save({"state_dict": vit.state_dict(), "args": Malicious(trap)}, file, _use_new_zipfile_serialization=zipped)
    before = snapshot(vit)
    with pytest.raises(ValueError, match=r"stranger\.pth holds more than tensors.*weights_only=False"):
        load(vit, file)
    assert not trap.exists()
    assert_untouched(vit, before, None)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_refused_pickle_says_what_it_holds(vit: nn.Module, tmp_path: Path, zipped: bool) -> None:
    torch.save(
        {"model": vit.state_dict(), "block": vit.blocks}, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(ValueError, match=r"a\.pth holds more than tensors.*it asks for \S*(timm|torch)\.\S+") as caught:
        load(vit, tmp_path / "a.pth")
    assert "\x1b" not in str(caught.value)  # torch prints in bold
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_averaged_weights_on_request(vit: nn.Module, make_vit: Make, tmp_path: Path, key: str) -> None:
    last, averaged = make_vit().state_dict(), make_vit().state_dict()
    file = tmp_path / "checkpoint.pth.tar"
    torch.save({"state_dict": last, key: {f"module.{name}": t for name, t in averaged.items()}}, file)
    load(vit, file)
    assert torch.equal(vit.head.weight, last["head.weight"])
    load(vit, file, ema=True)
    assert torch.equal(vit.head.weight, averaged["head.weight"])
    torch.save({"state_dict": last, "epoch": 3}, file)
    before = snapshot(vit)
    with pytest.raises(ValueError, match=r"no averaged weights under state_dict_ema.*only state_dict, epoch"):
        load(vit, file, ema=True)
    assert_untouched(vit, before, None)


# ---- what does not fit


def test_missing_files_and_folders(vit: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        load(vit, tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="is a folder"):
        load(vit, tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_damaged_files(grayed: nn.Module, make_vit: Make, tmp_path: Path, suffix: str, damage: str) -> None:
    file = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(make_vit().state_dict(), file)
    else:
        save(make_vit(), file)
    content = file.read_bytes()
    file.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "noise": b"PK" + bytes(range(256))}[damage])
    before = snapshot(grayed)
    with pytest.raises(ValueError, match=rf"weights{suffix} .*damaged"):
        load(grayed, file)
    assert_untouched(grayed, before, DCT)


def test_an_old_file_torn_anywhere(vit: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "old.pth"
    torch.save({"state_dict": {"a": torch.zeros(3)}, "epoch": 3}, file, _use_new_zipfile_serialization=False)
    content = file.read_bytes()
    for end in range(1, len(content), 7):
        file.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"old\.pth .*(damaged|does not fit)"):
            load(vit, file)


def test_a_header_of_any_length_is_read(file: Path) -> None:
    """It begins with its length: a byte that may look like a pickle's, and two that may look like a zip archive's."""
    starts = set()
    for padding in [*range(0, 256, 8), *range(0x4B50 - 300, 0x4B50)]:
        save_file({"weight": torch.zeros(1)}, file, metadata={"padding": "x" * padding})
        starts.add(file.read_bytes()[:2])
        assert read_weights(file)[1] == {"padding": "x" * padding}
    assert any(start[:1] == b"\x80" for start in starts)
    assert b"PK" in starts


@pytest.mark.parametrize("content", [3, [1, 2], {}, {"state_dict": {}}, {"epoch": 3}, torch.zeros(2)])
def test_torch_files_without_a_state_dict(vit: nn.Module, tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth holds no state dict"):
        load(vit, tmp_path / "other.pth")


def test_a_misfit_names_the_keys_and_changes_nothing(make_vit: Make, file: Path) -> None:
    save(make_vit(num_classes=3, depth=3), file)
    model = gray(make_vit(qk_norm=True), "dct", epsilon=0.9)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"weights\.safetensors does not fit") as caught:
        load(model, file)
    message = str(caught.value)
    for part in (
        "it lacks: blocks.0.attn.q_norm.weight",
        "the model lacks: blocks.2.",
        "and 9 more",
        "head.weight (3, 48), not (7, 48)",
        "strict=False",
    ):
        assert part in message
    assert len(message) < 1000
    assert_untouched(model, before, GrayingSettings(method="dct", epsilon=0.9))


def test_strict_can_be_switched_off(make_vit: Make, file: Path) -> None:
    deep = gray(make_vit(depth=3), "dct", epsilon=0.7)
    save(deep, file)
    shallow = make_vit(depth=2, qk_norm=True)
    loaded = load(shallow, file, strict=False)
    assert is_grayed(shallow)
    assert all(name.startswith("blocks.2.") for name in loaded.unexpected)
    assert "blocks.0.attn.q_norm.weight" in loaded.missing
    assert torch.equal(shallow.head.weight, deep.head.weight)
    save(nn.Linear(2, 2), file)
    before = snapshot(shallow)
    with pytest.raises(ValueError, match="does not fit"):  # nothing at all in common is a mistake, strict or not
        load(shallow, file, strict=False)
    assert_untouched(shallow, before, DCT)


def test_shapes_are_strict_always(make_vit: Make, file: Path) -> None:
    save(make_vit(num_classes=3), file)
    model = make_vit()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"of another shape: head\.weight"):
        load(model, file, strict=False)
    assert_untouched(model, before, None)


def test_a_grayed_file_into_an_unknown_family_changes_nothing(file: Path) -> None:
    model = nn.Linear(2, 2)
    surgery = {"format": 1, "graying": {"method": "dct", "epsilon": 0.7, "restore_scale": True}}
    save_file(nn.Linear(2, 2).state_dict(), file, metadata={"wellcond": json.dumps(surgery)})
    before = snapshot(model)
    with pytest.raises(ValueError, match="cannot gray Linear"):
        load(model, file)
    assert_untouched(model, before, None)


@pytest.mark.parametrize(
    ("surgery", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ('{"format": 1, "graying": {"method": "fft"}}', "damaged, or newer"),
        ('{"format": 1, "graying": {"method": "dct", "window": 3}}', "damaged, or newer"),
        ('{"format": 2, "graying": null}', "newer wellcond.*format 2"),
        ('{"format": 1, "graying": null, "skips": ["sa"]}', "damaged, or newer"),
        ('{"format": 1, "graying": null, "skips": {"blocks.0": ["norm"]}}', "cannot have.*not 'norm'"),
        ('{"format": 1, "graying": null, "skips": {"blocks.9": ["sa"]}}', r"cannot have.*no block blocks\.9"),
        ('{"format": 1, "graying": null, "window": 3}', r"newer wellcond.*window"),
    ],
)
def test_surgery_that_is_not_understood_is_not_ignored(make_vit: Make, file: Path, surgery: str, message: str) -> None:
    save_file(make_vit().state_dict(), file, metadata={"wellcond": surgery})
    model = make_vit()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load(model, file)
    assert_untouched(model, before, None)


def test_a_model_without_memory_raises(file: Path) -> None:
    save(nn.Linear(2, 2), file)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="to_empty"):
        load(model, file)


def test_precision_of_the_model_stays(make_vit: Make, file: Path) -> None:
    model = gray(make_vit(), "dct", epsilon=0.7)
    save(model, file)
    half = make_vit().bfloat16()
    load(half, file)
    assert half.head.weight.dtype == torch.bfloat16
    assert torch.equal(half.head.weight, model.head.weight.bfloat16())
    ungray(half)


def test_a_vit_takes_the_encoder_of_a_masked_autoencoders_weights(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 2}
    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=0, **settings)
    masked = MaskedAutoencoder(encoder, decoder_dim=16, decoder_depth=1, decoder_heads=2)
    save(masked, tmp_path / "masked.safetensors")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **settings).eval()
    found = load(model, tmp_path / "masked.safetensors")
    assert (found.missing, found.unexpected) == ([], [])
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model(images), masked.encoder.eval()(images))
    with pytest.raises(ValueError, match=r"it lacks: head\.bias, head\.weight|it lacks: head\.weight, head\.bias"):
        load(timm.create_model("vit_tiny_patch16_224", num_classes=5, **settings), tmp_path / "masked.safetensors")


def test_the_surgery_of_a_masked_autoencoder_comes_along(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 2}

    def make_vit() -> nn.Module:
        return timm.create_model("vit_tiny_patch16_224", num_classes=0, **settings).eval()

    def make_masked() -> MaskedAutoencoder:
        return MaskedAutoencoder(make_vit(), decoder_dim=16, decoder_depth=1, decoder_heads=2).eval()

    masked, file = make_masked(), tmp_path / "masked.safetensors"
    remove_skip(masked, "sa", blocks=["encoder.blocks.1", "decoder.*"])
    replace_attention(masked, "linear")
    save(masked, file)
    model, images = make_vit(), torch.randn(2, 3, 16, 16)
    found = load(model, file)
    assert found.skips == {"blocks.1": ("sa",)}
    assert list(found.attention) == ["blocks.0", "blocks.1"]
    with torch.no_grad():
        assert torch.equal(model(images), masked.encoder(images))
    # `wellcond train` writes the encoder's surgery beside the whole model's weights
    weights.write_weights(file, masked.state_dict(), weights.surgery_metadata(masked.encoder))
    again = make_masked()
    load(again, file)
    assert skips_of(again) == {"encoder.blocks.1": ("sa",)}
    assert list(attention_of(again)) == ["encoder.blocks.0", "encoder.blocks.1"]
    assert skips_of(model) == load(make_vit(), file).skips
