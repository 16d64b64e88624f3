"""The weights that a training starts from: another run's, timm's, or a masked autoencoder's.

notes = start_from(model, "step-00000500/model.safetensors")        # a classifier; a head that does not fit stays fresh
notes = start_masked_from(autoencoder, "vit.safetensors")           # its encoder, and its decoder if the file has one
notes = notes_on_pretrained(model, "local-dir:folder")              # for weights that timm has loaded

The notes say what was not loaded, and whether the file's weights were trained with other surgery than the model has:

    "mae.safetensors was trained with graying (dct, epsilon 0.95), and this run has no graying; to take over what the
    file had: --set gray=dct --set epsilon=0.95"

The names of weights do not show the surgery, and a run's surgery comes only from its configuration, so that
config.json can repeat the run. Hence notes rather than a change to the model.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from wellcond.models.mae import MaskedAutoencoder
from wellcond.models.pretrained import weights_behind
from wellcond.models.sites import find_blocks
from wellcond.models.weights import FORMAT, METADATA_KEY, match_names, read_weights, surgery_metadata

__all__ = ["notes_on_pretrained", "start_from", "start_masked_from"]

ENCODER = "encoder."
HEADS = ("head.", "head_dist.", "fc.")


def start_from(model: nn.Module, path: str) -> list[str]:
    """Load the weights of a file, except a head that does not fit, which starts fresh. Surgery stays as configured."""
    weights, metadata = read_weights(path)
    state = model.state_dict()
    if _is_masked(weights):
        weights = _encoder_of(weights)  # the decoder is no longer needed
    weights = _renamed(weights, state)
    fits = _fitting(weights, state)
    head = {name for name in state if name.startswith(HEADS)}
    _check(path, state, state.keys() - fits.keys() - head)
    model.load_state_dict(fits, strict=False)
    return [*_left_out(path, weights.keys() - state.keys()), *surgery_differences(model, metadata, path)]


def start_masked_from(model: MaskedAutoencoder, path: str) -> list[str]:
    """Load the weights of a masked autoencoder, or of an encoder alone, in which case the decoder starts at random."""
    weights, metadata = read_weights(path)
    notes = []
    encoder = model.encoder.state_dict()
    if _is_masked(weights):
        state = model.state_dict()
        inside = _renamed(_encoder_of(weights), encoder)
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(ENCODER)}
        weights |= {f"{ENCODER}{name}": tensor for name, tensor in inside.items()}
        fits = _fitting(weights, state)
        _check(path, state, state.keys() - fits.keys(), "; decoder_dim, decoder_depth and decoder_heads, too")
    else:
        inside = weights = _renamed(weights, encoder)
        state, fits = encoder, _fitting(weights, encoder)
        _check(path, state, state.keys() - fits.keys())
        fits = {f"{ENCODER}{name}": tensor for name, tensor in fits.items()}
        notes.append(f"{path} holds an encoder without a masked autoencoder's decoder, which starts at random")
    fixed = model.encoder.pos_embed
    if fixed is not None and not torch.equal(fixed.cpu(), inside["pos_embed"].to(fixed.dtype)):
        model.keep_positions = True  # the file's positions were trained, and go on being trained
        fixed.requires_grad_(True)
    model.load_state_dict(fits, strict=False)
    notes += _left_out(path, weights.keys() - state.keys())
    return [*notes, *surgery_differences(model.encoder, metadata, path)]


def notes_on_pretrained(model: nn.Module, name: str) -> list[str]:
    """Return notes on weights that timm loaded by the model's name, if there is a file: it may be one of wellcond's."""
    path = weights_behind(name)
    if path is None or path.suffix != ".safetensors":
        return []
    with safe_open(path, framework="pt") as file:
        return surgery_differences(model, file.metadata() or {}, str(path))


def _is_masked(weights: Iterable[str]) -> bool:
    return any(name.startswith(ENCODER) for name in weights)


def _encoder_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(ENCODER): tensor for name, tensor in weights.items() if name.startswith(ENCODER)}


def _renamed(weights: dict[str, Tensor], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rename weights to the model's names. With mean pooling, timm puts a ViT's last norm after the pool (fc_norm)."""
    weights = match_names(weights, state)
    for theirs, mine in (("norm.", "fc_norm."), ("fc_norm.", "norm.")):
        if f"{theirs}weight" not in state and f"{mine}weight" in state and f"{mine}weight" not in weights:
            weights = {
                mine + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
                for name, tensor in weights.items()
            }
    return weights


def _fitting(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name in state and tensor.shape == state[name].shape}


def _check(path: str, state: Mapping[str, Any], missing: Iterable[str], more: str = "") -> None:
    names = sorted(missing)
    if names:
        raise ValueError(
            f"{path} does not fit the model: {len(names)} of its {len(state)} tensors are missing or of another "
            f"shape, e.g. {', '.join(names[:3])}; the same model and model_kwargs as in its own training fit{more}"
        )


def _left_out(path: str, names: Iterable[str]) -> list[str]:
    """Return a note on tensors that only the file has; a head or a decoder is no longer needed, and not mentioned."""
    left = sorted(name for name in names if not name.startswith((*HEADS, "decoder.")))
    if not left:
        return []
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return [f"{path} holds tensors that the model has no place for, and that are left out: {', '.join(left[:3])}{more}"]


# ---- surgery: graying, removed skips, attention


def surgery_differences(model: nn.Module, metadata: Mapping[str, str], path: str) -> list[str]:
    """Return a sentence for each kind of surgery in which the file's weights and the model differ."""
    mine = _entries(surgery_metadata(model)[METADATA_KEY], path)
    if METADATA_KEY not in metadata:
        return [
            f"{path} does not say how its weights were trained; this run has {words(mine[kind])}"
            for kind, (words, _) in KINDS.items()
            if mine[kind]
        ]
    theirs = _entries(metadata[METADATA_KEY], path)
    notes = []
    for kind, (words, settings) in KINDS.items():
        if theirs[kind] != mine[kind]:
            notes.append(
                f"{path} was trained with {words(theirs[kind])}, and this run has {words(mine[kind])}; to take over "
                f"what the file had: {settings(theirs[kind], model)}"
            )
    return notes


def _entries(text: str, path: str) -> dict[str, Any]:
    """Return the surgery in a file's metadata, by kind, with blocks named as in an encoder by itself."""
    try:
        found = dict(json.loads(text))
        if found.pop("format") != FORMAT or found.keys() - KINDS.keys():
            raise ValueError(f"entries {sorted(found)}")
        for kind in ("skips", "attention"):
            found[kind] = {name.removeprefix("encoder."): how for name, how in found.get(kind, {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: its wellcond metadata are damaged, or newer than this version ({error}); upgrade wellcond"
        ) from None
    return found


def _graying_words(how: Mapping[str, Any] | None) -> str:
    if not how:
        return "no graying"
    unscaled = "" if how["restore_scale"] else ", its scale not restored"
    return f"graying ({how['method']}, epsilon {how['epsilon']:g}{unscaled})"


def _graying_settings(how: Mapping[str, Any] | None, model: nn.Module) -> str:
    if not how:
        return "--set gray="
    mine = json.loads(surgery_metadata(model)[METADATA_KEY])["graying"] or {"restore_scale": True}
    scale = f" --set restore_scale={str(how['restore_scale']).lower()}"
    same = how["restore_scale"] == mine["restore_scale"]
    return f"--set gray={how['method']} --set epsilon={how['epsilon']!r}{'' if same else scale}"


def _skips_words(skips: Mapping[str, list[str]]) -> str:
    return f"removed skips ({_by_block(skips, ' and '.join)})" if skips else "all skips"


def _skips_settings(skips: Mapping[str, list[str]], model: nn.Module) -> str:
    removed = sorted({skip for names in skips.values() for skip in names}, reverse=True)
    return f"--set remove_skips={','.join(removed)}{_unless_everywhere(skips, model)}"


def _attention_words(attention: Mapping[str, Mapping[str, Any]]) -> str:
    if not attention:
        return "the model's own attention"
    return f"another attention ({_by_block(attention, lambda how: how['name'])})"


def _attention_settings(attention: Mapping[str, Mapping[str, Any]], model: nn.Module) -> str:
    if not attention:
        return "--set attention= --set attention_kwargs="
    how = next(iter(attention.values()))
    text = f"--set attention={how['name']}"
    if how["settings"]:
        text += " --set " + shlex.quote(f"attention_kwargs={how['settings']}")
    return text + _unless_everywhere(attention, model)


KINDS: dict[str, tuple[Callable[[Any], str], Callable[[Any, nn.Module], str]]] = {
    "graying": (_graying_words, _graying_settings),
    "skips": (_skips_words, _skips_settings),
    "attention": (_attention_words, _attention_settings),
}
"""The kinds of surgery in a file's metadata: how to describe each in words, and as settings of a configuration."""


def _by_block(what: Mapping[str, Any], words: Callable[[Any], str]) -> str:
    """Return e.g. `sa in 12 blocks, sa and mlp in blocks.3`."""
    blocks: dict[str, list[str]] = {}
    for name, how in what.items():
        blocks.setdefault(words(how), []).append(name)
    return ", ".join(f"{w} in {b[0] if len(b) == 1 else f'{len(b)} blocks'}" for w, b in blocks.items())


def _unless_everywhere(what: Mapping[str, Any], model: nn.Module) -> str:
    """Return a caveat if the blocks are not all changed alike, as a configuration would change them."""
    alike = len({json.dumps(how, sort_keys=True) for how in what.values()}) <= 1
    everywhere = not what or what.keys() >= {block.name.removeprefix("encoder.") for block in find_blocks(model)}
    return "" if alike and everywhere else " (in all blocks alike, which the file's are not)"
