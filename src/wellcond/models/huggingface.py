"""Vision models of the transformers library by name: `hf:google/vit-base-patch16-224`, or `hf:` and a folder.

    model = create_huggingface("hf:folder", {"num_hidden_layers": 2}, pretrained=True)       # settings of its config
    data_config_of(model, "hf:folder")      # size, mean and std, as in its preprocessor_config.json, in timm's words

Weights come from safetensors files alone, and no code of a repository is run. A model of images and text (CLIP, SigLIP)
is its image part, and a masked autoencoder (ViTMAE) hides nothing. Weights of half precision become float32, as timm's.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.words import meant

__all__ = ["HUGGINGFACE", "create_huggingface", "data_config_of", "folder_of"]

HUGGINGFACE = "hf:"
HALF = (0.5, 0.5, 0.5)
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
POOLER = "pooler."  # after the last block; many files of weights have none


def create_huggingface(name: str, settings: Mapping[str, Any], *, pretrained: bool) -> nn.Module:
    """Build a vision model of transformers, with its weights or with random ones.

    Raises ValueError if it cannot be built, if it reads something other than images, and for unknown settings.
    """
    try:
        from transformers import AutoModel, AutoModelForImageClassification
    except ImportError as error:
        raise ValueError(f"{name} needs transformers, which is not installed: pip install 'wellcond[hf]'") from error

    path, revision = _place(name)
    config = _config(name)
    unknown = [key for key in settings if not hasattr(config, key)]
    if unknown:
        hint = meant(unknown[0], config.to_dict()) or ": settings are those of its config.json"
        raise ValueError(f"the configuration of {name} has no {unknown[0]!r}{hint}")
    for key, value in settings.items():
        setattr(config, key, value)
    if "mask_ratio" not in settings and hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    classifies = any("ForImageClassification" in one for one in config.architectures or ())
    kind: Any = AutoModelForImageClassification if classifies else AutoModel
    missing: Iterable[str] = ()
    try:
        with _quiet():
            if pretrained:
                model, info = kind.from_pretrained(
                    path, revision=revision, config=config, use_safetensors=True, trust_remote_code=False,
                    output_loading_info=True,
                )  # fmt: skip
                missing = sorted(key for key in info["missing_keys"] if not key.startswith(POOLER))
            else:
                model = kind.from_config(config, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"transformers cannot build {name}: {_first_line(error)}") from error
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(
            f"the weights of {name} are not those of a {type(model).__name__}: {some} would be left random. Leave out "
            "pretrained for random weights, or load them yourself and measure with wellcond.Probe(model)"
        )
    if model.main_input_name != "pixel_values":
        raise ValueError(
            f"{name} reads {model.main_input_name}, not images: measure it in a program of your own, with "
            "wellcond.Probe(model)"
        )
    return model.float()


def _config(name: str) -> Any:
    """Return the configuration of a model, of its image part if it has several."""
    from transformers import AutoConfig

    path, revision = _place(name)
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"transformers cannot read the configuration of {name}: {_first_line(error)}") from error
    return getattr(config, "vision_config", config)


def _place(name: str) -> tuple[str, str | None]:
    path, _, revision = name.removeprefix(HUGGINGFACE).partition("@")
    return path, revision or None


def data_config_of(model: nn.Module, name: str) -> dict[str, Any]:
    """Return timm's words for the images that a model expects; mean and std are 0.5 where no file says otherwise.

    Raises ValueError if neither its configuration nor that of its image processor has a size.
    """
    from transformers import AutoImageProcessor

    config: Any = model.config
    path, revision = _place(name)
    said: Any = None
    with contextlib.suppress(Exception), _quiet():  # many repositories have no such file
        said = AutoImageProcessor.from_pretrained(path, revision=revision, trust_remote_code=False)
    crop = _sides(getattr(said, "crop_size", None)) if getattr(said, "do_center_crop", False) else None
    resized = _sides(getattr(said, "size", None))
    sides = _sides(getattr(config, "image_size", None)) or crop or resized
    if sides is None:
        raise ValueError(
            f"{name} does not say how large its images are: measure it in a program of your own, with "
            "wellcond.Probe(model)"
        )
    channels = getattr(config, "num_channels", 3)
    normalized = getattr(said, "do_normalize", True)
    mean, std = (
        _by_channel(getattr(said, key, None) or HALF if normalized else plain, channels)
        for key, plain in (("image_mean", 0.0), ("image_std", 1.0))
    )
    cropped = crop[0] / resized[0] if crop and resized else getattr(said, "crop_pct", None)
    whole = "shortest_edge" not in (getattr(said, "size", None) or ())
    resample = getattr(said, "resample", None)
    return {
        "input_size": (channels, *sides), "mean": mean, "std": std,
        "interpolation": "bicubic" if resample is None else INTERPOLATIONS[int(resample)],
        "crop_pct": min(cropped or 1.0, 1.0), "crop_mode": "squash" if whole else "center",
    }  # fmt: skip


def _sides(size: Any) -> tuple[int, int] | None:
    """Return height and width of a size as configurations write it: a number, a pair, or one of several dicts."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple):
        return (size[0], size[1]) if len(size) == 2 else None
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        found = dict(size)
        height = found.get("height") or found["shortest_edge"]
        return int(height), int(found.get("width") or height)
    return None


def _by_channel(value: Any, channels: int) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return (values * channels if len(values) == 1 else values)[:channels]


def folder_of(name: str) -> Path | None:
    """Return the folder that a name means, None if it is one of the Hub."""
    path = Path(_place(name)[0])
    return path if path.is_dir() else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing what it loads, and which weights of a head it left out."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is not run; load it yourself and measure with wellcond.Probe(model)"
    return (" ".join(str(error).split("\n\n")[0].split()) or type(error).__name__)[:400]
