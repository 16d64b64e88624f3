"""Ratios of the score: models whose ratio is known, the same start and the same batches for all."""

import copy
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import wellcond
from wellcond.stability import around, instability_ratio, instability_scores


class Scaled(nn.Linear):
    """A linear model whose embeddings are `scale` times those of the weights."""

    def __init__(self, scale: float):
        super().__init__(6, 4, bias=False, dtype=torch.float64)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def nudges(model: nn.Module) -> Callable[[nn.Module, object], None]:
    """Updates that do not depend on the model, from the global random state."""

    def step(model: nn.Module, batch: object) -> None:
        with torch.no_grad():
            model.weight += 0.01 * torch.randn_like(model.weight)

    return step


def scaled(*scales: float) -> dict[str, nn.Module]:
    start = Scaled(1.0).state_dict()
    models: dict[str, nn.Module] = {}
    for scale in scales:
        models[f"times {scale:g}"] = Scaled(scale)
        models[f"times {scale:g}"].load_state_dict(start)
    return models


def batches(count: int) -> list[Tensor]:
    return [torch.randn(5, 6, dtype=torch.float64) for _ in range(count)]


def test_known_ratios() -> None:
    state = torch.get_rng_state()
    given = batches(20)
    torch.set_rng_state(state)
    models = scaled(1, 0.5, 3)
    before = torch.get_rng_state()
    found = instability_ratio(models, iter(given), nudges, baseline="times 1")
    assert torch.equal(torch.get_rng_state(), before)
    for name, ratio in (("times 0.5", 0.25), ("times 3", 9.0)):
        one = found[name]
        assert one.ratios == pytest.approx([ratio] * 20, rel=1e-9)
        assert one.mean == pytest.approx(ratio, rel=1e-9)
        assert one.standard_error < 1e-9
        assert (one.count, one.status) == (20, "ok")
        assert found.shared[name] == ["weight"]
        assert found.unshared[name] == []
    assert list(found.scores) == ["times 1", "times 0.5", "times 3"]
    assert found.baseline not in found.ratios
    assert torch.equal(models["times 1"].weight, models["times 3"].weight)  # the same draws in training


def test_the_mean_is_that_of_the_ratios() -> None:
    """Not the ratio of the means; and the error is that of a mean."""
    models = scaled(1, 2)

    def make_step(model: nn.Module) -> Callable[[nn.Module, object], None]:
        def step(model: nn.Module, batch: Tensor) -> None:
            with torch.no_grad():
                model.weight += 0.01 * (batch[: len(model.weight)] * model.scale + batch[-len(model.weight) :])

        return step

    found = instability_ratio(models, batches(6), make_step, baseline="times 1", steps=6)
    ratios = torch.tensor(
        [a.tau / b.tau for a, b in zip(found.scores["times 2"], found.scores["times 1"], strict=True)],
        dtype=torch.float64,
    )
    one = found["times 2"]
    assert one.mean == pytest.approx(float(ratios.mean()))
    assert one.standard_error == pytest.approx(float(ratios.std() / math.sqrt(6)))
    assert one.standard_error > 1e-3


def test_real_models_with_another_attention() -> None:
    def make(**kwargs: object) -> nn.Module:
        small = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
        return timm.create_model("vit_tiny_patch16_224", **small, **kwargs)

    softmax, other = make(), make(qk_norm=True)
    other.load_state_dict(softmax.state_dict(), strict=False)
    alone = copy.deepcopy(softmax)
    generator = torch.Generator().manual_seed(0)
    given = [
        (torch.randn(4, 3, 32, 32, generator=generator), torch.randint(5, (4,), generator=generator)) for _ in range(3)
    ]

    def make_step(model: nn.Module) -> Callable[[nn.Module, tuple[Tensor, Tensor]], None]:
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimiser.step()

        return step

    found = instability_ratio(
        {"softmax": softmax, "qk norm": other}, given, make_step, baseline="softmax", embed=around("norm"), steps=3
    )
    assert set(found.unshared["qk norm"]) == {
        f"blocks.0.attn.{side}_norm.{name}" for side in "qk" for name in ("weight", "bias")
    }
    assert list(found.ratios["qk norm"]) == ["before", "after"]
    assert found["qk norm", "after"].mean > 0
    assert found["qk norm"] == found["qk norm", "before"]
    assert found["qk norm", "before"] != found["qk norm", "after"]
    scores = instability_scores(alone, given, make_step(alone), embed=around("norm"), steps=3)
    assert [score.tau for score in scores] == [score.tau for score in found.scores["softmax"]]


def test_numpys_and_pythons_draws_are_the_same_for_all() -> None:
    """Augmentations, such as timm's Mixup, draw from them."""

    def make_step(model: nn.Module) -> Callable[[nn.Module, object], None]:
        def step(model: nn.Module, batch: object) -> None:
            with torch.no_grad():
                model.weight += 0.01 * random.random() * torch.from_numpy(np.random.randn(4, 6))  # noqa: NPY002

        return step

    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    models = scaled(1, 2)
    found = instability_ratio(models, batches(3), make_step, baseline="times 1", steps=3, seed=-1)
    assert found["times 2"].ratios == pytest.approx([4.0] * 3, rel=1e-9)
    assert torch.equal(models["times 1"].weight, models["times 2"].weight)
    assert random.getstate() == state
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_every_model_gets_the_batches_as_they_came() -> None:
    def make_step(model: nn.Module) -> Callable[[nn.Module, Tensor], None]:
        def step(model: nn.Module, batch: Tensor) -> None:
            batch += 1
            with torch.no_grad():
                model.weight += 0.01 * batch[: len(model.weight)]

        return step

    given = batches(3)
    before = copy.deepcopy(given)
    models = scaled(1, 2)
    found = instability_ratio(models, given, make_step, baseline="times 1", steps=3)
    assert found["times 2"].ratios == pytest.approx([4.0] * 3, rel=1e-9)
    assert torch.equal(models["times 1"].weight, models["times 2"].weight)
    assert all(map(torch.equal, given, before))


def test_steps_without_a_score() -> None:
    def make_step(model: nn.Module) -> Callable[[nn.Module, object], None]:
        count = 0

        def step(model: nn.Module, batch: object) -> None:
            nonlocal count
            count += 1
            if count != 2:
                nudges(model)(model, batch)
            if model.scale == 3 and count == 4:
                model.weight.data.fill_(math.nan)

        return step

    found = instability_ratio(scaled(1, 2, 3), batches(4), make_step, baseline="times 1", steps=4)
    skipped = found["times 2"]
    assert (skipped.count, skipped.status) == (3, "ok")
    assert math.isnan(skipped.ratios[1])
    assert skipped.mean == pytest.approx(4.0)
    broken = found["times 3"]
    assert broken.status == "non_finite"
    assert math.isnan(broken.mean)
    assert math.isnan(broken.standard_error)

    still = instability_ratio(scaled(1, 2), batches(2), lambda m: lambda m, b: None, baseline="times 1", steps=2)
    assert (still["times 2"].count, still["times 2"].status) == (0, "zero")
    assert math.isnan(still["times 2"].mean)


def test_bad_input() -> None:
    models, given = scaled(1, 2), batches(3)
    with pytest.raises(ValueError, match="'softmax' must be one of"):
        instability_ratio(models, given, nudges, baseline="softmax", steps=3)
    with pytest.raises(ValueError, match="two models or more"):
        instability_ratio(scaled(1), given, nudges, baseline="times 1", steps=3)
    with pytest.raises(ValueError, match="3 batches for 20 steps"):
        instability_ratio(models, given, nudges, baseline="times 1")
    with pytest.raises(ValueError, match="under two names"):
        instability_ratio({"a": models["times 1"], "b": models["times 1"]}, given, nudges, baseline="a", steps=3)
    with pytest.raises(ValueError, match="no parameter in common"):
        instability_ratio({**models, "conv": nn.Conv1d(1, 1, 1)}, given, nudges, baseline="times 1", steps=3)
    with torch.no_grad():
        models["times 2"].weight += 1
    start = models["times 1"].weight.clone()
    with pytest.raises(ValueError, match="does not start where 'times 1' does: 1 of"):
        instability_ratio(models, given, nudges, baseline="times 1", steps=3)
    assert torch.equal(models["times 1"].weight, start)  # nothing was trained


def test_buffers_are_compared_too() -> None:
    a = nn.BatchNorm1d(6)
    b = copy.deepcopy(a)
    b.running_mean += 1
    with pytest.raises(ValueError, match="running_mean"):
        instability_ratio({"a": a, "b": b}, batches(1), nudges, baseline="a", steps=1)


def test_public_names() -> None:
    assert wellcond.instability_ratio is instability_ratio
    assert wellcond.instability_scores is instability_scores
