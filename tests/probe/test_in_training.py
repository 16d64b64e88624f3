"""While a model trains the default shows the model: in float32, on the same samples each time, and without a trace."""

import contextlib
import copy
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellcond.probe import Probe
from wellcond.probe.steps import StepProbe
from wellcond.records import Run
from wellcond.train.config import Config
from wellcond.train.loop import train as train_a_run

BFLOAT16_CEILING = math.log(128)


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(4, 3, 32, 32) * scale for scale in (1.0, 3.0, 0.2)]


@pytest.fixture
def check(by_hand: Any, truth: Any, rows_of: Any) -> Any:
    """That the rows of one step are those of `model` by hand, in float64, on these samples."""

    def compare(rows: list[Any], model: nn.Module, samples: Tensor, dtype: str = "float32") -> None:
        expected = by_hand(copy.deepcopy(model).eval().double(), samples.double())
        found = rows_of(rows)
        assert len(found) == 8
        assert {(row["dtype"], row["status"]) for row in rows} == {(dtype, "ok")}
        for place, values in found.items():
            for name, value in truth(expected[place]).items():
                assert values[name] == pytest.approx(value, rel=2e-3), (place, name)

    return compare


def train(model: Any, batches: list[Tensor], probe: Probe | None, dtype: torch.dtype = torch.bfloat16) -> Iterator[Any]:
    """Steps under autocast; before each, a copy of the model as it then is."""
    torch.manual_seed(5)
    inner = getattr(model, "_orig_mod", model)
    optimiser = torch.optim.SGD(inner.parameters(), lr=0.05)
    for step, images in enumerate(batches):
        before = copy.deepcopy(inner)
        if probe is not None:
            probe.step = step
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(images).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield before


def at(probe: Probe, step: int) -> list[Any]:
    return [row for row in probe.rows() if row["step"] == step]


def numbers(rows: list[Any]) -> list[Any]:
    return [(row["block"], row["site"], row["name"], row["value"], row["count"]) for row in rows]


def test_every_step_shows_the_weights_of_that_step_on_the_first_samples(
    make_vit: Any, batches: list[Tensor], check: Any
) -> None:
    model = make_vit(proj_drop_rate=0.2, drop_path_rate=0.3).train()
    probe = Probe(model, max_samples=3)
    with probe:
        copies = list(train(model, batches, probe))
    for step, then in enumerate(copies):
        check(at(probe, step), then, batches[0][:3])
    assert numbers(at(probe, 0)) != numbers(at(probe, 2))  # the weights did change
    attention = [row["value"] for row in probe.rows() if row["site"] == "sa" and row["name"] == "log_kappa"]
    assert min(attention) > BFLOAT16_CEILING + 0.1  # which the pass that happened could not show


def test_the_samples_stay_whatever_batches_come(make_vit: Any, batches: list[Tensor]) -> None:
    model = make_vit(proj_drop_rate=0.2).train()
    with Probe(model) as probe:
        for batch in batches:
            model(batch)
            batch.zero_()  # somebody's buffer, filled anew
    assert numbers(at(probe, 0)) == numbers(at(probe, 1)) == numbers(at(probe, 2))
    with Probe(model, exact=False) as live:  # which sees the batch, and the dropout
        for _ in range(2):
            model(torch.randn(4, 3, 32, 32))
    assert numbers(at(live, 0)) != numbers(at(live, 1))


def test_detached_in_between_it_keeps_its_samples_and_forgets_them_in_evaluation(
    make_vit: Any, batches: list[Tensor], check: Any
) -> None:
    model = make_vit().train()
    probe = Probe(model)
    for training, batch in zip((True, False, True), batches, strict=True):
        model.train(training)
        with probe:
            model(batch)
    check(at(probe, 0), model, batches[0])
    check(at(probe, 1), model, batches[1])
    check(at(probe, 2), model, batches[0])


def test_steps_begun_by_others_read_the_same_samples(make_vit: Any, batches: list[Tensor], check: Any) -> None:
    model = make_vit().train()
    probe = StepProbe(model)
    for step, batch in enumerate(batches):
        probe.begin(step)
        model(batch)
        assert probe.end()
        check(probe.rows(), model, batches[0])


# ---- samples of one's own


class TwoInputs(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(images * scale + shift[:, None, None, None])


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict"])
@pytest.mark.parametrize("training", [True, False])
def test_samples_as_the_model_takes_them(
    vit: Any, images: Tensor, batches: list[Tensor], check: Any, kind: str, training: bool
) -> None:
    shift, model = torch.tensor([0.5, -0.5, 1.0, 0.0]), TwoInputs(vit)
    seen = images * 2.0 + shift[:, None, None, None]
    given: Any = {
        "tensor": seen,
        "tuple": (images, shift, 2.0),
        "list": [images, shift, 2.0],
        "dict": {"shift": shift, "images": images, "scale": 2.0},
    }[kind]
    model = vit if kind == "tensor" else model
    model.train(training)
    with Probe(model, samples=given, max_samples=3) as probe:
        for batch in batches:
            model(batch) if kind == "tensor" else model(batch, torch.zeros(4))
    for step in range(3):
        rows = [{**row, "block": row["block"].removeprefix("inner.")} for row in at(probe, step)]
        check(rows, vit, seen[:3])
        assert {row["count"] for row in rows if row["name"] == "log_kappa"} == {3}


def test_the_samples_are_a_copy(vit: Any, images: Tensor, check: Any) -> None:
    before = images.clone()
    probe = Probe(vit.train(), samples=images)
    images.zero_()
    probe.measure()
    check(probe.rows(), vit, before)


@pytest.mark.parametrize("wrong", [(), {}, [], "images", [1, 2], {"n": 3}, torch.zeros(0, 3, 32, 32), object()])
def test_samples_that_hold_nothing_to_measure(vit: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="samples= is what the model is called with"):
        Probe(vit, samples=wrong)


@pytest.mark.parametrize("wrong", [None, "float32", "float16", torch.float64, 2])
def test_wrong_precision(vit: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="exact is True"):
        Probe(vit, exact=wrong)


def test_samples_are_refused_where_they_would_be_ignored(vit: Any, images: Tensor) -> None:
    with pytest.raises(ValueError, match="samples= would be ignored"):
        Probe(vit, exact=False, samples=images)


# ---- measuring without attaching


def test_measure_now(make_vit: Any, images: Tensor, check: Any, state: Any) -> None:
    model = make_vit(proj_drop_rate=0.2).train()
    before, random = state(model), torch.get_rng_state()
    probe = Probe(model, samples=images, every=10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probe.measure(7)
    assert {row["step"] for row in probe.rows()} == {7}
    check(probe.rows(), model, images)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(3)
    probe.measure(8)
    check(at(probe, 8), model, images)
    assert probe.step == 8
    assert state(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert [probe.due(step) for step in (0, 7, 10)] == [True, False, True]


def test_measure_takes_the_samples_that_came(make_vit: Any, batches: list[Tensor], check: Any) -> None:
    model = make_vit().train()
    probe = Probe(model)
    with pytest.raises(ValueError, match="give the probe what to measure on"):
        probe.measure()
    with probe:
        model(batches[0])
    model.eval()  # as it is after an epoch
    probe.measure(20)
    check(at(probe, 20), model, batches[0])
    with pytest.raises(ValueError, match="give the probe what to measure on"):
        Probe(model, exact=False).measure()


def test_a_measurement_that_fails_in_training_warns(vit: Any, images: Tensor) -> None:
    probe = Probe(vit.train(), samples=images[:, :2])
    with pytest.warns(UserWarning, match="could not measure step 3, training goes on"):
        probe.measure(3)
    probe.step = 4
    with pytest.warns(UserWarning, match="could not measure step 4, training goes on"), probe:
        vit(images).sum().backward()
    assert probe.rows() == []
    with pytest.raises((RuntimeError, AssertionError)):
        Probe(vit.eval(), samples=images[:, :2]).measure()


# ---- weights below float32


class Broken(nn.Module):
    """Raises in the probe's own pass, which is in evaluation mode, and not in training's."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise self.error
        return x


def with_positions(self: Any, x: Tensor) -> Tensor:
    return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.positions


def low(make_vit: Any) -> Any:
    """In bfloat16, with a buffer, with weights that two blocks share, and that a block and the rest share."""
    model = make_vit()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    model.norm.weight = model.blocks[0].norm1.weight
    model.blocks[0].attn.register_buffer("unused", torch.ones(3))
    model.register_buffer("count", torch.tensor(3))
    model.pos_embed = None  # as a buffer, which the model reads
    model.register_buffer("positions", 0.3 * torch.randn(1, 17, 48))
    model._pos_embed = types.MethodType(with_positions, model)  # a copy's reads the copy's buffers
    return model.bfloat16().train()


def identities(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, id(tensor), tensor.dtype, tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors]


def test_weights_in_bfloat16_are_those_of_a_float32_copy(make_vit: Any, images: Tensor, check: Any) -> None:
    model = low(make_vit)
    before = identities(model)
    with Probe(model) as probe:
        assert model(images.bfloat16()).dtype == torch.bfloat16
    assert identities(model) == before
    check(probe.rows(), model, images.bfloat16())


@pytest.mark.parametrize("where", ["block", "outside"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_the_weights_are_back_after_an_exception(
    make_vit: Any, images: Tensor, state: Any, kind: type[BaseException], where: str
) -> None:
    model = low(make_vit)
    broken = Broken(kind("now")).train()
    if where == "block":
        model.blocks[1].attn.proj_drop = broken
    else:
        model.fc_norm = broken
    before, hooks = identities(model), state(model)
    if kind is RuntimeError:
        with pytest.warns(UserWarning, match="training goes on"), Probe(model):
            model(images.bfloat16()).float().sum().backward()
    else:
        with pytest.raises(KeyboardInterrupt), Probe(model):
            model(images.bfloat16())
    assert identities(model) == before
    assert state(model) == hooks


def test_one_block_is_raised_at_a_time(make_vit: Any, images: Tensor) -> None:
    model = make_vit(depth=3).bfloat16().train()
    seen = []

    def look(*_: Any) -> None:
        if not model.training:
            seen.append([block.mlp.fc1.weight.dtype for block in model.blocks])

    for block in model.blocks:
        block.attn.register_forward_hook(look)
    with Probe(model):
        model(images.bfloat16())
    assert seen == [[torch.float32 if i == k else torch.bfloat16 for i in range(3)] for k in range(3)]


# ---- float64


def beyond_float32(make_vit: Any) -> Any:
    """In float32, with an `sa` whose κ is about 1e9 in both blocks."""
    model = make_vit()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.proj.weight.copy_(torch.diag(torch.tensor([1.0] * 12 + [1e-9] * 36)))
            block.attn.proj.bias.zero_()
    return model


@pytest.mark.parametrize("training", [True, False])
def test_float64_sees_past_the_ceiling_of_float32(
    make_vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any, training: bool
) -> None:
    model = beyond_float32(make_vit).train(training)
    before = identities(model)
    with Probe(model) as coarse, Probe(model, exact="float64") as fine, torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(images).dtype == torch.bfloat16
    assert identities(model) == before
    coarse_values, status = rows_of(coarse.rows()), rows_of(coarse.rows(), "status")
    found = rows_of(fine.rows())
    assert {(row["dtype"], row["status"]) for row in fine.rows()} == {("float64", "ok")}
    expected = by_hand(copy.deepcopy(model).eval().double(), images.double())
    for place, values in found.items():
        for name, value in truth(expected[place]).items():
            assert values[name] == pytest.approx(value, rel=1e-4), (place, name)
        if place[1] == "sa":
            assert values["log_kappa"] > math.log(1e9)
            assert coarse_values[place]["log_kappa"] == pytest.approx(math.log(2**23))
            assert status[place]["log_kappa"] == "ceiling"


def test_float64_of_weights_in_bfloat16(make_vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any) -> None:
    model = beyond_float32(make_vit).bfloat16().train()
    probe = Probe(model, exact="float64", samples=images.bfloat16())
    probe.measure()
    expected = by_hand(copy.deepcopy(model).eval().double(), images.bfloat16().double())
    for place, values in rows_of(probe.rows()).items():
        assert values["log_kappa"] == pytest.approx(truth(expected[place])["log_kappa"], rel=1e-4)


# ---- compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_in_training(make_vit: Any, batches: list[Tensor], check: Any, whole: bool) -> None:
    vit = make_vit().train()
    if whole:
        model: Any = torch.compile(vit, backend="eager")
    else:
        model = vit
        vit.compile(backend="eager")
    probe = Probe(model)
    copies = []
    with probe:
        for step, batch in enumerate(batches):
            probe.step = step
            copies.append({name: tensor.clone() for name, tensor in vit.state_dict().items()})
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(batch).float().square().mean().backward()
            with torch.no_grad():
                for parameter in vit.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.05 * parameter.grad)
    plain = make_vit()
    for step, weights in enumerate(copies):
        plain.load_state_dict(weights)
        check(at(probe, step), plain, batches[0])


# ---- no trace


@pytest.mark.parametrize("settings", [{}, {"exact": "float64"}, {"near_unit": True}, {"every": "auto"}], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_training_is_the_same_to_the_bit(
    make_vit: Any, batches: list[Tensor], settings: dict[str, Any], weights: torch.dtype
) -> None:
    outcomes = []
    for probed in (False, True):
        torch.manual_seed(1)
        model = make_vit(proj_drop_rate=0.2, attn_drop_rate=0.2, drop_path_rate=0.3).to(weights).train()
        images = [batch.clone().to(weights) for batch in batches]
        probe = Probe(model, **settings) if probed else None
        autocast = torch.bfloat16 if weights == torch.float32 else torch.float32
        if probe is None:
            list(train(model, images, None, autocast))
        else:
            with probe:
                list(train(model, images, probe, autocast))
            assert probe.rows()
        gradients = [parameter.grad for parameter in model.parameters()]
        outcomes.append((list(model.parameters()), gradients, images, torch.get_rng_state()))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, "auto"])
def test_on_a_gpu_with_tf32(make_vit: Any, batches: list[Tensor], check: Any, every: Any) -> None:
    model, images = make_vit(proj_drop_rate=0.2).cuda().train(), [batch.cuda() for batch in batches]
    outputs, before = [], torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        for probe in (Probe(model, every=every), None):
            torch.manual_seed(3)
            with contextlib.nullcontext() if probe is None else probe, torch.autocast("cuda", dtype=torch.bfloat16):
                outputs.append([model(batch) for batch in images])
            if probe is not None:
                assert torch.backends.cuda.matmul.fp32_precision == "tf32"
                steps = sorted({row["step"] for row in probe.rows()})
                assert steps == [0, 1, 2] if every == 1 else steps[0] == 0
                for step in steps:
                    check(at(probe, step), model, images[0])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert all(torch.equal(one, two) for one, two in zip(*outputs, strict=True))


# ---- in our own loop


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"probe_every": 4}, [0, 4, 8, 10]),
        ({"probe_every": 5}, [0, 5, 10]),
        ({"probe_every": 4, "probe_exact": "no"}, [0, 4, 8, 9]),  # training's own passes: the last is that of step 9
        ({"probe_every": 4, "probe_marks": True, "steps": 20}, [0, 1, 2, *range(4, 21, 2)]),
    ],
    ids=str,
)
def test_the_last_step_of_a_training_is_measured(tmp_path: Path, settings: dict[str, Any], steps: list[int]) -> None:
    model = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
    changes = {"data": "digits", "image_size": 8, "model_kwargs": model, "batch_size": 16, "steps": 10, **settings}
    for _ in range(2):  # once more, when it is finished: what was measured at its end is there again, once
        train_a_run(Config().changed({**changes, "probe_samples": 4}), tmp_path, device="cpu", quiet=True)
        rows = [row for row in Run.open(tmp_path).probe if (row["name"], row["site"]) == ("log_kappa", "sa")]
        assert [row["step"] for row in rows] == steps
