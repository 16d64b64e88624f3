"""The one switch, and that every fast path says whether it is taken and why."""

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.numerics import fastpaths
from wellcond.numerics.fastpaths import (
    FastPath,
    addressable,
    fast_paths,
    followed,
    fused_kernels,
    large_programs,
    plain_twins,
)

CUDA = torch.device("cuda")


@pytest.fixture
def with_kernels(monkeypatch):
    """As on a machine whose GPU runs the kernels."""
    monkeypatch.delenv("WELLCOND_TRITON", raising=False)
    monkeypatch.setattr(fastpaths, "_available", lambda kind, index: (kind == "cuda", f"Triton and a {kind} device"))
    monkeypatch.setattr(fastpaths, "_slow_double", lambda index: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fastpaths, "_shared_memory", lambda index: 2**18)  # as an H100 has


def test_a_cpu_has_no_fused_kernels():
    assert fused_kernels(torch.device("cpu")) is False


def test_plain_twins_switches_off_and_back_on(with_kernels):
    assert fused_kernels(CUDA)
    with plain_twins():
        assert not fused_kernels(CUDA)
        with plain_twins():
            assert not fused_kernels(CUDA)
        assert not fused_kernels(CUDA)  # leaving the inner one does not end the outer one
    assert fused_kernels(CUDA)


def test_plain_twins_ends_with_an_error_too(with_kernels):
    with pytest.raises(RuntimeError), plain_twins():
        raise RuntimeError
    assert fused_kernels(CUDA)


@pytest.mark.parametrize(("value", "taken"), [("0", False), ("1", True), ("", True)])
def test_the_environment_switches_off(with_kernels, monkeypatch, value, taken):
    monkeypatch.setenv("WELLCOND_TRITON", value)
    assert fused_kernels(CUDA) is taken


def names(paths):
    return [path.name for path in paths]


def check(paths):
    assert len(set(names(paths))) == len(paths) >= 4
    for path in paths:
        assert isinstance(path, FastPath)
        assert len(path.why.split()) >= 3, path
        assert path.available or not path.taken, path


def test_every_path_has_its_reason_here():
    check(fast_paths())


def test_every_path_has_its_reason_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    paths = fast_paths()
    check(paths)
    fused = [path for path in paths if "Triton" in path.name]
    assert len(fused) == 9
    assert not any(path.available or path.taken for path in fused)
    assert all("NVIDIA GPU" in path.why for path in fused)
    assert [path for path in paths if path.taken], "something is taken on a CPU"


def test_a_path_that_was_switched_off_says_by_what(with_kernels, monkeypatch):
    check(fast_paths())
    assert all(path.taken for path in fast_paths() if "Triton" in path.name)
    with plain_twins():
        check(fast_paths())
        assert all("plain_twins()" in path.why for path in fast_paths() if "Triton" in path.name)
    monkeypatch.setenv("WELLCOND_TRITON", "0")
    switched = [path for path in fast_paths() if "Triton" in path.name]
    assert all(path.available and not path.taken and "WELLCOND_TRITON=0" in path.why for path in switched)


def test_eigh_is_taken_on_a_cpu_alone(with_kernels, monkeypatch):
    """As `explain_spectral_power` says: a GPU takes products, with the kernels or without."""
    for available in (True, False):
        monkeypatch.setattr(fastpaths, "_available", lambda kind, index, there=available: (there, f"a {kind} device"))
        check(fast_paths())
        assert [path.taken for path in fast_paths() if "eigh" in path.name] == [False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [path.taken for path in fast_paths() if "eigh" in path.name] == [True]


def test_slow_float64_is_mentioned(with_kernels, monkeypatch):
    monkeypatch.setattr(fastpaths, "_slow_double", lambda index: True)
    assert "float64 is slow" in next(path.why for path in fast_paths() if "spectral power (Triton)" in path.name)


def test_a_gpu_with_little_shared_memory_does_without_large_programs(with_kernels, monkeypatch):
    monkeypatch.setattr(fastpaths, "_shared_memory", lambda index: 100 * 2**10)
    assert not large_programs(CUDA)
    landmarks = [path for path in fast_paths() if "Skyformer" in path.name or "Nyström" in path.name]
    assert len(landmarks) == 2
    assert not any(path.available for path in landmarks)
    assert all("shared memory of an H100" in path.why for path in landmarks)
    assert all(path.taken for path in fast_paths() if "Triton" in path.name and path not in landmarks)


def test_whoever_follows_operations_would_see_nothing_of_a_kernel():
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(followed(args[0]))
            return func(*args, **(kwargs or {}))

    class Named(torch.Tensor):
        """A subclass that computes as all tensors do."""

    seen, tracing = [], []
    x = torch.randn(3)
    assert not followed(x, torch.nn.Parameter(x), x.as_subclass(Named))
    with Watching():
        assert followed(x)
        x + 1
    assert seen == [False]  # inside, the mode is out of the way
    with FakeTensorMode():
        fake = torch.randn(3)
    assert followed(x, fake)
    make_fx(lambda t: tracing.append(followed(t)) or t + 1)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is deprecated
        torch.jit.trace(lambda t: tracing.append(followed(t)) or t + 1, (x,), check_trace=False)
    torch.func.grad(lambda t: tracing.append(followed(t)) or t.sum())(x)
    assert tracing == [True] * 3
    assert not followed(x)


def test_what_kernels_can_address():
    tokens = torch.empty(1).as_strided((2, 3, 1000, 64), (0, 0, 0, 0))  # of any strides, and next to no memory
    assert addressable(tokens, tokens)
    far = torch.empty(1, device="meta").as_strided((1, 1, 3, 64), (1, 1, 2**30, 1))
    assert not addressable(tokens, far)
    assert addressable(far[:, :, :1])
    assert not addressable(tokens[:, :, :1].expand(2, 3, 2**26, 64))  # once it is packed
    assert addressable(tokens[:1, :1].expand(65_535, 1, 1000, 64))
    assert not addressable(tokens[:1, :1].expand(32_768, 2, 1000, 64))  # more matrices than a grid has programs


@pytest.mark.gpu
def test_the_gpu_of_this_machine_has_its_reason():
    available, why = fastpaths._available("cuda", 0)
    assert available == (torch.cuda.get_device_capability() >= (8, 0))
    assert torch.cuda.get_device_name() in why or "compute capability" in why
