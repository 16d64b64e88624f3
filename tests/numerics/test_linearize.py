"""Products with the Jacobian against `torch.func`, on functions of every kind, and nothing changed behind them."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from wellcond.numerics.linearize import Linearization, evaluation, first_tensor

CPU = torch.device("cpu")


class Cube(torch.autograd.Function):
    """An autograd function of the old style: no forward mode, nothing for torch.func."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


class StraightThrough(torch.autograd.Function):
    """Forward mode says one thing, backward another."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return 2 * tangent


def check(function, x: Tensor, truth: Tensor, mode: str) -> None:
    jacobian = Linearization(function, x)
    m, n = jacobian.outputs, jacobian.inputs
    truth = truth.reshape(m, n)
    u, v = torch.randn(m, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    assert_close(jacobian.vjp(u), u @ truth)
    assert_close(jacobian.jvp(v), truth @ v)
    assert_close(jacobian.matrix(), truth)
    assert jacobian.jvp_mode == mode


def test_forward_mode_where_there_is_one() -> None:
    w = torch.randn(7, 5, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return torch.softmax(x @ w, -1)

    x = torch.randn(3, 7, dtype=torch.float64)
    check(function, x, torch.func.jacrev(function)(x), "forward")


def test_more_outputs_than_are_taken_at_once() -> None:
    w = torch.randn(4, 150, dtype=torch.float64)
    check(lambda x: torch.tanh(x @ w), x := torch.randn(1, 4, dtype=torch.float64), torch.func.jacrev(
        lambda x: torch.tanh(x @ w))(x), "forward")  # fmt: skip


def test_two_backward_passes_where_there_is_no_forward_mode() -> None:
    w = torch.randn(6, 6, dtype=torch.float64)
    x = torch.randn(2, 6, dtype=torch.float64)
    truth = torch.func.jacrev(lambda x: (x @ w) ** 3)(x)
    check(lambda x: Cube.apply(x @ w), x, truth, "double backward")


def test_two_backward_passes_where_forward_mode_disagrees() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    check(StraightThrough.apply, x, torch.eye(12, dtype=torch.float64), "double backward")


def test_neither_raises_and_names_the_way_out() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    jacobian = Linearization(OnceOnly.apply, x)
    with pytest.raises(ValueError, match="method='exact' needs backward"):
        jacobian.jvp(torch.ones(12, dtype=torch.float64))
    assert_close(jacobian.matrix(), torch.diag(3 * x.flatten() ** 2))


def test_of_a_function_that_does_not_repeat_itself_the_first_draw_counts() -> None:
    generator, drawn = torch.Generator().manual_seed(0), []

    def noisy(x: Tensor) -> Tensor:
        drawn.append(torch.randn(12, generator=generator, dtype=torch.float64))
        return x * drawn[-1]

    jacobian = Linearization(noisy, torch.randn(12, dtype=torch.float64))
    v = torch.randn(12, dtype=torch.float64)
    assert_close(jacobian.jvp(v), drawn[0] * v)
    assert jacobian.jvp_mode == "double backward"


def test_several_points_and_unused_ones() -> None:
    a, b, c = (torch.randn(3, dtype=torch.float64) for _ in range(3))
    jacobian = Linearization(lambda a, b, c: a * b, a, b, c)
    truth = torch.cat([torch.diag(b), torch.diag(a), torch.zeros(3, 3)], 1)
    assert_close(jacobian.matrix(), truth)
    v = torch.randn(9, dtype=torch.float64)
    assert_close(jacobian.jvp(v), truth @ v)
    assert_close(jacobian._double_backward(v), truth @ v)


def test_an_output_that_depends_on_nothing_raises() -> None:
    with pytest.raises(ValueError, match="does not depend"):
        Linearization(lambda x: x.detach() * 2, torch.ones(3))


def test_a_coarser_dtype_inside_is_noticed() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    assert Linearization(torch.sin, x).coarsest_eps() == torch.finfo(torch.float64).eps
    inside = Linearization(lambda x: torch.sin(x.float()).double() * 2, x)
    assert inside.coarsest_eps() == torch.finfo(torch.float32).eps
    constants = Linearization(lambda x: x * torch.ones(6).double(), x)
    assert constants.coarsest_eps() == torch.finfo(torch.float64).eps


def snapshot(module: nn.Module) -> dict[str, object]:
    return {
        "state": copy.deepcopy(module.state_dict()),
        "training": [m.training for m in module.modules()],
        "tensors": [id(t) for t in (*module.parameters(), *module.buffers())],
        "grads": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "random": torch.get_rng_state(),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("eval_mode", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_module_is_left_as_it_was(eval_mode: bool, fails: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 3))
    module[2].eval()  # flags need not agree
    module(torch.randn(4, 6)).sum().backward()
    before = snapshot(module)
    x = torch.randn(4, 6, dtype=torch.float64)
    before["random"] = torch.get_rng_state()
    try:
        with torch.no_grad(), evaluation(module, device=CPU, eval_mode=eval_mode) as function:
            jacobian = Linearization(lambda x: function(x), x)
            jacobian.jvp(torch.ones(24, dtype=torch.float64))
            jacobian.matrix()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    after = snapshot(module)
    for key in before:
        if key == "state":
            assert all(torch.equal(after["state"][name], value) for name, value in before["state"].items())
        elif key == "grads":
            assert all(torch.equal(a, b) for a, b in zip(before["grads"], after["grads"], strict=True))
        elif key == "random":
            assert torch.equal(before["random"], after["random"])
        else:
            assert before[key] == after[key], key


def test_dropout_draws_the_same_mask_in_each_evaluation() -> None:
    module = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5)).train()
    x = torch.randn(1, 6, dtype=torch.float64)
    with evaluation(module, device=CPU, eval_mode=False) as function:
        jacobian = Linearization(lambda x: function(x), x)
        matrix, v = jacobian.matrix(), torch.randn(6, dtype=torch.float64)
        assert_close(jacobian.jvp(v), matrix @ v)
        assert jacobian.jvp_mode == "forward"
    zeros = (matrix == 0).all(1).sum()
    assert 0 < zeros < 50
    with evaluation(module, device=CPU) as function:
        assert_close(Linearization(lambda x: function(x), x).matrix(), module[0].weight.double())


def test_bound_methods_and_compiled_modules_are_cast_too() -> None:
    class Model(nn.Linear):
        def features(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    model = Model(4, 3)
    x = torch.randn(1, 4, dtype=torch.float64)
    truth = torch.func.jacrev(copy.deepcopy(model).double().features)(x)[0, :, 0]
    with evaluation(model.features, device=CPU) as function:
        assert_close(Linearization(lambda x: function(x), x).matrix(), truth)
    with evaluation(torch.compile(model), device=CPU) as function:
        jacobian = Linearization(lambda x: function(x), x)
        v = torch.randn(4, dtype=torch.float64)
        assert_close(jacobian.jvp(v), model.weight.double() @ v)
        assert jacobian.jvp_mode == "forward"
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    with evaluation(in_place, device=CPU) as function:
        assert Linearization(lambda x: function(x), x).jvp(v).shape == (3,)


def test_inside_inference_mode() -> None:
    module = nn.Linear(4, 4)
    with torch.inference_mode():
        x = torch.randn(1, 4, dtype=torch.float64)
        with evaluation(module, device=CPU) as function:
            assert_close(Linearization(lambda x: function(x), x.clone()).matrix(), module.weight.double())


def test_autocast_outside_changes_nothing() -> None:
    module = nn.Linear(4, 4)
    x = torch.randn(1, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), evaluation(module, device=CPU) as function:
        assert_close(Linearization(lambda x: function(x), x).matrix(), module.weight.double(), rtol=0, atol=0)


def test_first_tensors() -> None:
    x = torch.ones(2)
    assert first_tensor((x, None)) is x
    assert first_tensor({"last_hidden_state": [x]}) is x
    for bad in (None, (), 3.0, {}):
        with pytest.raises(ValueError, match="not a tensor"):
            first_tensor(bad)
    with pytest.raises(ValueError, match="no derivative"):
        first_tensor(torch.ones(2, dtype=torch.long))


def test_warnings_of_the_block_are_heard() -> None:
    def function(x: Tensor) -> Tensor:
        warnings.warn("mind the gap", stacklevel=2)
        return x * 2

    with pytest.warns(UserWarning, match="mind the gap"):
        Linearization(function, torch.ones(3))
