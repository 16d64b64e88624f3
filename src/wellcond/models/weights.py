"""Weights in plain safetensors files that record the surgery done to their model.

    wellcond.save(model, "grayed.safetensors")                 # timm's names and tensors, loadable without wellcond
    loaded = wellcond.load(fresh_model, "grayed.safetensors")  # grays the model as it was when saved
    loaded.graying                                             # GrayingSettings(method='dct', …)
    loaded.skips                                               # {'blocks.3': ('sa',)}: the removed ones
    loaded.attention                                           # {'blocks.3': AttentionSettings(…)}: the replaced ones

Weights trained with graying, without a skip or with another attention are wrong in a model without the same surgery,
and the parameter names do not show it. So the file's metadata record the surgery, and `load` repeats it, or warns if a
file has no record.

Reading files from any source, and writing our own:

    weights, metadata = read_weights("last.pth.tar")            # safetensors or torch format: the first bytes tell
    weights, _ = read_weights("last.pth.tar", ema=True)         # the averaged weights stored next to the last ones
    write_weights("last.safetensors", weights, metadata)        # the same tensors and metadata give the same bytes
"""

import argparse
import json
import logging
import os
import pickle
import re
import uuid
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wellcond.attention import ATTENTIONS, find_attention
from wellcond.graying import TokenGraying
from wellcond.models.families import unwrap
from wellcond.models.surgery import (
    AttentionSettings,
    GrayingSettings,
    attention_of,
    built_attention,
    check_grayable,
    gray,
    graying_of,
    plan_attention,
    plan_skips,
    put_attention,
    put_skips,
    skips_of,
    ungray,
)

__all__ = [
    "FORMAT",
    "METADATA_KEY",
    "Loaded",
    "load",
    "match_names",
    "read_weights",
    "save",
    "surgery_metadata",
    "write_weights",
]

logger: logging.Logger = logging.getLogger(__name__)

METADATA_KEY = "wellcond"
FORMAT = 1
# What a file may record about its model. A version that does not know an entry refuses the file, since weights without
# their surgery are silently wrong. So skips, attention and autocast are written only if they were changed.
ENTRIES = {"format", "graying", "skips", "attention"}
# Keys under which training loops store the moving average of the weights.
EMA_KEYS = ("state_dict_ema", "model_ema")

Skips = dict[str, tuple[str, ...]]
Attention = dict[str, AttentionSettings]
Recorded = TypeVar("Recorded")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `load` found and did."""

    graying: GrayingSettings | None
    """How the model is grayed now."""
    skips: Skips
    """The skips that are now removed from the model, by block."""
    attention: Attention
    """The attention of the blocks whose attention is now replaced, or was built as one of ours."""
    metadata: dict[str, str]
    """The metadata given to `save`."""
    missing: list[str]
    """Names in the model that the file lacks (only with strict=False)."""
    unexpected: list[str]
    """Names in the file that the model lacks (only with strict=False)."""


def save(model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> None:
    """Save the weights to a safetensors file, with graying, removed skips and replaced attention in its metadata.

    The names are those of the model inside its wrappers (DDP, torch.compile, EMA), and a tensor with two names is
    written twice, so the file loads strictly into the plain model, with or without wellcond. It is written to a
    temporary file and renamed, so `path` never holds a partial file. `metadata` adds text of your own. In a run with
    several processes, call it in only one of them.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file, e.g. {path / 'model.safetensors'}")
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
        aside.chmod(mode)  # safetensors may ignore the umask and create a file that no one else can read
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except SafetensorError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def load(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, ema: bool = False) -> Loaded:
    """Load weights into the model, and repeat the graying, removed skips and replaced attention they were saved with.

    | the file records | the model is | the result |
    |---|---|---|
    | graying | not grayed, or with other settings | grayed as recorded; a warning if that changes its settings |
    | no graying | grayed | ungrayed, with a warning |
    | nothing (not saved by wellcond) | grayed | stays grayed, with a warning |

    Likewise for removed skips: those recorded are removed and all others restored, with a warning if that changes a
    model from which skips were already removed. Likewise for replaced attention, except that an attention the model was
    built with stays: load raises ValueError if the file records another of ours for it, and warns if it records none.

    Also reads `.pt` and `.pth` files, as tensors only (never an unrestricted pickle), with the wrappers and prefixes
    that training loops add: `{"state_dict": …}`, `{"model": …}`, `module.`, `_orig_mod.`, Lightning's `model.`. Of a
    masked autoencoder's weights, and surgery, a ViT takes the encoder's.
    `ema=True` takes the averaged weights that timm and others store next to the last ones, as `state_dict_ema` or
    `model_ema`.

    Raises FileNotFoundError, or ValueError for a file that is damaged or does not fit; the model is then unchanged.
    """
    path = Path(path)
    weights, metadata = read_weights(path, ema=ema)
    metadata.pop("format", None)
    recorded = METADATA_KEY in metadata
    wanted, wanted_skips, wanted_attention = _parse(metadata.pop(METADATA_KEY), path) if recorded else (None, {}, {})
    state = unwrap(model).state_dict()
    wanted_skips = _match_blocks(wanted_skips, weights, state)
    wanted_attention = _match_blocks(wanted_attention, weights, state)
    present, present_skips, present_attention = graying_of(model), skips_of(model), attention_of(model)
    if wanted is not None and wanted != present:
        check_grayable(model)  # raises, e.g. for an unknown family, before anything is changed
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
    gray(model, **asdict(wanted))
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
    if now != wanted:  # the attention that a model was built with stays
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
    """Return the state with plain names, each tensor in its own memory as safetensors requires (tied ones copied)."""
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
        tensors[_plain_name(name)] = value.contiguous()
    return tensors


def _load_state(
    model: nn.Module, weights: dict[str, Tensor], path: Path, *, strict: bool
) -> tuple[list[str], list[str]]:
    """Call `load_state_dict`, but restore the model on failure: torch copies whatever fits before it raises."""
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
    """Return the weights under the names of `state`, where they differ only by what wrappers add to names; those of a
    masked autoencoder's encoder if `state` is that of an encoder alone."""
    names = {_plain_name(name): name for name in state}  # compiled blocks have _orig_mod in the middle of their names
    prefix = _prefix(weights, state)
    inside = {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
    return {names.get(name, name): tensor for name, tensor in inside.items()}


def _prefix(weights: Iterable[str], state: Iterable[str]) -> str:
    """Return what stands before the names of `state` in those of the weights."""
    names, prefix = {_plain_name(name) for name in state}, ""
    theirs = set(weights)
    if not theirs & names and all(name.startswith("model.") for name in theirs):
        prefix = "model."  # Lightning's
    theirs = {name.removeprefix(prefix) for name in theirs}
    inside = {name.removeprefix("encoder.") for name in theirs if name.startswith("encoder.")}
    if not theirs & names and inside & names:
        prefix += "encoder."  # a masked autoencoder's, whose decoder is no longer needed
    return prefix


def _match_blocks(recorded: dict[str, Recorded], weights: Iterable[str], state: Iterable[str]) -> dict[str, Recorded]:
    """Return what a file records about blocks under the model's names for them, as `match_names` does for tensors."""
    if not recorded:
        return recorded
    prefix, names = _prefix(weights, state), list(weights)
    matched: dict[str, Recorded] = {}
    for block, what in recorded.items():
        # `wellcond train` records the surgery of an autoencoder's encoder under the names of the encoder by itself.
        inside = [name for name in (block, f"encoder.{block}") if any(one.startswith(f"{name}.") for one in names)]
        name = inside[0] if inside else block
        if name.startswith(prefix) or not inside:  # otherwise its weights are not loaded
            matched[name.removeprefix(prefix)] = what
    return matched


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


# ---- The surgery that a file records


def surgery_metadata(model: nn.Module) -> dict[str, str]:
    """Return the surgery done to the model as metadata for a file with its weights."""
    settings = graying_of(model)
    surgery: dict[str, Any] = {"format": FORMAT, "graying": asdict(settings) if settings else None}
    if settings and not settings.autocast:
        del surgery["graying"]["autocast"]
    if skips := skips_of(model):
        surgery["skips"] = skips
    if attention := attention_of(model):
        surgery["attention"] = {name: asdict(how) for name, how in attention.items()}
    return {METADATA_KEY: json.dumps(surgery)}


def _check_attention(how: AttentionSettings) -> None:
    """Raise ValueError unless the attention and its settings, names and values, are valid."""
    core, settings = find_attention(how.name).core, dict(how.settings)
    with_weights = settings.get("conv_kernel") is not None  # it needs the number of heads, which is not known here
    core(**settings, **({"num_heads": 1} if with_weights else {}))


def _parse(text: str, path: Path) -> tuple[GrayingSettings | None, Skips, Attention]:
    """Return graying, removed skips and replaced attention; ValueError for what this version cannot restore."""
    try:
        surgery = json.loads(text)
        version, graying = surgery["format"], surgery["graying"]
        unknown = surgery.keys() - ENTRIES
        settings = None if graying is None else GrayingSettings(**graying)
        if settings is not None:
            how = {"restore_scale": settings.restore_scale, "autocast": settings.autocast}
            TokenGraying(settings.method, settings.epsilon, **how)  # checks the values
        skips = {name: tuple(removed) for name, removed in surgery.get("skips", {}).items()}
        attention = {name: AttentionSettings(**how) for name, how in surgery.get("attention", {}).items()}
        unregistered = [how.name for how in attention.values() if how.name not in ATTENTIONS]
        for how in attention.values() if not unregistered else ():
            _check_attention(how)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: its wellcond metadata are damaged, or newer than this version ({error!r}): {text[:200]}. "
            "Upgrade wellcond, or read the weights alone with safetensors.torch.load_file"
        ) from error
    if unregistered and version == FORMAT:
        raise ValueError(
            f"{path} was saved with the attention {unregistered[0]!r}, which is not registered here: "
            "import the module that registers it first"
        )
    if version != FORMAT or unknown:
        what = f"entries {sorted(unknown)}" if unknown else f"format {version}"
        raise ValueError(
            f"{path} was written by a newer wellcond ({what} of its metadata); upgrade wellcond to load it"
        )
    return settings, skips, attention


# ---- Files: tensors only, never an unrestricted pickle


def read_weights(path: str | os.PathLike[str], *, ema: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors, with plain names, and metadata of a safetensors or torch file (its first bytes tell which)."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file of weights in it")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    metadata: dict[str, str] = {}
    try:
        if _is_torchs(path):
            with torch.serialization.safe_globals([argparse.Namespace]):  # timm's checkpoints contain their arguments
                state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            with safe_open(path, framework="pt") as file:
                metadata = dict(file.metadata() or {})
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, or is damaged, and is not unpickled ({_foreign_parts(path, error)}). "
            "If you trust it, torch.load(path, weights_only=False) yourself and wellcond.save the model"
        ) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a truncated pickle can fail in many ways
        why = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        raise ValueError(f"{path} is damaged or is no file of weights ({why}); save or download it again") from error
    return _find_state(state, path, ema=ema), metadata


def write_weights(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with sorted metadata; the library's order differs from process to process."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata=dict(metadata))
    if len(metadata) < 2:
        return
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same names and numbers in another order"
        file.seek(8)
        file.write(text.ljust(length))


def _is_torchs(path: Path) -> bool:
    """Whether the file is torch's: a zip archive, or a pickle from an old version of torch.

    A safetensors file begins with the length of its header, whose first byte may look like that of a pickle; torch.load
    would then read the file without its metadata and lose the surgery. So the safetensors format is checked first.
    """
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8:
        return False
    return start[:2] == b"PK" or start[:1] == b"\x80"


def _foreign_parts(path: Path, error: pickle.UnpicklingError) -> str:
    """Describe what a pickle holds besides tensors: names of classes and functions, which are read but never called."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # an old or damaged file: torch's message gives the first name
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
    if not names:
        return " ".join(str(error).split())[-120:]
    return f"it asks for {', '.join(sorted(names)[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def _find_state(state: Any, path: Path, *, ema: bool) -> dict[str, Tensor]:
    """Return the state dict, with plain names, from what a training loop saved."""
    if ema:
        keys = [key for key in EMA_KEYS if isinstance(state, Mapping) and isinstance(state.get(key), Mapping)]
        if not keys:
            held = ", ".join(map(str, list(state)[:5])) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"{path} holds no averaged weights under {' or '.join(EMA_KEYS)}, only {held}; drop ema")
        state = state[keys[0]]
    for key in ("state_dict", "model_state_dict", "model", "module"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no state dict, neither as such nor under 'state_dict', 'model' or 'module'")
    plain = {_plain_name(name): tensor for name, tensor in state.items()}
    while all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): tensor for name, tensor in plain.items()}
    return plain


def _plain_name(name: str) -> str:
    """Return the name without the prefixes that torch.compile adds."""
    return name.replace("_orig_mod.", "")
