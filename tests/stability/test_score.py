"""The score against a linear model, whose τ can be written down, and on a small real ViT with nothing disturbed."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from wellcond import records
from wellcond.stability import around, instability_score, instability_scores


def sgd(lr: float):
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        model.zero_grad()
        (0.5 * (model(batch[0]) - batch[1]).square().sum()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad

    return step


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(6, 4, bias=False).double()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)


def make_vit(**kwargs: Any) -> nn.Module:
    small = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **(small | kwargs))


def adamw(model: nn.Module):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimiser.step()

    return step


def image_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 32, 32, generator=generator), torch.randint(5, (4,), generator=generator))
        for _ in range(count)
    ]


def test_a_linear_model_in_closed_form(linear: nn.Linear, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    gradient = (x @ linear.weight.detach().mT - y).mT @ x
    expected = (x @ gradient.mT).square().sum() / gradient.square().sum()  # whatever the learning rate
    for lr in (1e-1, 1e-3):
        score = instability_score(copy.deepcopy(linear), batch, sgd(lr), index=7)
        assert score.tau == pytest.approx(float(expected), rel=1e-9)
        assert score.parameter_change == pytest.approx(lr**2 * float(gradient.square().sum()), rel=1e-9)
        assert score.output_change == pytest.approx(lr**2 * float((x @ gradient.mT).square().sum()), rel=1e-9)
        assert (score.status, score.step, score.count, score.dtype) == ("ok", 7, 5, "float64")


def test_complex_parameters_and_embeddings() -> None:
    """Both parts count: a step that moves only the imaginary one is a step."""
    model, x = nn.Linear(6, 4, bias=False, dtype=torch.complex128), torch.randn(5, 6, dtype=torch.complex128)
    delta = torch.randn(4, 6, dtype=torch.float64)

    def step(model: nn.Module, batch: Tensor) -> None:
        with torch.no_grad():
            model.weight += 0.01j * delta

    score = instability_score(model, x, step)
    assert score.status == "ok"
    assert score.tau == pytest.approx(
        float((x @ (1j * delta).mT).abs().square().sum() / delta.square().sum()), rel=1e-9
    )


def test_steps_follow_each_other(linear: nn.Linear) -> None:
    batches = [(torch.randn(5, 6).double(), torch.randn(5, 4).double()) for _ in range(4)]
    twin = copy.deepcopy(linear)
    scores = instability_scores(linear, iter(batches), sgd(1e-2), steps=3)
    assert [score.step for score in scores] == [1, 2, 3]
    for one, score in zip(batches, scores, strict=False):  # on its own batch, from where the last step ended
        assert instability_score(twin, one, sgd(1e-2)).tau == score.tau
    assert torch.equal(twin.weight, linear.weight)
    assert len(instability_scores(linear, [batches[0]] * 25, sgd(0.01))) == 20


def test_training_goes_on_as_if_nobody_looked() -> None:
    """Dropout draws, gradients, optimiser, batch statistics and flags: all to the bit."""
    plain = make_vit(proj_drop_rate=0.3, drop_path_rate=0.3)
    plain.extra = nn.BatchNorm1d(24)
    plain.fc_norm = nn.Identity()
    plain.norm = nn.Sequential(plain.norm, Tokenwise(plain.extra))
    plain.train()
    plain.blocks[0].eval()
    watched = copy.deepcopy(plain)
    batches = image_batches(3)
    torch.manual_seed(5)
    step = adamw(plain)
    for one in batches:
        step(plain, one)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    instability_scores(watched, batches, adamw(watched), steps=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in watched.modules()] == [m.training for m in plain.modules()]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


class Tokenwise(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


def test_the_weights_alone_make_the_difference() -> None:
    """A step that changes running statistics but no weight would move the embeddings of eval mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().train()
    x = torch.randn(8, 4, dtype=torch.float64)

    def step(model: nn.Module, batch: Tensor) -> None:
        model(batch)
        with torch.no_grad():
            model[0].bias += 1e-3

    score = instability_score(model, x, step)
    scale = 1 / (1 + 1e-5)  # of a BatchNorm at its start: its variance is 1, its eps 1e-5
    assert score.tau == pytest.approx(8 * scale, rel=1e-6)
    assert model[1].num_batches_tracked == 1
    assert not torch.equal(model[1].running_mean, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("training", [True, False])
def test_what_a_model_caches_is_of_neither_evaluation(training: bool) -> None:
    """timm's TinyViT keeps the attention biases of an evaluation, and frees them in train()."""
    model = timm.create_model("tiny_vit_5m_224").train(training)
    images, cached = torch.randn(1, 3, 64, 64), [m for m in model.modules() if hasattr(m, "attention_bias_cache")]
    assert cached

    def step(model: nn.Module, batch: Tensor) -> None:
        assert not any(module.attention_bias_cache for module in cached)
        with torch.no_grad():
            for module in cached:
                module.attention_biases += torch.randn_like(module.attention_biases)

    with torch.no_grad():
        before = copy.deepcopy(model).eval().forward_features(images)
        score = instability_score(model, images, step)
        assert not any(module.attention_bias_cache for module in cached)
        after = copy.deepcopy(model).eval().forward_features(images)
    assert score.status == "ok"
    assert score.output_change == pytest.approx(float((after - before).double().square().sum()), rel=1e-3)


def test_random_draws_are_the_same_in_both_evaluations() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(x.shape[0], self.out_features)

    model = Noisy(6, 4, bias=False)
    x = torch.randn(5, 6)

    def nudge(model: nn.Module, batch: Tensor) -> None:
        torch.randn(3)  # training draws too
        with torch.no_grad():
            model.weight += 0.01

    score = instability_score(model, x, nudge)
    delta = torch.full((4, 6), 0.01)
    assert score.tau == pytest.approx(float((x @ delta.mT).square().sum() / delta.square().sum()), rel=1e-3)


@dataclass(frozen=True)
class Pair:
    inputs: tuple[Tensor]
    more: np.ndarray


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_that_changes_its_batch(linear: nn.Linear, wrapped: bool) -> None:
    """As timm's Mixup does: f is evaluated on the batch as it came, and the step gets the very batch that was given."""
    x = torch.randn(5, 6, dtype=torch.float64)
    batch = Pair(inputs=(x.clone(),), more=np.ones(3)) if wrapped else {"x": (x.clone() * linear.weight[0, 0], "name")}
    if not wrapped:
        x = batch["x"][0].detach().clone()  # with a history, which deepcopy refuses
    given = []

    def tokens(batch: Any) -> Tensor:
        return batch.inputs[0] if wrapped else batch["x"][0]

    def step(model: nn.Module, batch: Any) -> None:
        given.append(batch)
        with torch.no_grad():
            tokens(batch).mul_(3)
            model.weight += 0.01
        if wrapped:
            batch.more.fill(0)

    def embed(model: nn.Module, batch: Any) -> Tensor:
        assert not wrapped or batch.more.all()
        with torch.no_grad():
            return model(tokens(batch).sub_(1).div_(2))  # works in place, too

    score = instability_score(linear, batch, step, embed=embed)
    delta = torch.full((4, 6), 0.01, dtype=torch.float64)
    assert score.tau == pytest.approx(float(((x - 1) / 2 @ delta.mT).square().sum() / delta.square().sum()), rel=1e-9)
    assert given[0] is batch
    assert torch.equal(tokens(batch), 3 * x)


def test_a_real_vit_before_and_after_its_norm() -> None:
    model = make_vit()
    one = image_batches(1)[0]
    before = copy.deepcopy(model).eval()
    score = instability_score(model, one, adamw(model), embed=around("norm"))
    after = copy.deepcopy(model).eval()
    assert score.embeddings() == ["before", "after"]
    with torch.no_grad():
        pairs = zip(before.parameters(), after.parameters(), strict=True)
        moved = float(sum((b.double() - a.double()).square().sum() for a, b in pairs))
        normed = after.forward_features(one[0]) - before.forward_features(one[0])
        before.norm = after.norm = nn.Identity()
        changes = [after.forward_features(one[0]) - before.forward_features(one[0]), normed]
    assert score.parameter_change == pytest.approx(moved, rel=1e-12)
    for name, change in zip(("before", "after"), changes, strict=True):
        assert score[name].output_change == pytest.approx(float(change.double().square().sum()), rel=1e-4)
        assert score[name].tau == score[name].output_change / score.parameter_change
    assert model.norm._forward_hooks == {}
    assert instability_score(model, one, adamw(model)).embeddings() == ["embedding"]
    with pytest.raises(KeyError, match="there are before, after"):
        score["middle"]


@pytest.mark.parametrize("embed", [None, around("norm")])
def test_a_wrapped_model_has_the_same_embeddings(embed: Any) -> None:
    model, one = make_vit(), image_batches(1)[0]
    wrapped = nn.DataParallel(copy.deepcopy(model), device_ids=[])
    assert instability_score(wrapped, one, adamw(wrapped), embed=embed) == instability_score(
        model, one, adamw(model), embed=embed
    )


def test_rows_can_be_stored(linear: nn.Linear, batch: tuple[Tensor, Tensor], tmp_path) -> None:
    scores = instability_scores(linear, [batch] * 2, sgd(0.01), steps=2)
    records.append_rows(tmp_path / "tau.jsonl", [row for score in scores for row in score.rows("a")])
    rows = records.read_rows(tmp_path / "tau.jsonl")
    assert [row["value"] for row in rows] == [score.tau for score in scores]
    assert {row["status"] for row in rows} == {"ok"}


# ---- steps that have no score


def test_a_step_that_the_scaler_skips_is_zero(linear: nn.Linear, batch: tuple[Tensor, Tensor]) -> None:
    optimiser = torch.optim.SGD(linear.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        optimiser.zero_grad()
        scaler.scale(model(batch[0]).sum() * 1e308 * 10).backward()
        scaler.step(optimiser)
        scaler.update()

    score = instability_score(linear, batch, step)
    assert score.status == "zero"
    assert math.isnan(score.tau)
    assert score.parameter_change == 0


def test_weights_that_explode_are_not_finite(linear: nn.Linear, batch: tuple[Tensor, Tensor]) -> None:
    score = instability_score(linear, batch, sgd(math.inf))
    assert score.status == "non_finite"
    assert math.isnan(score.tau)


def test_changes_that_drown_in_rounding_say_so() -> None:
    model, x = nn.Linear(6, 4), torch.randn(5, 6)

    def nudge(model: nn.Module, batch: Tensor) -> None:
        with torch.no_grad():
            model.bias += 1e-7

    assert instability_score(model, x, nudge).status == "low_precision"
    assert instability_score(model.bfloat16(), x.bfloat16(), sgd_on_sum).status == "low_precision"


def sgd_on_sum(model: nn.Module, batch: Tensor) -> None:
    with torch.no_grad():
        model.weight += 1.0


# ---- bad input


def test_bad_input(linear: nn.Linear, batch: tuple[Tensor, Tensor]) -> None:
    step = sgd(0.1)
    with pytest.raises(ValueError, match="no parameters"):
        instability_score(nn.ReLU(), batch, step)
    with pytest.raises(ValueError, match="give embed"):
        instability_score(linear, {"x": batch[0]}, step)
    with pytest.raises(ValueError, match="not a tensor"):
        instability_score(linear, batch, step, embed=lambda model, batch: None)
    with pytest.raises(ValueError, match="2 batches for 20 steps"):
        instability_scores(linear, [batch] * 2, step)
    with pytest.raises(ValueError, match="2 batches for 3 steps"):
        instability_scores(linear, iter([batch] * 2), step, steps=3)
    with pytest.raises(ValueError, match="at least 1"):
        instability_scores(linear, [batch], step, steps=0)
    with pytest.raises(ValueError, match="generator in the batch cannot be copied"):
        instability_score(linear, (batch[0], (i for i in range(3))), step)
    idle = nn.Sequential(linear)
    idle.spare, idle.forward = nn.Linear(1, 1), linear.forward
    with pytest.raises(ValueError, match="ran 0 times"):
        instability_score(idle, batch, step, embed=around("spare"))

    def grow(model: nn.Module, batch: object) -> None:
        model.more = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="added, removed or reshaped"):
        instability_score(linear, batch, grow)


def test_flags_come_back_after_an_error(linear: nn.Linear, batch: tuple[Tensor, Tensor]) -> None:
    state = torch.get_rng_state()

    def embed(model: nn.Module, batch: object) -> Tensor:
        assert not model.training
        torch.randn(1)
        raise KeyError

    with pytest.raises(KeyError):
        instability_score(linear.train(), batch, sgd(0.1), embed=embed)
    assert linear.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = make_vit()
    one = image_batches(1)[0]
    cpu = instability_score(copy.deepcopy(model), one, nudge_all)
    gpu = instability_score(model.cuda(), tuple(part.cuda() for part in one), nudge_all)
    assert gpu.tau == pytest.approx(cpu.tau, rel=1e-2)


def nudge_all(model: nn.Module, batch: object) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
