"""Constants are made once, given up when there are many, and never while a graph may read them."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from wellcond.numerics import constants
from wellcond.numerics.constants import kept_constants


@pytest.fixture
def numbers():
    made = []

    @kept_constants(2)
    def ones(length: int, device: str) -> torch.Tensor:
        made.append(length)
        return torch.ones(length, device=device)

    return ones, made


@pytest.fixture
def capturing(monkeypatch):
    """As if a graph were being captured, or not."""
    return lambda yes: monkeypatch.setattr(constants, "_capturing", lambda: yes)


def test_made_once_and_given_up_beyond_so_many(numbers):
    ones, made = numbers
    assert ones(3, "cpu") is ones(3, "cpu")
    for length in (4, 3, 5, 3, 4):
        ones(length, "cpu")
    assert made == [3, 4, 5, 4]  # 3 was used in between, and stayed


def test_what_a_graph_reads_stays_where_it_is(numbers, capturing):
    ones, made = numbers
    first = ones(3, "cpu")
    capturing(True)
    assert ones(3, "cpu") is first
    capturing(False)
    for length in range(4, 10):
        ones(length, "cpu")
    assert ones(3, "cpu") is first
    assert made.count(3) == 1


def test_what_is_made_during_a_capture_is_that_graphs_alone(numbers, capturing):
    ones, made = numbers
    capturing(True)
    inside = ones(3, "cpu")
    capturing(False)
    assert ones(3, "cpu") is not inside
    assert made == [3, 3]


def test_a_tracers_tensors_are_not_kept(numbers):
    ones, made = numbers
    with FakeTensorMode():
        assert isinstance(ones(3, "cpu"), FakeTensor)
    first = ones(3, "cpu")
    assert type(first) is torch.Tensor
    with FakeTensorMode():
        assert isinstance(ones(3, "cpu"), FakeTensor)
    assert ones(3, "cpu") is first
    assert made == [3, 3, 3]


def test_what_inference_asked_for_first_serves_gradients_too(numbers):
    ones, _ = numbers
    with torch.inference_mode():
        assert not ones(3, "cpu").is_inference()


def test_without_a_gpu_nothing_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("CUDA was asked"))
    assert not constants._capturing()


@pytest.mark.gpu
def test_a_replayed_graph_reads_what_it_read_at_first():
    @kept_constants(1)
    def filled(value: int, device: str) -> torch.Tensor:
        return torch.full((1024,), float(value), device=device)

    filled(7, "cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        out = filled(7, "cuda") * 2
    for value in range(20):
        filled(value, "cuda")
    others = [torch.full((1024,), -1.0, device="cuda") for _ in range(50)]
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 14).all()
    assert len(others) == 50


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_what_a_transform_wraps_is_not_kept(numbers, transform):
    ones, made = numbers
    x = torch.randn(3) if transform is torch.func.grad else torch.randn(2, 3)
    transform(lambda t: (t * ones(3, "cpu")).sum())(x)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(ones(3, "cpu"))
    assert made == [3, 3]
