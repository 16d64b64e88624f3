"""The encoders of the Long Range Arena on a GPU: a training pass waits for nothing, is captured, and replays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellcond
from wellcond.models.sequence import build, find_task
from wellcond.numerics.trust import trusted_input

pytestmark = pytest.mark.gpu

CASES = [
    ("softmax", {}),
    ("linear", {}),
    ("kernelized", {}),
    ("skyformer", {}),
    ("skyformer", {"compat": True}),
    ("nystrom", {}),
]


def inputs(task: str, *, masked: bool) -> tuple[Tensor | None, ...]:
    sizes = find_task(task)
    documents: list[Tensor | None] = []
    for _ in range(sizes.documents):
        tokens = torch.randint(1, sizes.vocab_size, (4, sizes.length), dtype=torch.int32, device="cuda")
        lengths = torch.randint(200, sizes.length + 1, (4, 1), device="cuda")
        documents += [tokens, torch.arange(sizes.length, device="cuda") < lengths if masked else None]
    return tuple(documents)


def one_pass(model: nn.Module, given: Any, labels: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16), trusted_input():
        loss = nn.functional.cross_entropy(model(*given).float(), labels)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("task", ["listops", "retrieval", "image"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("attention", "settings"), CASES)
def test_a_pass_is_captured(attention: str, settings: dict[str, Any], masked: bool, task: str, no_waiting: Any) -> None:
    check_captured(build(task, attention, **settings).cuda().train(), task, masked, no_waiting)


@pytest.mark.parametrize("method", ["dct", "svd"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_grayed_pass_is_captured(method: str, masked: bool, no_waiting: Any) -> None:
    model = wellcond.gray(build("listops", "skyformer").cuda().train(), method)
    check_captured(model, "listops", masked, no_waiting)


def check_captured(model: nn.Module, task: str, masked: bool, no_waiting: Any) -> None:
    given, labels = inputs(task, masked=masked), torch.tensor([0, 1, 1, 0], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            one_pass(model, given, labels)
        torch.cuda.synchronize()
        with no_waiting():
            one_pass(model, given, labels)
        model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = one_pass(model, given, labels)
    found = []
    for seed in (1, 1, 2):  # draws of dropout and landmarks follow the generator
        torch.cuda.manual_seed(seed)
        graph.replay()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] != found[2]
    torch.cuda.manual_seed(1)
    model.zero_grad(set_to_none=True)
    assert one_pass(model, given, labels).item() == pytest.approx(found[0], rel=2e-2)
