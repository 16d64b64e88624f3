"""Which trainings replay their passes as CUDA graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wellcond.train.config import Config
from wellcond.train.replay import can_replay

Make = Callable[..., Config]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("settings", [{}, {"amp_dtype": "float16"}, {"compile": True, "probe_every": 5}])
def test_one_gpu_replays(make_config: Make, settings: dict[str, Any]) -> None:
    assert can_replay(make_config(**settings), GPU, world=1)


@pytest.mark.parametrize("settings", [{"step_graph": False}, {"accumulate": 2}, {"deterministic": True}])
def test_others_do_not(make_config: Make, settings: dict[str, Any]) -> None:
    assert not can_replay(make_config(**settings), GPU, world=1)


def test_neither_several_processes_nor_a_cpu(make_config: Make) -> None:
    assert not can_replay(make_config(), GPU, world=2)
    assert not can_replay(make_config(), torch.device("cpu"), world=1)
