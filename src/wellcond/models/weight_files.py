"""Files of weights. Reading anybody's: tensors alone, never a free pickle, with plain names; and writing our own.

weights, metadata = read_weights("last.pth.tar")            # safetensors or torch's; the first bytes tell
weights, _ = read_weights("last.pth.tar", ema=True)         # the averaged ones that training loops keep beside
write_weights("last.safetensors", weights, metadata)        # the same tensors and metadata give the same bytes
"""

import argparse
import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["plain_name", "read_weights", "write_weights"]

# Where training loops keep the moving average of the weights.
EMA_KEYS = ("state_dict_ema", "model_ema")


def read_weights(path: str | os.PathLike[str], *, ema: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, with plain names, and the metadata of a safetensors or torch file (the first bytes tell)."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file of weights in it")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    metadata: dict[str, str] = {}
    try:
        if _is_torchs(path):
            with torch.serialization.safe_globals([argparse.Namespace]):  # timm's checkpoints keep their arguments
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
    except Exception as error:  # a torn pickle fails in as many ways as there are places to tear it
        why = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        raise ValueError(f"{path} is damaged or is no file of weights ({why}); save or download it again") from error
    return _find_state(state, path, ema=ema), metadata


def write_weights(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file. Its library writes the metadata in an order that changes with every process: here sorted."""
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
    """A zip archive, or the pickle of old versions of torch.

    A safetensors file begins with the length of its header, whose first byte may be a pickle's too, and torch.load
    reads such a file without its metadata: surgery would be lost. So that form is looked for first.
    """
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8:
        return False
    return start[:2] == b"PK" or start[:1] == b"\x80"


def _foreign_parts(path: Path, error: pickle.UnpicklingError) -> str:
    """What a pickle holds besides tensors: names of classes and functions, which are read and never called."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # an old file, or a damaged one: the first of them stands in torch's message
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
    if not names:
        return " ".join(str(error).split())[-120:]
    return f"it asks for {', '.join(sorted(names)[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def _find_state(state: Any, path: Path, *, ema: bool) -> dict[str, Tensor]:
    """The state dict inside what a training loop saved, with plain names."""
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
    plain = {plain_name(name): tensor for name, tensor in state.items()}
    while all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): tensor for name, tensor in plain.items()}
    return plain


def plain_name(name: str) -> str:
    """Without what torch.compile puts before it."""
    return name.replace("_orig_mod.", "")
