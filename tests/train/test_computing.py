"""What a step draws depends on the numbers it is seeded by, and on nothing that was drawn before."""

from typing import Any

import pytest
import torch

from wellcond.train.computing import autocast, deterministic, float32_precision, seed_by
from wellcond.train.config import Config

CPU = torch.device("cpu")


def test_the_same_numbers_draw_the_same_and_others_do_not() -> None:
    seed_by(CPU, 0, 7, 1)
    first = torch.rand(4)
    torch.rand(3)
    seed_by(CPU, 0, 7, 1)
    assert torch.equal(torch.rand(4), first)
    for other in ((0, 71), (0, 7, 2), (1, 7, 1)):
        seed_by(CPU, *other)
        assert not torch.equal(torch.rand(4), first)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu), "meta"])
def test_it_is_what_torch_would_draw(device: str) -> None:
    """Both generators, the CPU's and the device's, as torch.manual_seed would have set them."""
    where = torch.device(device)
    real = CPU if device == "meta" else where
    seed_by(where, 3, 4)
    seed, drawn = torch.initial_seed(), (torch.rand(4), torch.rand(4, device=real))
    torch.manual_seed(seed)
    again = torch.rand(4), torch.rand(4, device=real)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_float32_is_float32_in_convolutions_too() -> None:
    conv: Any = torch.backends.cudnn.conv
    before = conv.fp32_precision
    with float32_precision(Config(amp_dtype="bfloat16")):
        assert conv.fp32_precision == before
    for asked, precision in (("float32", "ieee"), ("tf32", "tf32")):
        with float32_precision(Config(amp_dtype=asked)):
            assert (conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision) == (precision, precision)
        assert conv.fp32_precision == before


def test_tf32_computes_in_float32_but_for_products() -> None:
    with autocast(Config(amp_dtype="tf32"), CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_precision_and_determinism_are_those_asked_for_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else it would stay set for the other tests
    with autocast(Config(amp_dtype="bfloat16"), CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast(Config(), CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    for asked in (True, False):
        with deterministic(Config(deterministic=asked)):
            assert torch.are_deterministic_algorithms_enabled() is asked
        assert not torch.are_deterministic_algorithms_enabled()
