"""The precision of float32 products: as asked for, in all of torch's settings alike, and put back at the end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wellcond.numerics.autocast import no_tf32, tf32

BACKENDS: Any = torch.backends
SETTINGS: tuple[Any, ...] = (
    BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.mkldnn.matmul,
)  # fmt: skip


def read(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuntimeError:
        return "mixed"


def state() -> tuple[Any, ...]:
    older = read(torch.get_float32_matmul_precision), read(lambda: BACKENDS.cudnn.allow_tf32)
    return *older, *(setting.fp32_precision for setting in SETTINGS)


@pytest.fixture(params=["as torch starts", "older", "older, off", "newer", "mixed", "mixed, the other way"])
def before(request):
    """What a user may have set: with torch's older functions, with its newer settings, with both."""
    start = [setting.fp32_precision for setting in SETTINGS]
    if request.param in ("older", "mixed"):
        torch.set_float32_matmul_precision("high")
    if request.param == "older, off":
        BACKENDS.cudnn.allow_tf32 = False
    if request.param in ("newer", "mixed, the other way"):
        BACKENDS.cuda.matmul.fp32_precision = "tf32"
        BACKENDS.cudnn.conv.fp32_precision = "ieee"
    if request.param == "mixed":
        BACKENDS.cuda.matmul.fp32_precision = "ieee"
    if request.param == "mixed, the other way":
        BACKENDS.cudnn.allow_tf32 = False
        BACKENDS.cudnn.conv.fp32_precision = BACKENDS.cudnn.rnn.fp32_precision = "tf32"
    yield state()
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for setting, value in zip(SETTINGS, start, strict=True):
        setting.fp32_precision = value


@pytest.mark.parametrize(("context", "whole", "each"), [(no_tf32, "highest", "ieee"), (tf32, "high", "tf32")])
def test_all_settings_agree_and_are_put_back(before, context, whole, each):
    with context():
        assert state() == (whole, each == "tf32", *[each] * 4)
        assert BACKENDS.cuda.matmul.allow_tf32 == (each == "tf32")  # raises where they differ
        with no_tf32():
            assert state() == ("highest", False, *["ieee"] * 4)
        assert state() == (whole, each == "tf32", *[each] * 4)
    assert state() == before


def test_an_error_puts_them_back_too(before):
    with pytest.raises(KeyError), tf32():
        raise KeyError
    assert state() == before


@pytest.mark.gpu
def test_products_have_the_bits_asked_for():
    x = torch.randn(512, 512, device="cuda")
    truth = x.double() @ x.double()
    errors = []
    for context in (no_tf32, tf32, no_tf32):
        with context():
            errors.append((((x @ x).double() - truth).norm() / truth.norm()).item())
    assert errors[0] == errors[2] < 1e-6 < 1e-4 < errors[1] < 2e-3
