"""A probe changes nothing: no bit of an output or a gradient, no random number, no flag, no buffer, no input."""

import contextlib
import copy
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wellcond.probe import Probe
from wellcond.probe.passes import argument, batch_size, first_samples, is_compiled, needs_separate_pass

Model = Callable[[], nn.Module]


def vit() -> nn.Module:
    rates = {"proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "drop_path_rate": 0.5, "pos_drop_rate": 0.1}
    size = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **size, **rates)


def swin() -> nn.Module:
    size: dict[str, Any] = {"img_size": 32, "depths": (2,), "embed_dim": 16, "num_heads": (2,), "window_size": 4}
    return timm.create_model("swin_tiny_patch4_window7_224", **size, num_classes=5, drop_path_rate=0.5)


def cait() -> nn.Module:
    size = {"img_size": 32, "depth": 1, "depth_token_only": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
    return timm.create_model("cait_xxs24_224", **size, drop_path_rate=0.5)


def convmixer() -> nn.Module:
    return timm.models.convmixer.ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=4, num_classes=5)


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision").models
    size = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return models.VisionTransformer(**size, num_classes=5, dropout=0.2, attention_dropout=0.2)


def torch_compile(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


MODELS = [vit, swin, cait, convmixer, torchvision_vit]


def outcome(model: nn.Module, images: Tensor, probe: Probe | None, dtype: torch.dtype) -> dict[str, Any]:
    """Everything of two steps that a probe could have touched."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (it is the global state that must not move)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(2):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            if probe is None:
                outputs.append(model(images))
            else:
                with probe:
                    outputs.append(model(images))
        if outputs[-1].requires_grad:
            outputs[-1].float().square().sum().backward()
            optimiser.step()
    return {
        "outputs": [output.detach() for output in outputs],
        "weights": dict(model.named_parameters()),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "buffers": dict(model.named_buffers()),
        "training": [module.training for module in model.modules()],
        "random": (torch.get_rng_state(), random.random(), np.random.rand()),  # noqa: NPY002
        "images": images,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_no_bit_changes(make: Model, training: bool, exact: bool, dtype: torch.dtype) -> None:
    model, images = make().train(training), torch.randn(3, 3, 32, 32)
    twin = copy.deepcopy(model)
    probe = Probe(twin, sites="*", exact=exact, max_samples=2)
    with torch.set_grad_enabled(training):  # without gradients torch's attention takes its fast path
        expected = outcome(model, images.clone(), None, dtype)
        found = outcome(twin, images.clone(), probe, dtype)
    assert {row["step"] for row in probe.rows()} == {0, 1}
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_that_draws_in_evaluation_too(exact: bool) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = vit()

        def forward(self, x: Tensor) -> tuple[float, ...]:
            self.inner(x)
            return float(torch.rand(())), random.random(), np.random.rand()  # noqa: NPY002

    model, images = Drawing().eval(), torch.randn(2, 3, 32, 32)

    def drawn(probe: Any) -> tuple[float, ...]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        with probe:
            return model(images)

    assert drawn(Probe(model, exact=exact)) == drawn(contextlib.nullcontext())


class OfMapping(nn.Module):
    """A wrapper with code of its own around its only child, which is called `module`."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.module = inner

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.module((batch["pixels"] - 120) / 58)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch_compile, lambda model: model])
def test_a_wrappers_own_code_runs(make_vit: Any, images: Tensor, rows_of: Any, wrap: Any) -> None:
    model = make_vit()
    with Probe(model) as expected:
        model(images)
    wrapped = wrap(OfMapping(model))
    with Probe(wrapped) as probe:
        wrapped({"pixels": images * 58 + 120})
    found, wanted = rows_of(probe.rows()), rows_of(expected.rows())
    for place in wanted:
        assert found[place]["sigma_max"] == pytest.approx(wanted[place]["sigma_max"], rel=1e-3)


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_that_works_on_its_input_in_place(exact: bool) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = vit()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.sub_(0.5).div_(0.25))

    model, images = InPlace().eval(), torch.rand(2, 3, 32, 32)
    expected = model(images.clone())
    with Probe(model, exact=exact):
        assert torch.equal(model(images), expected)


class Table(nn.Module):
    """Positions, made at the first call and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[-1]).to(x.dtype).diag()
        return x + x @ self.table


@pytest.mark.parametrize(("dtype", "exact"), [(torch.bfloat16, True), (torch.float32, "float64")])
def test_a_table_made_at_the_first_call_has_the_models_precision(dtype: torch.dtype, exact: Any) -> None:
    model: Any = vit().to(dtype)
    model.norm_pre = own = Table()
    with Probe(model, exact=exact) as probe:
        for _ in range(2):  # the second pass of the probe finds the table of the model's own
            assert model(torch.randn(2, 3, 32, 32).to(dtype)).dtype == dtype
            assert own.table is not None
            assert own.table.dtype == dtype
    assert {row["step"] for row in probe.rows()} == {0, 1}


def test_observers_that_write_in_evaluation_too(images: Tensor) -> None:
    def observed(probed: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model: Any = vit()
        model.norm_pre = torch.ao.quantization.FakeQuantize(averaging_constant=0.5)
        with Probe(model, max_samples=2) if probed else contextlib.nullcontext():
            outputs = [model(images + step) for step in range(2)]
        return {"outputs": outputs, "state": model.state_dict()}

    torch.testing.assert_close(observed(True), observed(False), rtol=0, atol=0)


class Cache:
    """What a model is given, and adds to."""

    def __init__(self, tokens: Tensor):
        self.tokens = [tokens]


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = vit()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.tokens.append(self.inner(x))
        return torch.stack(cache.tokens).sum(0)


@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_adds_to_its_arguments(training: bool) -> None:
    model, images = Remembering().train(training), torch.rand(2, 3, 32, 32)
    outputs = []
    for probe in (contextlib.nullcontext(), Probe(model)):
        torch.manual_seed(0)
        cache = Cache(model.inner(images))  # in training with a graph, which deepcopy refuses
        with probe:
            outputs.extend(model(images, cache) for _ in range(3))
        assert len(cache.tokens) == 4
    assert all(torch.equal(*pair) for pair in zip(outputs[:3], outputs[3:], strict=True))


# ---- precision


def test_autocast_live_says_what_it_saw(make_vit: Any, images: Tensor, rows_of: Any) -> None:
    model = make_vit().train()
    with Probe(model, exact=False) as probe, torch.autocast("cpu", dtype=torch.bfloat16):
        model(images)
    dtypes, status = rows_of(probe.rows(), "dtype"), rows_of(probe.rows(), "status")
    for block in ("blocks.0", "blocks.1"):
        assert dtypes[block, "sa"]["log_kappa"] == dtypes[block, "sa"]["attention_entropy"] == "bfloat16"
        assert status[block, "sa"]["log_kappa"] in ("low_precision", "ceiling")
        assert status[block, "sa"]["attention_entropy"] == "low_precision"
    ceilings = [row for row in probe.rows() if row["name"] == "log_kappa_max" and row["dtype"] == "bfloat16"]
    assert all(row["value"] <= np.log(128) + 1e-6 for row in ceilings)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_is_exact_under_autocast(
    make_vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any, dtype: torch.dtype, training: bool
) -> None:
    model = make_vit().train(training)
    with Probe(model, exact=True) as probe, torch.autocast("cpu", dtype=dtype):
        assert model(images).dtype == dtype
    assert {(row["dtype"], row["status"]) for row in probe.rows()} == {("float32", "ok")}
    found, expected = rows_of(probe.rows()), by_hand(model.double(), images.double())
    for place in found:
        assert found[place]["log_kappa"] == pytest.approx(truth(expected[place])["log_kappa"], rel=1e-3)


def test_weights_in_bfloat16_are_raised(make_vit: Any, images: Tensor, by_hand: Any, truth: Any, rows_of: Any) -> None:
    model = make_vit().to(torch.bfloat16)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Probe(model) as probe:
        assert model(images.bfloat16()).dtype == torch.bfloat16
    assert {(row["dtype"], row["status"]) for row in probe.rows()} == {("float32", "ok")}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.parameters())
    with Probe(model, exact=False) as live:
        model(images.bfloat16())
    assert {row["dtype"] for row in live.rows()} == {"bfloat16"}
    found, expected = rows_of(probe.rows()), by_hand(model.double(), images.bfloat16().double())
    for place in found:
        assert found[place]["log_kappa"] == pytest.approx(truth(expected[place])["log_kappa"], rel=1e-3)


def test_a_model_that_insists_on_low_precision_is_told_of(make_vit: Any, images: Tensor) -> None:
    class Insisting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_vit()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    model = Insisting().eval()
    with pytest.warns(UserWarning, match=r"computes in torch\.bfloat16 by itself"), Probe(model) as probe:
        model(images)
    assert any(row["status"] in ("low_precision", "ceiling") for row in probe.rows())


class Float32Norm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its own name)
        return super().forward(input.float()).type_as(input)


class CastsToBfloat16(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16())


@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_casts_inside_is_measured_in_the_precision_that_it_runs_in(
    make_vit: Any, images: Tensor, training: bool
) -> None:
    model = make_vit(norm_layer=Float32Norm).train(training)
    said = "does not run in float64 and was measured in float32"
    with pytest.warns(UserWarning, match=said), Probe(model, exact="float64", samples=images) as probe:
        model(images)
    with Probe(model, samples=images) as expected:
        model(images)
    assert probe.rows() == expected.rows()

    model = CastsToBfloat16(make_vit()).train(training)
    said = "was measured in the precision of its weights|by itself"
    with pytest.warns(UserWarning, match=said), Probe(model, samples=images) as probe:
        model(images)
    assert {row["dtype"] for row in probe.rows() if row["name"] == "log_kappa"} == {"bfloat16"}
    assert "does not run in float32" in probe.notes[0]


def test_tf32_is_off_in_the_exact_pass_alone(make_vit: Any, images: Tensor) -> None:
    model, seen = make_vit(), []
    model.norm.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision))
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        for exact in (True, False):
            with Probe(model, exact=exact):
                model(images)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ["ieee", "tf32", "tf32"]


def test_accelerate(make_vit: Any, images: Tensor, rows_of: Any, by_hand: Any, truth: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_vit()
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    forward = prepared.forward
    with Probe(prepared) as probe:
        prepared(images)
    assert prepared.forward == forward
    assert {(row["dtype"], row["status"]) for row in probe.rows()} == {("float32", "ok")}
    with Probe(prepared.train()) as training, Probe(prepared, exact=False) as live:
        prepared(images).sum().backward()
    assert training.rows() == probe.rows()
    assert {row["dtype"] for row in live.rows() if row["site"] == "sa"} == {"bfloat16"}
    expected = by_hand(make_double(model), images.double())
    found = rows_of(probe.rows())
    for place in found:
        assert found[place]["log_kappa"] == pytest.approx(truth(expected[place])["log_kappa"], rel=1e-3)


def make_double(model: nn.Module) -> nn.Module:
    vars(model).pop("forward", None)  # accelerate's own, which would compute in bfloat16
    return model.eval().double()


# ---- which models need a pass of their own


def test_the_mode_of_the_inner_model_counts(make_vit: Any, images: Tensor) -> None:
    model = make_vit()
    wrapped = nn.DataParallel(model).train()
    model.eval()  # as people do it: the wrapper still says that it is in training
    with Probe(wrapped) as probe:
        for batch in (images, images + 1):
            wrapped(batch)
    by_step = [[row["value"] for row in probe.rows() if row["step"] == step] for step in (0, 1)]
    assert by_step[0] != by_step[1]  # evaluation, so the batch that comes


def test_who_needs_a_pass_of_its_own(make_vit: Any) -> None:
    model = make_vit()
    assert needs_separate_pass(model) is None
    assert not is_compiled(model)
    attention = torchvision_vit()
    assert needs_separate_pass(attention.train()) is None
    assert "listens" in (needs_separate_pass(attention.eval()) or "")


# ---- what a model was called with


class Called(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *rest: Any, **more: Any) -> None: ...


def test_the_first_tensor_tells_the_batch() -> None:
    assert batch_size((torch.zeros(5, 3),), {}) == 5
    assert batch_size((), {"flag": True, "x": torch.zeros(7, 2)}) == 7
    assert batch_size(({"images": [torch.zeros(4)]},), {}) == 4
    assert batch_size((torch.tensor(3.0), torch.zeros(6)), {}) == 6
    assert batch_size((), {"flag": True}) == 1


def test_the_first_samples_are_copies() -> None:
    x, mask, scale, table = torch.randn(5, 3), torch.ones(5, 2), torch.tensor(2.0), torch.zeros(9)
    (found_x, found_scale), found = first_samples((x, scale), {"m": mask, "t": table, "n": None, "s": "text"}, 2)
    assert torch.equal(found_x, x[:2])
    assert torch.equal(found["m"], mask[:2])
    assert torch.equal(found["t"], table)  # not of the batch: whole
    assert (found["n"], found["s"]) == (None, "text")
    for tensor in (found_x, found_scale, found["m"], found["t"]):
        tensor.fill_(-1)
    assert float(x.min()) != -1 or float(x.max()) != -1
    assert (float(scale), float(mask.min()), float(table.max())) == (2.0, 1.0, 0.0)


class Batch:
    def __init__(self) -> None:
        self.x = torch.zeros(5, 3)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(5, 5), torch.zeros(20, 7, 7), [torch.zeros(5, 3), torch.zeros(4, 3)], (torch.zeros(5, 3),) * 2,
        {"inner": [torch.zeros(5, 3)] * 3}, Batch(),
    ],
)  # fmt: skip
def test_nothing_is_cut_where_it_may_be_no_batch(other: Any) -> None:
    (x, found), _ = first_samples((torch.zeros(5, 3), other), {}, 2)
    assert len(x) == 5
    assert [t.shape for t in pytree.tree_leaves(found) if isinstance(t, Tensor)] == [
        t.shape for t in pytree.tree_leaves(other) if isinstance(t, Tensor)
    ]


def test_a_batch_in_one_argument_is_cut() -> None:
    ((x, y), found), _ = first_samples(((torch.zeros(5, 3, 5), torch.zeros(5)), {"mask": torch.zeros(5, 4)}), {}, 2)
    assert len(x) == len(y) == len(found["mask"]) == 2


def test_a_list_of_samples_of_several_lengths() -> None:
    assert batch_size(([torch.zeros(100, 3), torch.zeros(80, 3), torch.zeros(100, 3)],), {}) == 3
    assert batch_size(([torch.zeros(8, 3), torch.zeros(8, 3)],), {}) == 8
    assert batch_size(((torch.zeros(8, 3), torch.zeros(7)),), {}) == 8


def test_a_square_mask_and_one_for_each_head() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    for n, mask in ((128, torch.ones(128, 128).triu(1).bool()), (5, torch.zeros(128 * 2, 5, 5, dtype=torch.bool))):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not tell padding apart")
            with Probe(encoder) as probe:
                encoder(torch.randn(128, n, 8), mask=mask)
        assert {row["count"] for row in probe.rows() if row["name"] == "log_kappa"} == {64}
        assert {row["count"] for row in probe.rows() if row["name"] == "attention_entropy"} == {4}


def test_what_is_copied_of_other_objects() -> None:
    graph, module, lock = Batch(), nn.Linear(2, 2), threading.Lock()
    graph.x = torch.ones(2, requires_grad=True) * 2
    (first, second, shared), _ = first_samples((graph, graph, module), {}, 2)
    assert first is second is not graph
    assert shared is module
    first.x.zero_()
    assert torch.equal(graph.x, torch.full((2,), 2.0))
    with pytest.warns(UserWarning, match="shares a lock, which cannot be copied"):
        (found,), _ = first_samples((lock,), {}, 2)
    assert found is lock


def test_an_argument_by_position_or_by_name() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    model = Called()
    assert argument(model, "attention_mask", (x, mask), {}) is mask
    assert argument(model, "attention_mask", (x,), {"attention_mask": mask}) is mask
    assert argument(model, "attention_mask", (), {"x": x, "attention_mask": mask}) is mask
    assert argument(model, "attention_mask", (x,), {}) is None
    assert argument(model, "no_such_thing", (x, mask), {}) is None
