"""Build a model from its timm name, with weights from a checkpoint, and the transform for its images.

    built = build_model("vit_tiny_patch16_224", checkpoint="last.pth.tar")
    built.model(read_images("photos", built.transform()).images)
    built.notes      # ["weights of last.pth.tar", "10 classes, as its head has them"]
    model = create_model("local-dir:folder", {"num_classes": 10}, pretrained=True)      # timm's, in training mode

All of wellcond builds timm models here: no pickle is ever executed, whatever the version of timm. If weights record a
surgery (graying, removed skips, another attention), `build_model` repeats it on the model, wherever the weights come
from, and says so in the notes.
"""

import argparse
import contextlib
import inspect
import os
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wellcond.attention import find_attention
from wellcond.models.families import find_projection
from wellcond.models.huggingface import HUGGINGFACE, create_huggingface, data_config_of
from wellcond.models.pretrained import ENDINGS, FOLDER, HUB, find_pretrained, weights_behind
from wellcond.models.surgery import AttentionSettings
from wellcond.models.weights import METADATA_KEY, Loaded, load, match_names, read_weights
from wellcond.words import meant

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CONVMIXER_SIZE", "BuiltModel", "build_model", "check_patches", "create_model", "say_too_small"]

CONVMIXER_SIZE = {"dim", "depth", "kernel_size", "patch_size"}  # fixed by the names of timm's ConvMixers


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model in evaluation mode, and how it was built."""

    model: nn.Module
    data_config: dict[str, Any]
    """timm's input_size, interpolation, mean, std, crop_pct and crop_mode, for the size the model was built with."""
    notes: list[str]
    """What readers of its measurements need to know, one phrase each."""
    trained: bool
    """Whether its weights were loaded; otherwise they are random."""
    model_kwargs: dict[str, Any]
    """The settings it was built with, also those that the weights have set."""

    def transform(self) -> Callable[["Image"], Tensor]:
        """Return the transform from an RGB picture to a tensor: resize, crop and normalise as the model expects."""
        from timm.data.transforms_factory import create_transform
        from torchvision.transforms import Compose, Grayscale

        channels = self.data_config["input_size"][0]
        if channels not in (1, 3):
            raise ValueError(f"the model reads {channels} channels, and pictures have three: call it with tensors")
        transform: Any = create_transform(**self.data_config, is_training=False)
        return transform if channels == 3 else Compose([Grayscale(), transform])


def build_model(
    name: str,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    ema: bool = False,
    strict: bool = True,
) -> BuiltModel:
    """Build a model and load its weights.

    Args:
        name: a timm model name, also `hf-hub:` and `local-dir:` names, or `hf:` and a vision model of transformers.
        model_kwargs: arguments for timm's `create_model`: img_size, depth, num_classes …; of an `hf:` model, settings
            of its configuration.
        pretrained: load the pretrained weights of the name (from the cache, or from the network if there is one).
        checkpoint: load the weights of this safetensors or torch file. The number of classes follows the file's head,
            unless model_kwargs set it.
        ema: load the averaged weights in the checkpoint instead of the last ones.
        strict: False ignores names that only the model or only the file has; the notes name three and count the rest.

    Raises ValueError for an unknown name (suggesting similar ones), for settings that the model does not accept, and
    for weights that do not fit, are damaged, or cannot be read without running a pickle.
    """
    settings = dict(model_kwargs or {})
    if pretrained and checkpoint is not None:
        raise ValueError("pretrained and checkpoint are two sources of weights; choose one")
    if ema and checkpoint is None:
        raise ValueError("ema chooses among the weights of a checkpoint; name one")
    model = create_model(name, settings, pretrained=pretrained)
    notes: list[str] = []
    if checkpoint is not None:
        model, notes, sizes = _load_checkpoint(model, name, settings, Path(checkpoint), ema=ema, strict=strict)
        settings |= sizes
    elif pretrained:
        notes = ["pretrained weights", *_restore_surgery(model, name)]
    else:
        notes = ["random weights, never trained"]
    return BuiltModel(
        model=model.eval(),
        data_config=data_config_of(model, name) if name.startswith(HUGGINGFACE) else _data_config(model, settings),
        notes=notes,
        trained=pretrained or checkpoint is not None,
        model_kwargs=settings,
    )


def create_model(name: str, settings: Mapping[str, Any], *, pretrained: bool = False) -> nn.Module:
    """Call timm's `create_model`, or transformers' for an `hf:` name, without ever running a pickle: torch.load is
    restricted to tensors for all callers.

    Raises ValueError if the model cannot be built; the message says what to do.
    """
    import timm

    if name.startswith(HUGGINGFACE):
        model = create_huggingface(name, settings, pretrained=pretrained)
        check_patches(model, name)
        return model
    if ":" not in name and not timm.is_model(name.partition(".")[0]):
        raise ValueError(_unknown(name))
    if pretrained and not (found := find_pretrained(name)).there:  # timm would retry for a minute
        raise ValueError(_failure(name, settings, pretrained, ValueError(f"{found.why}.")))
    try:
        with _tensors_only():
            if name.startswith("convmixer") and settings.keys() & CONVMIXER_SIZE:
                model = _convmixer(name, settings, pretrained=pretrained)
            else:
                model = timm.create_model(name, pretrained=pretrained, **settings)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(_failure(name, settings, pretrained, error)) from error
    check_patches(model, name)
    return model


def _convmixer(name: str, settings: Mapping[str, Any], *, pretrained: bool) -> nn.Module:
    """Build a ConvMixer of any size: timm's functions take only the size in their name."""
    from timm.models import get_pretrained_cfg
    from timm.models.convmixer import ConvMixer

    if pretrained:
        raise ValueError("its weights are of its own size; leave pretrained or the size out")
    if missing := {"dim", "depth"} - settings.keys():
        raise ValueError(f"a ConvMixer of another size needs {' and '.join(sorted(missing))}, too")
    model: Any = ConvMixer(**settings)
    known = get_pretrained_cfg(name)
    model.pretrained_cfg = model.default_cfg = known.to_dict() if known is not None else {}
    return model


def check_patches(model: nn.Module, name: str, size: tuple[int, int] | None = None) -> None:
    """Raise ValueError if images of `size`, by default the model's own, are smaller than one of its patches."""
    try:
        embedding, projection = find_projection(model)
    except ValueError:  # its family has no patch projection, or is not known
        return
    own: Any = getattr(embedding, "img_size", None)
    if size is None or getattr(embedding, "dynamic_img_pad", False):
        size = own
    if size is not None and isinstance(projection.padding, tuple):
        padded = [side + 2 * padding for side, padding in zip(size, projection.padding, strict=True)]
        if any(side < patch for side, patch in zip(padded, projection.kernel_size, strict=True)):
            raise ValueError(say_too_small(name, size, projection.kernel_size))


def say_too_small(name: str, size: Sequence[int], patch: Sequence[int]) -> str:
    sides = [" × ".join(str(side) for side in pair) for pair in (size, patch)]
    return (
        f"images of {sides[0]} pixels are smaller than a patch of {name}, {sides[1]}: take larger images (image_size, "
        "and img_size among its model_kwargs), or a smaller patch_size there"
    )


def _failure(name: str, settings: Mapping[str, Any], pretrained: bool, error: Exception) -> str:
    import timm

    why = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in why:  # timm and torch advise running the pickle
        why = "its file of weights holds more than tensors, or is damaged, and is not unpickled. If you trust it, "
        why += "torch.load(file, weights_only=False) yourself and wellcond.save the model"
        pretrained = False
    elif why == "'architecture'":  # the entry of timm's config.json that timm reads first
        why = f"its config.json is not timm's. A model of transformers is called hf:{name.partition(':')[2]}"
        pretrained = False
    given = "".join(f", {key}={value!r}" for key, value in settings.items())
    message = f"timm cannot build {name}{given}{' with its pretrained weights' if pretrained else ''}: {why}"
    if unknown := re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", why):
        message += _nearest_setting(name, *unknown.groups())
    if "pretrained tag" in why:
        tags = [known.rpartition(".")[2] for known in timm.list_pretrained(f"{name.partition('.')[0]}.*")]
        message += f" It has {', '.join(tags) or 'none'}."
    if pretrained:
        message += " (Where there is no network, or no such weights, name a file of weights as the checkpoint.)"
    return message


def _nearest_setting(name: str, kind: str, wrong: str) -> str:
    import timm

    plain = name.partition(".")[0]
    module = sys.modules.get(timm.model_entrypoint(plain).__module__) if timm.is_model(plain) else None
    found = getattr(module, kind, None)
    return meant(wrong, inspect.signature(found).parameters) if isinstance(found, type) else ""


def _unknown(name: str) -> str:
    import timm

    known = timm.list_models()
    wanted = name.partition(".")[0].lower()
    near = [model for model in known if model.startswith(wanted)][:5]
    hint = f"; did you mean {', '.join(near)}?" if near else meant(wanted, known, most=5)
    if name.endswith(ENDINGS):
        hint = f"; a file of weights is the checkpoint of a model: wellcond measure MODEL --checkpoint {name}"
    elif "/" in name or "\\" in name:
        hint = (
            f"; write {HUB}{name} for one of the Hub, {FOLDER}{name} for a folder, {HUGGINGFACE}{name} for a model of "
            "transformers."
        )
    return f"timm knows no model {name!r}{hint or '; timm.list_models() has them all.'}"


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """Restrict torch.load to tensors, whatever its caller asks for: older versions of timm allow arbitrary pickles."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _load_checkpoint(
    model: nn.Module, name: str, settings: Mapping[str, Any], path: Path, *, ema: bool, strict: bool
) -> tuple[nn.Module, list[str], dict[str, int]]:
    notes = [f"{'averaged ' if ema else ''}weights of {path.name}"]
    sizes = _sizes_of(read_weights(path, ema=ema)[0], model, settings)
    if sizes:
        model = create_model(name, {**settings, **sizes})
    if (classes := sizes.get("num_classes")) is not None:
        notes.append(f"{classes} classes, as its head has them" if classes else "no head, as it has none")
    if channels := sizes.get("in_chans"):
        notes.append(f"pictures of {channels} channel{'s' if channels > 1 else ''}, as its first layer takes them")
    loaded = load(model, path, strict=strict, ema=ema)
    notes += _surgery(loaded)
    if loaded.missing:
        notes.append(f"{_some(loaded.missing)} not in it, and left random")
    if loaded.unexpected:
        notes.append(f"{_some(loaded.unexpected)} in it, but not in the model, and left out")
    return model, notes, sizes


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _sizes_of(weights: dict[str, Tensor], model: nn.Module, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of classes (0: no head) and of channels in the file, where these, and nothing that is set, keep
    its weights from fitting."""
    state = model.state_dict()
    weights = match_names(weights, state)
    misfits = {
        name
        for name in state.keys() | weights.keys()
        if name not in state or name not in weights or state[name].shape != weights[name].shape
    }
    heads, firsts = _names_in(model, "classifier"), _names_in(model, "first_conv")
    of_heads = {f"{head}.{kind}" for head in heads for kind in ("weight", "bias")}
    of_firsts = {f"{first}.weight" for first in firsts}
    sizes: dict[str, int] = {}
    if not misfits <= of_heads | of_firsts:
        return sizes
    if misfits & of_heads and "num_classes" not in settings:
        head = weights.get(f"{heads[0]}.weight")
        sizes["num_classes"] = 0 if head is None else head.shape[0]
    for first in misfits & of_firsts & weights.keys():
        if "in_chans" not in settings:
            sizes["in_chans"] = weights[first].shape[1]
    return sizes


def _names_in(model: nn.Module, entry: str) -> tuple[str, ...]:
    """Return the names of layers that timm's configuration of a model has under an entry: one, several or none."""
    names: Any = _config_of(model).get(entry) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _restore_surgery(model: nn.Module, name: str) -> list[str]:
    """Repeat the surgery recorded in weights that timm has loaded, which without it would be silently wrong."""
    path = weights_behind(name)
    try:
        if path is None or path.suffix != ".safetensors":
            return []
        with safe_open(path, framework="pt") as file:
            ours = METADATA_KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return []
    if not ours:
        return []
    return _surgery(load(model, path))


def _surgery(loaded: Loaded) -> list[str]:
    notes = []
    if loaded.graying is not None:
        notes.append(f"grayed as when it was saved: {loaded.graying.method}, epsilon {loaded.graying.epsilon:g}")
    removed: dict[str, list[str]] = defaultdict(list)
    for block, skips in loaded.skips.items():
        for skip in skips:
            removed[f"the skip {skip} is removed"].append(block)
    replaced: dict[str, list[str]] = defaultdict(list)
    for block, how in loaded.attention.items():
        replaced[f"the attention is {_attention(how)}"].append(block)
    return notes + [
        f"{what} in {blocks[0] if len(blocks) == 1 else f'{len(blocks)} blocks'}, as when it was saved"
        for what, blocks in (*removed.items(), *replaced.items())
    ]


def _attention(how: AttentionSettings) -> str:
    """Return its name and the settings that differ from the defaults: "skyformer (num_landmarks=64)"."""
    usual = find_attention(how.name).core().settings
    chosen = [f"{key}={value!r}" for key, value in how.settings.items() if value != usual.get(key)]
    return f"{how.name} ({', '.join(chosen)})" if chosen else how.name


def _data_config(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return timm's data config, with the image size and channels of the model as built instead of the weights'."""
    from timm.data.config import resolve_model_data_config

    config = resolve_model_data_config(model)
    channels, height, width = config["input_size"]
    embedding: Any = getattr(model, "patch_embed", None)
    size = getattr(embedding, "img_size", None) or settings.get("img_size") or (height, width)
    height, width = (size, size) if isinstance(size, int) else size
    channels = _channels_of(model) or settings.get("in_chans", channels)
    for key in ("mean", "std"):
        values = tuple(config[key])
        config[key] = values if len(values) == channels else (sum(values) / len(values),) * channels
    return {**config, "input_size": (channels, height, width)}


def _channels_of(model: nn.Module) -> int | None:
    first = _config_of(model).get("first_conv")
    try:
        return getattr(model.get_submodule(first), "in_channels", None) if isinstance(first, str) else None
    except AttributeError:
        return None


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "pretrained_cfg", None)
    return config if isinstance(config, dict) else {}
