"""A probe notices each pass, compiled or not, and is gone afterwards, whatever happened."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from wellcond.probe import Probe


def kappas(probe: Probe) -> list[float]:
    return [row["value"] for row in probe.rows() if row["name"] == "log_kappa"]


# ---- hooks are taken away


class Interrupted(nn.Module):
    """Raises in the middle of a pass."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error: BaseException | None = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_after_an_exception(
    vit: Any, images: Tensor, state: Any, kind: type[BaseException], exact: bool
) -> None:
    vit.blocks[1].attn.proj_drop = Interrupted(kind("now"))
    vit.train()
    before = state(vit)
    with pytest.raises(kind, match="now"), Probe(vit, exact=exact):
        vit(images)
    assert state(vit) == before


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_probe_goes_on_after_an_exception(
    vit: Any, images: Tensor, state: Any, kind: type[BaseException], exact: bool
) -> None:
    with Probe(vit, exact=exact) as expected:
        vit(images)
    vit.blocks[1].attn.proj_drop = wrong = Interrupted(kind("now"))
    before = state(vit)
    with Probe(vit, exact=exact) as probe:
        attached = state(vit)
        with pytest.raises(kind):
            vit(images)
        wrong.error = None
        vit(images)
        assert state(vit) == attached
    assert state(vit) == before
    assert kappas(probe) == kappas(expected)


def test_nothing_of_a_failed_pass_stays_open(vit: Any, images: Tensor, state: Any) -> None:
    vit.blocks[1].attn.proj_drop = Interrupted(RuntimeError("now"))
    with Probe(vit, exact=False):
        attached = state(vit)
        with pytest.raises(RuntimeError, match="now"):
            vit(images)
        assert state(vit) == attached


def test_an_exception_inside_an_exception_handler(vit: Any, images: Tensor) -> None:
    with Probe(vit) as probe:
        try:
            raise KeyError
        except KeyError:
            vit(images)
    assert kappas(probe)


def test_attach_and_detach(vit: Any, images: Tensor, state: Any) -> None:
    before = state(vit)
    probe = Probe(vit)
    probe.detach()  # nothing to do
    assert probe.attach() is probe
    with pytest.raises(ValueError, match="attached already"):
        probe.attach()
    vit(images)
    probe.detach()
    probe.detach()
    assert state(vit) == before
    vit(images)
    assert {row["step"] for row in probe.rows()} == {0}
    with probe:
        vit(images)
    assert {row["step"] for row in probe.rows()} == {0, 1}


def test_detaching_unseen_warns(vit: Any, images: Tensor) -> None:
    probe = Probe(vit).attach()
    vit.forward_features(images)
    with pytest.warns(UserWarning, match="saw no forward pass"):
        probe.detach()
    probe.detach()


def test_attached_in_the_middle_of_a_pass(vit: Any, images: Tensor) -> None:
    probe = Probe(vit)
    handle = vit.blocks[0].register_forward_pre_hook(lambda *_: None if probe._attached else probe.attach() and None)
    vit(images)
    handle.remove()
    vit(images)
    probe.detach()
    assert {row["step"] for row in probe.rows()} == {0}


def test_between_measurements_only_the_model_itself_is_watched(vit: Any, images: Tensor) -> None:
    with Probe(vit, every=2) as probe:
        for _ in range(3):
            vit(images)
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in vit.blocks.modules())
    assert {row["step"] for row in probe.rows()} == {0, 2}


@pytest.mark.parametrize("first", [True, False, "float64"])
@pytest.mark.parametrize("second", [True, False, "float64"])
def test_two_probes_do_not_see_each_other(
    vit: Any, images: Tensor, state: Any, first: bool | str, second: bool | str
) -> None:
    vit.train()
    for module in vit.modules():  # so that live and exact numbers differ: a pass of the other's would show
        if isinstance(module, nn.Dropout):
            module.p = 0.3

    def measured(*settings: Any) -> list[list[float]]:
        torch.manual_seed(3)
        probes = [Probe(vit, exact=exact) for exact in settings]
        for probe in probes:
            probe.attach()
        for _ in range(2):
            vit(images)
        for probe in probes:  # not the last first
            probe.detach()
        assert [probe.step for probe in probes] == [2] * len(probes)
        return [[row["value"] for row in probe.rows()] for probe in probes]  # entropies too

    before = state(vit)
    assert measured(first, second) == [*measured(first), *measured(second)]
    assert state(vit) == before


# ---- copies


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_made_while_attached_is_not_watched(
    vit: Any, images: Tensor, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    with Probe(vit) as probe:
        vit(images)
        twin = duplicate(vit)
        twin(images)
        assert probe.step == 1
    twin(images)
    assert {row["step"] for row in probe.rows()} == {0}


def test_averaged_weights_are_not_mixed_in(vit: Any, images: Tensor) -> None:
    with Probe(vit) as probe:
        ema = timm.utils.ModelEmaV3(vit)
        vit(images)
        ema(images)
        assert probe.step == 1


# ---- compiled models


def torch_compile(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)  # pyright: ignore[reportReturnType]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def blocks_only(model: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return model


def blocks_in_place(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def forward_only(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


# torch's compiler looks at the gradient of a block's input, and its own warning says that one should not
NON_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"


@pytest.mark.filterwarnings(NON_LEAF)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("compiled", [torch_compile, in_place, blocks_only, blocks_in_place, forward_only])
def test_compiled_models_are_measured(
    make_vit: Any, images: Tensor, state: Any, compiled: Callable[[nn.Module], nn.Module], training: bool
) -> None:
    vit = make_vit(depth=1).train(training)
    with Probe(vit) as expected:
        vit(images)
    model = compiled(vit)
    before = state(model)
    for _ in range(2):  # before the first compiled call, and after it
        with Probe(model) as probe:
            for _ in range(2):
                model(images)
        assert state(model) == before
        assert kappas(probe) == 2 * kappas(expected)
        assert any("compiled code skips hooks" in note for note in probe.notes)
        assert {row["block"] for row in probe.rows()} == {"blocks.0"}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("whole", [False, True])
def test_nothing_is_compiled_for_the_probe(make_vit: Any, images: Tensor, whole: bool) -> None:
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    vit = make_vit(depth=1)
    (vit if whole else vit.blocks[0]).compile(backend=backend)
    with torch.no_grad():
        vit(images)
        before = len(graphs)
        with Probe(vit) as probe:
            vit(images)
        vit(images)
    assert kappas(probe)
    assert len(graphs) == before > 0


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("after_the_first_call", [False, True])
@pytest.mark.parametrize("probe_first", [False, True])
def test_a_probe_of_the_model_inside_says_that_it_saw_nothing(
    make_vit: Any, images: Tensor, after_the_first_call: bool, probe_first: bool
) -> None:
    vit = make_vit(depth=1)
    probe = Probe(vit) if probe_first else None
    compiled = torch_compile(vit)  # in one graph: the probe's hooks must not break it
    if after_the_first_call:
        compiled(images)
    probe = probe or Probe(vit)
    with pytest.raises(RuntimeError, match=r"saw no forward pass of VisionTransformer.*the\s+compiled model"), probe:
        compiled(images)
    with Probe(compiled) as seen:
        compiled(images)
    assert kappas(seen)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_while_attached_is_not_passed_over_in_silence(vit: Any, images: Tensor) -> None:
    probe = Probe(vit).attach()
    vit.compile(backend="eager")
    vit(images)
    with pytest.raises(RuntimeError, match="saw no forward pass"):
        probe.__exit__(None, None, None)
    assert vit._compiled_call_impl is not None


@pytest.mark.usefixtures("fresh_compiler")
def test_a_second_model_of_the_same_architecture(make_vit: Any, images: Tensor) -> None:
    first, second = make_vit(depth=1), make_vit(depth=1)
    torch_compile(first)(images)
    with Probe(second) as expected:
        second(images)
    compiled = torch_compile(second)
    with Probe(compiled) as probe:
        compiled(images)
    assert kappas(probe) == kappas(expected)


@pytest.mark.filterwarnings(NON_LEAF)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_compiled_and_interrupted(vit: Any, images: Tensor, state: Any, kind: type[BaseException]) -> None:
    vit.blocks[1].attn.proj_drop = Interrupted(kind("now"))
    for model in (vit, in_place(vit)):
        before = state(model)
        # torch 2.11's compiler tells where an error was raised, but not what it said
        with pytest.raises(BaseException, match=r"now|from user code"), Probe(model):
            model(images)
        assert state(model) == before


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("first_out", [0, 1])
def test_two_probes_of_a_compiled_model(make_vit: Any, images: Tensor, state: Any, first_out: int) -> None:
    model = in_place(make_vit(depth=1))
    model(images)
    before = state(model)
    probes = [Probe(model).attach(), Probe(model).attach()]
    model(images)
    assert kappas(probes[0]) == kappas(probes[1])
    probes[first_out].detach()
    model(images)
    probes[1 - first_out].detach()
    model(images)
    assert [probe.step for probe in probes] == ([1, 2] if first_out == 0 else [2, 1])
    assert state(model) == before


@pytest.mark.filterwarnings(NON_LEAF)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [torch_compile, blocks_only])
def test_gradients_under_autocast_survive_the_pass_beside(
    make_vit: Any, images: Tensor, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    # Weights that a pass without gradients has cast stay in autocast's cache, and would cut the graph.
    def gradients(probed: bool) -> list[Tensor | None]:
        torch.manual_seed(1)
        vit = make_vit(depth=1).train()
        model = compiled(vit)
        probe = Probe(model, exact=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if probed:
                with probe:
                    loss = model(images).square().sum()
                assert {row["dtype"] for row in probe.rows() if row["site"] == "sa"} == {"bfloat16"}
            else:
                loss = model(images).square().sum()
        loss.backward()
        return [parameter.grad for parameter in vit.parameters()]

    for with_probe, without in zip(gradients(True), gradients(False), strict=True):
        assert with_probe is not None
        assert torch.equal(with_probe, without)


def test_data_parallel_on_a_cpu(vit: Any, images: Tensor) -> None:
    with Probe(vit) as expected:
        vit(images)
    model = nn.DataParallel(vit)
    for exact in (True, False):
        with Probe(model, exact=exact) as probe:
            model(images)
        assert kappas(probe) == kappas(expected)
    assert any("DataParallel" in note for note in probe.notes)
