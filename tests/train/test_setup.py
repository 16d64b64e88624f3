"""The optimiser is torch's fused one where that is faster and known to work, and saved states cross between the two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wellcond.data import open_data
from wellcond.train.checkpoint import latest, save
from wellcond.train.config import Config
from wellcond.train.processes import Processes
from wellcond.train.setup import Parts, build, data_of
from wellcond.train.tasks import make_task

Make = Callable[..., Config]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def parts_on(device: str, config: Config) -> Parts:
    here = Processes(rank=0, world=1, device=torch.device(device))
    return build(config, make_task(config, open_data("digits", image_size=8)), here, total=10, steps_per_epoch=5)


def step(parts: Parts, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 1, 8, 8, generator=generator).to(device)
    parts.model(images).square().mean().backward()
    parts.optimizer.step()
    parts.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("device", "opt", "fused"),
    [("cpu", "adamw", False), pytest.param("cuda", "adamw", True, marks=pytest.mark.gpu),
     pytest.param("cuda", "lamb", False, marks=pytest.mark.gpu)],
)  # fmt: skip
def test_fused_on_a_gpu_where_the_class_knows_it(make_config: Make, device: str, opt: str, fused: bool) -> None:
    parts = parts_on(device, make_config(opt=opt))
    assert {bool(group.get("fused")) for group in parts.optimizer.param_groups} == {fused}
    step(parts, device)


@pytest.mark.parametrize(("mode", "tuned"), [("", False), ("max-autotune-no-cudagraphs", True)])
def test_the_compiler_is_told_its_mode(make_config: Make, mode: str, tuned: bool) -> None:
    called: Any = parts_on("cpu", make_config(compile=True, compile_mode=mode)).called
    assert called.get_compiler_config()["max_autotune"] is tuned


@pytest.mark.parametrize(("device", "said"), [("cpu", True), pytest.param("cuda", False, marks=pytest.mark.gpu)])
def test_tf32_says_where_it_makes_no_difference(make_config: Make, device: str, said: bool) -> None:
    notes = {dtype: parts_on(device, make_config(amp_dtype=dtype)).notes for dtype in ("tf32", "float32")}
    assert any("makes no difference" in note for note in notes["tf32"]) is said
    assert notes["float32"] == []


def test_gradients_are_forgotten_as_the_optimiser_would(make_config: Make) -> None:
    parts = parts_on("cpu", make_config())
    parts.model(torch.ones(2, 1, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in parts.model.parameters())
    parts.forget_gradients()
    assert all(parameter.grad is None for parameter in parts.model.parameters())


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("fused", [True, False])
def test_a_state_of_either_form_goes_on_to_the_same_weights(
    make_config: Make, tmp_path: Path, device: str, fused: bool
) -> None:
    parts = parts_on(device, make_config())
    for group in parts.optimizer.param_groups:
        group["fused"] = fused
    step(parts, device)
    save(tmp_path, parts.saved(1, {}), keep=1)
    state = latest(tmp_path)
    assert state is not None
    again = parts_on(device, make_config())
    again.restore(state)
    assert {group["fused"] for group in again.optimizer.param_groups} == {fused}
    for each in (parts, again):
        step(each, device)
    for name, tensor in parts.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name


def test_the_data_of_a_configuration_are_opened_as_it_says(tmp_path: Path) -> None:
    config = Config(data="digits", image_size=8, holdout=0.25, seed=3)
    data, by_hand = data_of(config), open_data("digits", image_size=8, holdout=0.25, seed=3)
    assert torch.equal(data.train.labels, by_hand.train.labels)
    assert data.test is not None
    some = Config(task="sequence", data="lra_listops", data_kwargs={"samples": 20})
    made = data_of(some, cache=tmp_path)
    assert made.test is not None
    assert len(made.train) + len(made.val) + len(made.test) == 20
    assert any(tmp_path.iterdir())  # they are kept there, for the configuration names no folder
