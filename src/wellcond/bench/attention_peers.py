"""The attentions that `wellcond bench attention` measures: ours, and what they could be replaced by.

    for peer in peers_on(torch.device("cuda"), landmarks=128):
        out = peer.function(q, k, v)                # (batch, heads, n, width), of peer.dtype

Beside torch's own attention (flash) these are the orders of operations that Skyformer and Nyströmformer were published
with, in plain torch operations, and on a GPU FlexAttention for the exact Gaussian kernel.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellcond.attention import (
    kernelized_attention,
    linear_attention,
    nystrom_attention,
    skyformer_attention,
    softmax_attention,
)
from wellcond.attention.compat import skyformer_compat
from wellcond.attention.landmarks import segment_means

__all__ = ["Function", "Peer", "flex_gaussian", "nystromformer", "peers_on"]

COMPILED_AT = (1024, 4096, 16_384, 65_536)  # what is compiled anew for each shape takes longer to compile than to run
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    name: str
    function: Function
    dtype: torch.dtype
    twin: Function | None = None
    """What computes the same by other means; the row says where output or gradients do not agree with it."""
    lengths: tuple[int, ...] | None = None
    """Where it is measured, if not everywhere."""
    compiled: bool = False

    def at(self, kind: str, n: int) -> bool:
        return self.lengths is None or (kind == "length" and n in self.lengths)


def peers_on(device: torch.device, *, landmarks: int) -> list[Peer]:
    """Torch's own comes first: the others are compared with it."""
    half, full = torch.bfloat16 if device.type == "cuda" else torch.float32, torch.float32
    peers = [
        Peer("softmax (SDPA)", softmax_attention, half),
        Peer("skyformer", lambda q, k, v: skyformer_attention(q, k, v, num_landmarks=landmarks), half),
        Peer("skyformer, as published", lambda q, k, v: skyformer_compat(q, k, v, num_landmarks=landmarks), full),
        Peer("nystrom", lambda q, k, v: nystrom_attention(q, k, v, num_landmarks=landmarks), half),
        Peer("nystrom, as published", lambda q, k, v: nystromformer(q, k, v, num_landmarks=landmarks), half),
        Peer("kernelized", kernelized_attention, half),
        Peer("linear", linear_attention, half),
    ]
    if device.type == "cuda":
        flex = flex_gaussian()
        peers.append(Peer("kernelized by FlexAttention", flex, half, kernelized_attention, COMPILED_AT, compiled=True))
    return peers


def nystromformer(q: Tensor, k: Tensor, v: Tensor, *, num_landmarks: int, num_iterations: int = 6) -> Tensor:
    """Nyströmformer in plain operations: three softmaxes, of which two have a row for each token, and a pseudo-inverse
    whose iteration starts from one number for the whole batch.

    It was published for lengths that the number of segments divides; elsewhere segments differ by one, as ours do.
    """
    scale = q.shape[-1] ** -0.25
    q, k = q * scale, k * scale
    of_queries, of_keys = (segment_means(t, num_landmarks)[0] for t in (q, k))
    left, right = (q @ of_keys.mT).softmax(-1), (of_queries @ k.mT).softmax(-1)
    middle = (of_queries @ of_keys.mT).softmax(-1)
    z = middle.mT / (middle.sum(-1).amax() * middle.sum(-2).amax())
    identity = torch.eye(middle.shape[-1], dtype=q.dtype, device=q.device)
    for _ in range(num_iterations):
        az = middle @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return (left @ z) @ (right @ v)


def flex_gaussian(*, compiled: bool = True) -> Function:
    """The exact Gaussian kernel from a softmax: a bias for each key, and the log-sum-exp to undo the normalisation.

    The bias is a function of the keys, so FlexAttention has to pass a gradient on to what its score_mod captured.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    flex: Any = flex_attention
    if compiled:
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        half_k = 0.5 * scale * k.float().square().sum(-1)

        def bias(score: Tensor, b: Tensor, h: Tensor, _i: Tensor, j: Tensor) -> Tensor:
            return score - half_k[b, h, j]

        out, aux = flex(q, k, v, score_mod=bias, scale=scale, return_aux=AuxRequest(lse=True))
        half_q = 0.5 * scale * q.float().square().sum(-1)
        return (out.float() * (aux.lse - half_q).exp()[..., None]).to(v.dtype)

    return attention
