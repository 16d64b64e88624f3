"""Weights in plain safetensors files that remember the surgery done to their model.

    wellcond.save(model, "grayed.safetensors")                 # names and tensors as timm's, loadable without wellcond
    loaded = wellcond.load(fresh_model, "grayed.safetensors")  # grays the model as it was when saved
    loaded.graying                                             # GrayingSettings(method='dct', …)
    loaded.skips                                               # {'blocks.3': ('sa',)}: the removed ones
    loaded.attention                                           # {'blocks.3': AttentionSettings(…)}: the replaced ones

Weights trained with graying, without a skip or with another attention are wrong in a model that differs there, and no
weight's name tells. So the surgery stands in the file's metadata, and `load` repeats it, or warns where a file does not
say.
"""

import logging
import os
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from wellcond.models.attention_settings import attention_of, built_attention
from wellcond.models.families import find_projection, unwrap
from wellcond.models.replace import plan_attention, put_attention
from wellcond.models.skips import plan_skips, put_skips, skips_of
from wellcond.models.surgery import GrayingSettings, gray, graying_of, ungray
from wellcond.models.surgery_metadata import METADATA_KEY, Attention, Skips, parse, surgery_metadata
from wellcond.models.weight_files import plain_name, read_weights, write_weights

__all__ = ["Loaded", "load", "match_names", "save"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `load` found and did."""

    graying: GrayingSettings | None
    """How the model is grayed now."""
    skips: Skips
    """The skips that are removed from the model now, by block."""
    attention: Attention
    """How the blocks attend whose attention is replaced now, or was built as one of ours."""
    metadata: dict[str, str]
    """The metadata given to `save`."""
    missing: list[str]
    """Names of the model that the file lacks (only with strict=False)."""
    unexpected: list[str]
    """Names of the file that the model lacks (only with strict=False)."""


def save(model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write the model's weights to a safetensors file, with its graying, removed skips and other attention as
    metadata.

    The names are those of the model inside its wrappers (DDP, torch.compile, EMA), and a tensor under two names is
    written twice: the file loads strictly into the plain model, with or without wellcond. It is written aside and
    renamed, so that `path` never holds half a file. `metadata` adds text of your own. In a run of several processes,
    call it in one of them.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"weights are saved as safetensors: name the file {path.with_suffix('.safetensors').name}")
    extra = dict(metadata or {})
    if taken := {METADATA_KEY, "format"} & extra.keys():
        raise ValueError(f"the metadata keys {sorted(taken)} are taken by the file itself; choose another name")
    if bad := [key for key, value in extra.items() if not (isinstance(key, str) and isinstance(value, str))]:
        raise ValueError(f"safetensors metadata maps text to text; convert {bad[:3]}, e.g. with json.dumps")
    tensors = _own_tensors(unwrap(model).state_dict())
    extra |= surgery_metadata(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        aside.touch()
        mode = aside.stat().st_mode
        write_weights(aside, tensors, {"format": "pt", **extra})
        aside.chmod(mode)  # safetensors may leave a file that nobody else can read, whatever the umask says
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except SafetensorError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def load(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, ema: bool = False) -> Loaded:
    """Load weights into the model, and gray it, remove its skips and replace its attention as when they were saved.

    | the file | the model | what happens |
    |---|---|---|
    | says grayed | not grayed, or otherwise | is grayed as the file says; a warning if that changes its settings |
    | says not grayed | grayed | is ungrayed, with a warning |
    | does not say (not saved by wellcond) | grayed | stays grayed, with a warning |

    Likewise for removed skips: those of the file are removed and all others restored, with a warning if that changes a
    model that lacked some already. And likewise for replaced attention; one that the model was built with stays, and
    raises where the file has another of ours, or warns where it has none.

    Also reads `.pt` and `.pth` files, as tensors only (never a free pickle), with the wrappings and prefixes that
    training loops leave: `{"state_dict": …}`, `{"model": …}`, `module.`, `_orig_mod.`, Lightning's `model.`. `ema=True`
    takes the averaged weights that timm and others keep beside the last ones, under `state_dict_ema` or `model_ema`.

    Raises FileNotFoundError, or ValueError for a file that is damaged or does not fit; the model is then unchanged.
    """
    path = Path(path)
    weights, metadata = read_weights(path, ema=ema)
    metadata.pop("format", None)
    recorded = METADATA_KEY in metadata
    wanted, wanted_skips, wanted_attention = parse(metadata.pop(METADATA_KEY), path) if recorded else (None, {}, {})
    present, present_skips, present_attention = graying_of(model), skips_of(model), attention_of(model)
    if wanted is not None and wanted != present:
        find_projection(model)  # it may be of an unknown family: every reason to fail comes before the first change
    try:
        plan = plan_skips(model, wanted_skips) if recorded else {}
    except ValueError as error:
        raise ValueError(f"{path} was saved with removed skips that this model cannot have: {error}") from error
    try:
        attention_plan = plan_attention(model, wanted_attention) if recorded else {}
    except ValueError as error:
        raise ValueError(f"{path} was saved with an attention that this model cannot have: {error}") from error
    missing, unexpected = _load_state(unwrap(model), weights, path, strict=strict)
    if recorded:
        _restore_graying(model, wanted, present, path)
        put_skips(plan)
        _tell_of_skips(wanted_skips, present_skips, path)
        put_attention(model, attention_plan)
        _tell_of_attention(wanted_attention, present_attention, path, attention_of(model))
    elif present is not None:
        warnings.warn(
            f"{path} does not say whether its weights were trained with graying; the model stays grayed ({present}). "
            "If they were not, call wellcond.ungray(model); wellcond.save records the answer for the next time",
            stacklevel=2,
        )
    if not recorded and present_skips:
        warnings.warn(
            f"{path} does not say whether its weights were trained without skips; the model stays as it is "
            f"({_in_words(present_skips)}). If they were not, call wellcond.restore_skip(model); wellcond.save records "
            "the answer for the next time",
            stacklevel=2,
        )
    if not recorded and present_attention.keys() - built_attention(model).keys():
        warnings.warn(
            f"{path} does not say with which attention its weights were trained; the model stays as it is "
            f"({_attention_in_words(present_attention)}). If they were trained with the model's own, call "
            "wellcond.restore_attention(model); wellcond.save records the answer for the next time",
            stacklevel=2,
        )
    return Loaded(
        graying=graying_of(model),
        skips=skips_of(model),
        attention=attention_of(model),
        metadata=metadata,
        missing=missing,
        unexpected=unexpected,
    )


def _restore_graying(
    model: nn.Module, wanted: GrayingSettings | None, present: GrayingSettings | None, path: Path
) -> None:
    if wanted == present:
        return
    if wanted is None:
        ungray(model)
        warnings.warn(f"{path} was saved without graying: the model, grayed until now, is ungrayed", stacklevel=3)
        return
    gray(model, wanted.method, epsilon=wanted.epsilon, restore_scale=wanted.restore_scale)
    if present is None:
        logger.info("grayed the model as %s says: %s", path, wanted)
    else:
        warnings.warn(f"{path} was saved with {wanted}: these replace the model's {present}", stacklevel=3)


def _tell_of_skips(wanted: Skips, present: Skips, path: Path) -> None:
    if wanted == present:
        return
    if not present:
        logger.info("removed skips as %s says: %s", path, _in_words(wanted))
        return
    warnings.warn(
        f"{path} was saved with {_in_words(wanted)}, and so is the model now; until now it had {_in_words(present)}",
        stacklevel=3,
    )


def _in_words(skips: Skips) -> str:
    if not skips:
        return "all skips"
    blocks = [f"{name}: {', '.join(removed)}" for name, removed in skips.items()]
    return f"removed skips ({'; '.join(blocks[:3])}{f' and {len(blocks) - 3} blocks more' if len(blocks) > 3 else ''})"


def _tell_of_attention(wanted: Attention, present: Attention, path: Path, now: Attention) -> None:
    if now != wanted:  # what a model was built with cannot be restored
        built = {name: how for name, how in now.items() if name not in wanted}
        warnings.warn(
            f"{path} was saved with {_attention_in_words(wanted)}; this model was built with "
            f"{_attention_in_words(built)}, which stays, and its weights were not trained for that",
            stacklevel=3,
        )
        return
    if wanted == present:
        return
    if not present:
        logger.info("replaced attention as %s says: %s", path, _attention_in_words(wanted))
        return
    warnings.warn(
        f"{path} was saved with {_attention_in_words(wanted)}, and so is the model now; until now it had "
        f"{_attention_in_words(present)}",
        stacklevel=3,
    )


def _attention_in_words(attention: Attention) -> str:
    if not attention:
        return "the model's own attention"
    names = sorted({how.name for how in attention.values()})
    return f"{' and '.join(names)} attention in {len(attention)} blocks ({next(iter(attention))} first)"


def _own_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state with plain names, each tensor in memory of its own as safetensors demand (tied weights are copied)."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the model's {name} is a {type(value).__name__}; safetensors hold tensors alone")
        if hasattr(value, "full_tensor") or value.is_meta:
            raise ValueError(
                f"the model's {name} is {'on the meta device' if value.is_meta else 'sharded'}: gather it first, e.g. "
                "with torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)"
            )
        value, storage = value.detach(), value.untyped_storage()
        place = (value.device, storage.data_ptr())
        whole = storage.nbytes() == value.numel() * value.element_size()
        if place in seen or not whole:
            value = value.clone(memory_format=torch.contiguous_format)
        seen.add(place)
        tensors[plain_name(name)] = value.contiguous()
    return tensors


def _load_state(
    model: nn.Module, weights: dict[str, Tensor], path: Path, *, strict: bool
) -> tuple[list[str], list[str]]:
    """`load_state_dict` that leaves the model as it was when it fails: torch's copies what fits, then complains."""
    before = model.state_dict()
    if any(isinstance(value, Tensor) and value.is_meta for value in before.values()):
        raise ValueError('the model is on the meta device, without memory: call model.to_empty(device="cpu") first')
    if any(hasattr(value, "full_tensor") for value in before.values()):
        raise ValueError("the model is sharded: load its weights before fully_shard")
    weights = match_names(weights, before)
    if not weights.keys() & before.keys():
        raise ValueError(_misfit(path, before, weights))
    backup = {name: value.clone() if isinstance(value, Tensor) else value for name, value in before.items()}
    try:
        result = model.load_state_dict(weights, strict=strict)
    except Exception as error:
        model.load_state_dict(backup)
        raise ValueError(_misfit(path, before, weights, str(error))) from error
    return list(result.missing_keys), list(result.unexpected_keys)


def match_names(weights: dict[str, Tensor], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights under the names of `state`, where those differ by what wrappers add to them."""
    names = {plain_name(name): name for name in state}  # compiled blocks have _orig_mod in the middle of theirs
    if not weights.keys() & names.keys() and all(name.startswith("model.") for name in weights):
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}  # Lightning's
    return {names.get(name, name): tensor for name, tensor in weights.items()}


def _misfit(path: Path, model: Mapping[str, Any], weights: Mapping[str, Tensor], otherwise: str = "") -> str:
    shapes = [
        f"{name} {tuple(weights[name].shape)}, not {tuple(model[name].shape)}"
        for name in model
        if name in weights and isinstance(model[name], Tensor) and weights[name].shape != model[name].shape
    ]
    kinds = {
        "it lacks": [name for name in model if name not in weights],
        "the model lacks": [name for name in weights if name not in model],
        "of another shape": shapes,
    }
    parts = [
        f"{kind}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for kind, names in kinds.items()
        if names
    ]
    return (
        f"{path} does not fit the model, which is unchanged; {'; '.join(parts) or otherwise}. Build the model with the "
        "file's own settings (name, num_classes, img_size); strict=False, wellcond measure's --no-strict, leaves out "
        "names that only one of them has"
    )
