"""What a file with weights says was done to their model, as text.

surgery_metadata(model)                    # {"wellcond": '{"format": 1, "graying": {"method": "dct", …}}'}
graying, skips, attention = parse(text, path)
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.attention import find_attention
from wellcond.graying import TokenGraying
from wellcond.models.attention_settings import AttentionSettings, attention_of
from wellcond.models.skips import skips_of
from wellcond.models.surgery import GrayingSettings, graying_of

__all__ = ["FORMAT", "METADATA_KEY", "Attention", "Skips", "parse", "surgery_metadata"]

METADATA_KEY = "wellcond"
FORMAT = 1
# What a file may say was done to its model. A version that does not know an entry refuses the file, since weights
# without their surgery are silently wrong. So skips and attention are written only if there are such.
ENTRIES = {"format", "graying", "skips", "attention"}

Skips = dict[str, tuple[str, ...]]
Attention = dict[str, AttentionSettings]


def surgery_metadata(model: nn.Module) -> dict[str, str]:
    """What was done to the model, as the metadata of a file with its weights."""
    settings = graying_of(model)
    surgery: dict[str, Any] = {"format": FORMAT, "graying": asdict(settings) if settings else None}
    if skips := skips_of(model):
        surgery["skips"] = skips
    if attention := attention_of(model):
        surgery["attention"] = {name: asdict(how) for name, how in attention.items()}
    return {METADATA_KEY: json.dumps(surgery)}


def _check_attention(how: AttentionSettings) -> None:
    """The name, and names and values of the settings."""
    core, settings = find_attention(how.name).core, dict(how.settings)
    with_weights = settings.get("conv_kernel") is not None  # for each head, of which a file has no number here
    core(**settings, **({"num_heads": 1} if with_weights else {}))


def parse(text: str, path: Path) -> tuple[GrayingSettings | None, Skips, Attention]:
    """Graying, removed skips and replaced attention; ValueError for what this version cannot restore."""
    try:
        surgery = json.loads(text)
        version, graying = surgery["format"], surgery["graying"]
        unknown = surgery.keys() - ENTRIES
        settings = None if graying is None else GrayingSettings(**graying)
        if settings is not None:
            TokenGraying(settings.method, settings.epsilon, restore_scale=settings.restore_scale)  # checks the values
        skips = {name: tuple(removed) for name, removed in surgery.get("skips", {}).items()}
        attention = {name: AttentionSettings(**how) for name, how in surgery.get("attention", {}).items()}
        for how in attention.values():
            _check_attention(how)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: its wellcond metadata are damaged, or newer than this version ({error!r}): {text[:200]}. "
            "Upgrade wellcond, or read the weights alone with safetensors.torch.load_file"
        ) from error
    if version != FORMAT or unknown:
        what = f"entries {sorted(unknown)}" if unknown else f"format {version}"
        raise ValueError(
            f"{path} was written by a newer wellcond ({what} of its metadata); upgrade wellcond to load it"
        )
    return settings, skips, attention
