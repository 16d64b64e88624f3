"""A vision transformer trains with every attention, compiled and in half precision: on the GPU, and small on a CPU.

On a CPU the graph is traced, and in bfloat16 also differentiated, as on the GPU, and then run without the slow code
generation.
"""

import math
from dataclasses import dataclass, replace

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy, interpolate

from wellcond import replace_attention
from wellcond.attention.registry import ATTENTIONS
from wellcond.train.computing import mend_read_back

pytestmark = [
    # a remark of torch's compiler on the speed of its own softmax
    pytest.mark.filterwarnings("ignore:[\\s\\S]*Online softmax is disabled"),
]
STEPS = 8
SCALE = 2.0**12  # of the loss in float16; a gradient that overflows halves it


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model trains, and how large it is there."""

    device: str
    backend: str
    depth: int
    img_size: int
    landmarks: int
    """Fewer than tokens, or Nyström's would be all of them and its iteration never run."""


CPU = Place(device="cpu", backend="aot_eager", depth=1, img_size=64, landmarks=8)
SHALLOW = Place(device="cuda", backend="inductor", depth=2, img_size=224, landmarks=64)
TRACED = replace(CPU, backend="eager")
WHOLE = Place(device="cuda", backend="inductor", depth=12, img_size=224, landmarks=64)
ON_GPU = (pytest.mark.gpu, pytest.mark.slow)
BF16, FP16 = torch.bfloat16, torch.float16
PLACES = [
    pytest.param(CPU, BF16, id="cpu-bf16"),
    pytest.param(TRACED, FP16, id="cpu-fp16"),
    pytest.param(WHOLE, BF16, id="gpu-bf16-whole", marks=ON_GPU),
    pytest.param(SHALLOW, FP16, id="gpu-fp16", marks=ON_GPU),
]


def make(place: Place, name: str) -> nn.Module:
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=place.depth, img_size=place.img_size, num_classes=4, device=place.device
    )
    settings = {"num_landmarks": place.landmarks} if name in ("skyformer", "nystrom") else {}
    replace_attention(model, name, **settings)
    return model


def train(model: nn.Module, forward: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> list[float]:
    """The losses of `STEPS` steps on one batch; every gradient of every step has to be finite."""
    device = images.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE, enabled=dtype == FP16)
    losses = []
    for _ in range(STEPS):
        with torch.autocast(device, dtype=dtype):
            loss = cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter, tensor in model.named_parameters():
            assert tensor.grad is not None, f"{parameter} got no gradient"
            assert tensor.grad.isfinite().all(), f"{parameter}'s gradient is not finite"
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert dtype != FP16 or scaler.get_scale() == SCALE  # else a step was left out
    return losses


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(("place", "dtype"), PLACES)
def test_trains_compiled_in_half_precision(name: str, place: Place, dtype: torch.dtype, photographs: Tensor) -> None:
    mend_read_back()  # or torch 2.11's kernels race
    torch.compiler.reset()
    model = make(place, name)
    images = interpolate(photographs, size=place.img_size, mode="area").to(place.device)
    labels = torch.arange(len(images), device=place.device)
    counter = CompileCounterWithBackend(place.backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)  # raises where the graph would break

    losses = train(model, compiled, images, labels, dtype)
    assert all(math.isfinite(loss) for loss in losses)
    assert sorted(losses[-3:])[1] < 0.7 * losses[0], losses  # the median: so large a step may overshoot once
    assert counter.frame_count == 1, "compiled anew between steps"

    model.eval()
    with torch.no_grad():
        exact = model(images)
        with torch.autocast(place.device, dtype=dtype):
            eager, eager_again = model(images), model(images)
            found, again = compiled(images), compiled(images)
    assert counter.frame_count == 2
    assert torch.equal(eager, eager_again)
    assert torch.equal(found, again)
    # What the compiler fuses it does not round in between, so compiled and eager differ, but each only by roundings.
    # The residual stream is wider than its branches and forgets most of theirs: eager logits were off by eps/4 at depth
    # 2 and 12 alike, mostly by the rounding of the logits themselves. Eight times that is still far from a wrong term.
    rounding = 2 * torch.finfo(dtype).eps
    assert distance(eager, exact) < rounding
    assert distance(found, exact) < rounding
    assert distance(found, eager) < rounding
    assert not torch.equal(eager, exact)  # half precision was really used
