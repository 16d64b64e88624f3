"""Compiled kernels wait before they read back what they stored: looked up in the code that inductor writes."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from wellcond.train import computing

pytest.importorskip("triton")
from torch._inductor.codegen.triton import TritonKernel


class Nothing:
    """A compiled kernel that is never run."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The source of every Triton kernel that inductor writes; it can do so for a CPU, where none is compiled."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    sources: list[str] = []

    def keep(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Nothing:
        sources.append(source)
        return Nothing()

    monkeypatch.setattr(AsyncCompile, "triton", keep)
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "none")
    torch.compiler.reset()
    with config.patch(cpu_backend="triton", force_disable_caches=True):
        yield sources
    torch.compiler.reset()


def sum_and_norm(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A row too long to be held: the sum is stored, then read back to be normalised."""
    both = x + y
    return both, torch.nn.functional.layer_norm(both, (8192,))


def between_store_and_load(sources: list[str]) -> list[str]:
    """The code between what a kernel stores and where it reads that back."""
    return re.findall(r"tl\.store\((out_ptr\d+) (.*?)tl\.load\(\1 ", "\n".join(sources), re.DOTALL)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("mended", [False, True])
def test_a_barrier_stands_before_what_is_read_back(
    written: list[str], monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    if mended:
        monkeypatch.setattr(TritonKernel, "load", computing.waiting(TritonKernel.load))
    torch.compile(sum_and_norm)(torch.randn(64, 8192), torch.randn(64, 8192))
    found = between_store_and_load(written)
    assert found, "no kernel reads back what it stored: the test shows nothing"
    # Not mended, torch itself puts none for a CPU, in no version.
    assert all(("tl.debug_barrier()" in code) is mended for _, code in found)


def test_what_is_mended_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only where torch does not do it by itself; what lies in caches is not taken."""
    config: Any = torch.compiler.config
    real = TritonKernel.load
    monkeypatch.setattr(TritonKernel, "load", real)  # put back at the end
    monkeypatch.setattr(computing, "waits_to_read_back", lambda kernel: hasattr(kernel.load, computing.TAG))
    with config.patch(cache_key_tag="mine"):
        assert computing.mend_read_back()
        assert TritonKernel.load is not real
        once = TritonKernel.load
        assert computing.mend_read_back()
        assert TritonKernel.load is once
        assert config.cache_key_tag == f"mine{computing.TAG}"


def test_torch_says_whether_it_waits() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert computing.waits_to_read_back(TritonKernel) is (version >= (2, 14))


def test_a_torch_that_is_built_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "_kernel", lambda: None)
    assert not computing.mend_read_back()


def test_a_torch_without_its_source_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: Any) -> str:
        raise OSError("could not get source code")

    real = TritonKernel.load
    monkeypatch.setattr(computing.inspect, "getsource", none)
    assert not computing.mend_read_back()
    assert TritonKernel.load is real
