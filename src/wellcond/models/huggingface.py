"""Vision models of the transformers library by name: `hf:google/vit-base-patch16-224`, or `hf:` and a folder.

    model = create_huggingface("hf:folder", {"num_hidden_layers": 2}, pretrained=True)       # settings of its config
    data_config_of(model, "hf:folder")      # size, mean and std, as in its preprocessor_config.json, in timm's words

Weights come from safetensors files alone, and no code of a repository is run. A model of images and text (CLIP, SigLIP)
is its image part.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.words import meant

__all__ = ["HUGGINGFACE", "create_huggingface", "data_config_of", "folder_of"]

HUGGINGFACE = "hf:"
PREPROCESSOR = "preprocessor_config.json"
HALF = (0.5, 0.5, 0.5)


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
    classifies = any("ForImageClassification" in one for one in config.architectures or ())
    kind = AutoModelForImageClassification if classifies else AutoModel
    try:
        with _quiet():
            if pretrained:
                model = kind.from_pretrained(path, revision=revision, config=config, use_safetensors=True)
            else:
                model = kind.from_config(config)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"transformers cannot build {name}: {_first_line(error)}") from error
    if model.main_input_name != "pixel_values":
        raise ValueError(
            f"{name} reads {model.main_input_name}, not images: measure it in a program of your own, with "
            "wellcond.Probe(model)"
        )
    return model


def _config(name: str) -> Any:
    """Return the configuration of a model, of its image part if it has several."""
    from transformers import AutoConfig

    path, revision = _place(name)
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(path, revision=revision)
    except Exception as error:
        raise ValueError(f"transformers cannot read the configuration of {name}: {_first_line(error)}") from error
    return getattr(config, "vision_config", config)


def _place(name: str) -> tuple[str, str | None]:
    path, _, revision = name.removeprefix(HUGGINGFACE).partition("@")
    return path, revision or None


def data_config_of(model: nn.Module, name: str) -> dict[str, Any]:
    """Return timm's words for the images that a model expects; mean and std are 0.5 where no file says otherwise."""
    from transformers.image_processing_base import ImageProcessingMixin

    config: Any = model.config
    path, revision = _place(name)
    said: dict[str, Any] = {}
    with contextlib.suppress(Exception), _quiet():  # many repositories have no such file
        said, _ = ImageProcessingMixin.get_image_processor_dict(path, revision=revision)
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", 3)
    mean, std = (tuple(said.get(key) or HALF)[:channels] for key in ("image_mean", "image_std"))
    crop = said.get("do_center_crop") and isinstance(said.get("size"), dict) and said["size"].get("shortest_edge")
    return {
        "input_size": (channels, height, width), "mean": mean, "std": std, "interpolation": "bicubic",
        "crop_pct": height / crop if crop else 1.0, "crop_mode": "center" if crop else "squash",
    }  # fmt: skip


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
    return (" ".join(str(error).split("\n\n")[0].split()) or type(error).__name__)[:400]
