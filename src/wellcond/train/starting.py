"""The weights that a training starts from: another run's, timm's, or a masked autoencoder's.

notes = start_from(model, "step-00000500/model.safetensors")        # a classifier; a head that does not fit stays fresh
notes = start_masked_from(autoencoder, "vit.safetensors")           # its encoder, and its decoder if the file has one

The notes say what was not taken over, the file's surgery (surgery_difference.py) among it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.models.mae import MaskedAutoencoder
from wellcond.models.weights import match_names, read_weights
from wellcond.train.surgery_difference import surgery_differences

__all__ = ["start_from", "start_masked_from"]

ENCODER = "encoder."
HEADS = ("head.", "head_dist.", "fc.")


def start_from(model: nn.Module, path: str) -> list[str]:
    """Weights of a file, but for a head that does not fit, which starts fresh. The surgery is the configuration's."""
    weights, metadata = read_weights(path)
    state = model.state_dict()
    if _is_masked(weights):
        weights = _encoder_of(weights)  # the decoder has done its work
    weights = _renamed(weights, state)
    fits = _fitting(weights, state)
    head = {name for name in state if name.startswith(HEADS)}
    _check(path, state, state.keys() - fits.keys() - head)
    model.load_state_dict(fits, strict=False)
    return [*_left_out(path, weights.keys() - state.keys()), *surgery_differences(model, metadata, path)]


def start_masked_from(model: MaskedAutoencoder, path: str) -> list[str]:
    """The weights of a masked autoencoder, or of an encoder by itself, whose decoder then starts at random."""
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
        model.keep_positions = True  # the file's are trained ones, and go on being trained
        fixed.requires_grad_(True)
    model.load_state_dict(fits, strict=False)
    notes += _left_out(path, weights.keys() - state.keys())
    return [*notes, *surgery_differences(model.encoder, metadata, path)]


def _is_masked(weights: Iterable[str]) -> bool:
    return any(name.startswith(ENCODER) for name in weights)


def _encoder_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(ENCODER): tensor for name, tensor in weights.items() if name.startswith(ENCODER)}


def _renamed(weights: dict[str, Tensor], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Under the model's names. With mean pooling timm keeps a ViT's last norm behind the pool."""
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
    """Of what the file holds beyond the model; a head or a decoder has done its work."""
    left = sorted(name for name in names if not name.startswith((*HEADS, "decoder.")))
    if not left:
        return []
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return [f"{path} holds tensors that the model has no place for, and that are left out: {', '.join(left[:3])}{more}"]
