"""How much memory a GPU has left."""

import pytest
import torch

from wellcond.numerics import device_memory
from wellcond.numerics.device_memory import free_memory


@pytest.fixture
def asked(monkeypatch):
    """How often the driver was asked, with a clock that stands still until it is moved."""
    calls, clock = [], [100.0]

    def mem_get_info(device):
        calls.append(device)
        return 1000, 8000

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    monkeypatch.setattr(device_memory.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(device_memory, "_known", {})
    return calls, clock


def test_the_driver_is_asked_once_in_a_while(asked):
    calls, clock = asked
    device = torch.device("cuda", 0)
    assert [free_memory(device) for _ in range(3)] == [1300] * 3
    assert len(calls) == 1
    assert free_memory(torch.device("cuda", 1)) == 1300
    assert len(calls) == 2
    clock[0] += 2.0
    free_memory(device)
    assert len(calls) == 3


@pytest.mark.gpu
def test_it_counts_what_torch_does_not_use():
    device = torch.device("cuda", torch.cuda.current_device())
    device_memory._known.clear()
    free = free_memory(device)
    assert 0 < free <= torch.cuda.get_device_properties(device).total_memory
