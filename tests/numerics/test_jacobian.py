"""Jacobian spectra against `torch.func.jacrev` in float64, on small random modules and on blocks of real models."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import wellcond
from wellcond.graying import TokenGraying
from wellcond.numerics import jacobian as jacobian_module
from wellcond.numerics.jacobian import jacobian_spectrum
from wellcond.numerics.linearize import first_tensor


def true_values(module: nn.Module, x: Tensor, **kwargs: Any) -> Tensor:
    """Singular values by torch.func.jacrev of a float64 copy in eval mode, sample by sample."""
    twin = copy.deepcopy(module).double().eval()
    found = []
    for sample in x.double():
        # One row at a time, for fused attention, which this one takes, has no rule for batches of rows.
        rows = torch.func.jacrev(lambda s: first_tensor(twin(s[None], **kwargs)).flatten(), chunk_size=1)
        jacobian = rows(sample)
        found.append(torch.linalg.svdvals(jacobian.reshape(jacobian.shape[0], -1)))
    return torch.stack(found).detach()


def true_parameter_values(module: nn.Module, x: Tensor) -> Tensor:
    twin = copy.deepcopy(module).double().eval()
    parameters = {name: p.detach() for name, p in twin.named_parameters() if p.requires_grad}

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return first_tensor(torch.func.functional_call(twin, parameters, (x.double(),))).flatten()

    rows = torch.func.jacrev(outputs)(parameters)
    return torch.linalg.svdvals(torch.cat([row.flatten(1) for row in rows.values()], 1))


class Attention(nn.Module):
    """One linear-algebra-only attention, with or without its skip."""

    def __init__(self, d: int, out: int, skip: bool):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, out)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        branch = torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)
        return x + branch if self.skip else branch


@given(
    tokens=st.integers(1, 6),
    d=st.integers(1, 6),
    out=st.integers(1, 8),
    skip=st.booleans(),
    method=st.sampled_from(["auto", "gram", "lanczos", "density"]),
    seed=st.integers(0, 100),
)
def test_small_modules(tokens: int, d: int, out: int, skip: bool, method: str, seed: int) -> None:
    torch.manual_seed(seed)
    module = Attention(d, d if skip else out, skip)
    x = torch.randn(2, tokens, d)
    truth = true_values(module, x)
    k = min(3, truth.shape[1])
    found = jacobian_spectrum(module, x, k=k, method=method, seed=seed)
    assert (found.outputs, found.inputs) == (tokens * (d if skip else out), tokens * d)
    scale = float(truth.max())
    allowed = 1e-6 if method == "gram" else 1e-10  # which squares σ
    assert_close(found.largest, truth[:, :k], rtol=0, atol=allowed * scale)
    assert (found.smallest >= truth[:, -k:] - allowed * scale).all()
    if not found.kappa_is_lower_bound.any():
        assert_close(found.smallest, truth[:, -k:], rtol=0, atol=allowed * scale)
    if method == "auto":
        assert found.method == "exact"
        assert_close(found.values, truth, rtol=0, atol=1e-12 * scale)
        for row, kappa in enumerate(found.kappa):
            if found.status_names()[row] == "ok":
                assert_close(kappa, truth[row, 0] / truth[row, -1], rtol=1e-14 * float(kappa), atol=0)


@pytest.mark.parametrize("method", ["exact", "gram", "lanczos"])
@pytest.mark.parametrize(("tokens", "out"), [(1, 3), (4, 3), (4, 9)])
def test_with_respect_to_parameters(method: str, tokens: int, out: int) -> None:
    module = Attention(5, out, skip=False)
    module.k.bias.requires_grad_(False)
    x = torch.randn(2, tokens, 5)
    truth = true_parameter_values(module, x)
    found = jacobian_spectrum(module, x, "params", 2, method=method)
    assert found.inputs == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert found.outputs == 2 * tokens * out
    assert found.largest.shape == (2,)
    assert found.kappa.shape == ()
    assert_close(found.largest, truth[:2])


@pytest.mark.parametrize("wrt", ["input", "params"])
@pytest.mark.parametrize("method", ["exact", "lanczos"])
def test_a_block_that_caches(wrt: str, method: str) -> None:
    """What it caches in one call, as timm's TinyViT its biases, is neither read by the next nor left behind."""

    class Caching(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.bias_cache: dict[str, Tensor] = {}
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, 4, dtype=x.dtype)
            if "square" not in self.bias_cache:
                self.bias_cache["square"] = self.weight @ self.weight
            return torch.tanh(x @ self.bias_cache["square"] + self.table)

    block, x = Caching(), torch.randn(1, 3, 4)
    block.bias.requires_grad_(False)
    block(x)
    held = block.table, block.bias_cache["square"]
    found = jacobian_spectrum(block, x, wrt, 2, method=method)
    assert (block.table, block.bias_cache["square"]) == held
    fresh = Caching().double()
    fresh.load_state_dict(block.state_dict())
    at = x.double() if wrt == "input" else fresh.weight.detach()

    def outputs(point: Tensor) -> Tensor:
        fresh.bias_cache.clear()
        given = {} if wrt == "input" else {"weight": point}
        return torch.func.functional_call(fresh, given, (point if wrt == "input" else x.double(),)).flatten()

    truth = torch.autograd.functional.jacobian(outputs, at).flatten(1)
    fresh.table = None
    assert_close(found.largest.flatten(), torch.linalg.svdvals(truth)[:2], rtol=1e-6, atol=0)


def test_tied_parameters_count_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    x = torch.randn(1, 3)
    found = jacobian_spectrum(module, x, "params")
    assert found.inputs == 9
    assert_close(found.values, true_parameter_values(module, x))


# ---- real blocks


def timm_vit() -> tuple[nn.Module, Tensor]:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_heads=3, drop_path_rate=0.5
    )
    assert model.blocks[0].attn.fused_attn
    return model.blocks[0], torch.randn(2, 5, 24)


def timm_swin() -> tuple[nn.Module, Tensor]:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2,), embed_dim=8, num_heads=(2,)
    )
    return model.layers[0].blocks[1], torch.randn(1, 8, 8, 8)  # shifted windows, with their mask


def torchvision_block() -> tuple[nn.Module, Tensor]:
    from torchvision.models.vision_transformer import EncoderBlock

    return EncoderBlock(2, 16, 32, 0.1, 0.1), torch.randn(2, 5, 16)


def torch_layer() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)


def hugging_face_layer() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32
    )
    layers = (module for module in transformers.ViTModel(config).modules() if type(module).__name__ == "ViTLayer")
    return next(layers), torch.randn(2, 5, 16)  # whose place differs between versions


def hugging_face_bert() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=10
    )
    return transformers.BertModel(config).encoder.layer[0], torch.randn(2, 5, 16)


BLOCKS = [timm_vit, timm_swin, torchvision_block, torch_layer, hugging_face_layer, hugging_face_bert]


@pytest.mark.parametrize("make", BLOCKS)
def test_real_blocks(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    block, x = make()
    block.train()
    flags = [module.training for module in block.modules()]
    truth = true_values(block, x)
    exact = jacobian_spectrum(block, x)
    assert exact.method == "exact"
    assert exact.ceiling == 2**52
    assert_close(exact.values, truth, rtol=0, atol=1e-12 * float(truth.max()))
    products = jacobian_spectrum(block, x, k=3, method="lanczos")
    assert_close(products.largest, truth[:, :3])
    assert bool(products.converged.all())
    assert "by forward mode" in products.why
    assert (products.smallest >= truth[:, -3:] * (1 - 1e-9) - 1e-15).all()
    assert flags == [module.training for module in block.modules()]
    assert all(parameter.grad is None for parameter in block.parameters())


def test_parameters_of_a_real_block() -> None:
    block, x = timm_vit()
    truth = true_parameter_values(block, x[:1])
    for method in ("exact", "lanczos"):
        assert_close(jacobian_spectrum(block, x[:1], "params", 4, method=method).largest, truth[:4])


def test_the_density_of_a_real_block() -> None:
    block, x = timm_vit()
    truth = true_values(block, x[:1])[0]
    found = jacobian_spectrum(block, x[:1], method="density", probes=8, steps=24)
    assert found.density is not None
    value, error = found.density.frobenius_squared()
    assert (value - truth.square().sum()).abs().item() < 4 * error.item()
    share = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    assert_close(found.density.quantile(share)[0], torch.quantile(truth, share), rtol=5e-3, atol=0)
    assert found.largest[0, 0] <= truth[0] * (1 + 1e-12)
    assert found.smallest[0, -1] >= truth[-1] * (1 - 1e-12)
    assert found.kappa_is_lower_bound.all()


def test_the_skip_makes_the_jacobian_well_conditioned() -> None:
    block, x = timm_vit()
    branch = jacobian_spectrum(nn.Sequential(block.norm1, block.attn), x)
    whole = jacobian_spectrum(block, x)
    assert (whole.log_kappa < 1).all()
    assert (branch.log_kappa > 5).all()


def test_a_norm_takes_two_directions_from_each_token() -> None:
    """The mean for good, and the length but for the norm's eps, 1e-5."""
    norm, x = nn.LayerNorm(12), torch.randn(2, 3, 12)
    found = jacobian_spectrum(norm, x)
    assert found.status_names() == ["ceiling", "ceiling"]
    assert found.kappa.tolist() == [found.ceiling] * 2
    assert found.rank().tolist() == [3 * 11] * 2
    assert found.values is not None
    assert ((found.values / found.values[:, :1] > 1e-3).sum(-1) == 3 * 10).all()
    assert jacobian_spectrum(norm, x, k=36, method="lanczos").status_names() == ["ceiling", "ceiling"]


# ---- method, sizes, arguments


def test_auto_takes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Linear(6, 3), torch.randn(1, 2, 6)
    sizes = {72: "exact", 71: "gram", 36: "gram", 35: "lanczos"}
    truth = true_values(module, x)
    for entries, method in sizes.items():
        found = jacobian_spectrum(module, x, max_entries=entries)
        assert found.method == method
        assert "fit" in found.why
        assert_close(found.largest, truth)
        assert (found.values is None) == (method == "lanczos")
    monkeypatch.setitem(jacobian_module.MAX_ENTRIES, "cpu", 35)
    assert jacobian_spectrum(module, x).method == "lanczos"
    for method in ("exact", "gram"):
        with pytest.raises(ValueError, match="max_entries = 35"):
            jacobian_spectrum(module, x, method=method)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (1e-25, torch.float32),
        (1e-22, torch.float32),
        (1e19, torch.float32),
        (1e-200, torch.float64),
        (1e200, torch.float64),
    ],
)
def test_the_gram_matrix_has_squares_beyond_the_range_of_its_dtype(scale: float, dtype: torch.dtype) -> None:
    for shape in ((5, 8), (8, 5)):
        a = scale * torch.randn(shape, dtype=torch.float64)
        a[0] *= 1e-3
        function = functools.partial(nn.functional.linear, weight=a.to(dtype))
        found = jacobian_spectrum(function, torch.randn(1, shape[1]), k=5, method="gram", dtype=dtype)
        truth = torch.linalg.svdvals(a / scale) * scale  # LAPACK's own range ends near 1e±150
        assert found.status_names() == ["ok"]
        assert ((found.values[0] - truth).abs() <= found.largest_error[0]).all()
        assert_close(found.largest[0, :2], truth[:2], rtol=1e-6, atol=0)


def test_the_gram_matrix_knows_what_it_cannot_see() -> None:
    sigma = torch.tensor([1.0, 1e-3, 1e-9], dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    found = jacobian_spectrum(lambda x: x @ (q * sigma), torch.randn(1, 3), k=3, method="gram")
    assert found.kappa_is_lower_bound.all()
    assert (found.smallest[0] >= sigma).all()
    assert found.kappa.item() <= 1e9
    assert found.smallest_error[0, -1] == math.inf
    error = (found.values[0] - sigma).abs()
    assert (error[:2] <= found.largest_error[0, :2]).all()
    exact = jacobian_spectrum(lambda x: x @ (q * sigma), torch.randn(1, 3))
    assert not exact.kappa_is_lower_bound.any()
    assert_close(exact.kappa, torch.tensor([1e9], dtype=torch.float64), rtol=1e-5, atol=0)


def test_an_unfinished_lanczos_says_that_kappa_is_a_lower_bound() -> None:
    module, x = Attention(10, 10, skip=False), torch.randn(1, 6, 10)
    truth = true_values(module, x)[0]
    found = jacobian_spectrum(module, x, k=2, method="lanczos", steps=12)
    assert found.kappa_is_lower_bound.all()
    assert found.kappa.item() <= (truth[0] / truth[-1]).item() * (1 + 1e-9)
    assert found.smallest_error.isinf().all()
    assert not found.converged.any()
    assert found.largest_error.isinf().all()
    assert ((found.largest[0, :, None] - truth).abs().amin(1) <= found.largest_residual[0]).all()
    whole = jacobian_spectrum(module, x, k=60, method="lanczos")
    assert not whole.kappa_is_lower_bound.any()
    assert_close(whole.smallest[0], truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_equal_values_of_a_layer_by_lanczos(seed: int) -> None:
    sigma = torch.cat([torch.full((8,), 2.0), torch.linspace(1, 0, 92)]).double()
    found = jacobian_spectrum(lambda x: x * sigma, torch.randn(1, 100), k=8, method="lanczos", seed=seed)
    assert found.converged.all()
    assert ((found.largest[0] - sigma[:8]).abs() <= found.largest_error[0]).all()
    assert found.largest_error.max() <= 1e-7


def test_samples_do_not_see_their_mates() -> None:
    module = Attention(5, 5, skip=True)
    x = torch.randn(3, 4, 5)
    alone = [jacobian_spectrum(module, x[i : i + 1]).values for i in range(3)]
    x[1] = math.nan
    found = jacobian_spectrum(module, x)
    assert found.status_names() == ["ok", "non_finite", "ok"]
    assert torch.equal(found.values[0], alone[0][0])
    assert torch.equal(found.values[2], alone[2][0])


def test_batch_statistics_are_those_of_training_only_if_asked() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    x = torch.randn(3, 4)
    found = jacobian_spectrum(module, x, "params")
    assert_close(found.values, true_parameter_values(module, x))
    other = jacobian_spectrum(module, x, "params", eval_mode=False)
    assert not torch.allclose(other.values, found.values)
    assert module[1].num_batches_tracked == 0


def test_more_arguments_and_functions() -> None:
    block, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    y = torch.randn(1, 5, 8)
    found = jacobian_spectrum(block, x, args=(y,), kwargs={"value": y, "need_weights": False})
    truth = true_values(block, x, key=y.double(), value=y.double(), need_weights=False)
    assert_close(found.values, truth, rtol=0, atol=1e-12)
    squares = jacobian_spectrum(lambda x: x**2, x)
    assert_close(squares.values, (2 * x.double()).abs().flatten(1).sort(descending=True).values)


def test_methods_of_models() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=3, num_classes=0)
    found = jacobian_spectrum(model.forward_features, torch.randn(1, 3, 32, 32), k=2, method="lanczos", steps=10)
    assert (found.outputs, found.inputs) == (5 * 12, 3 * 32 * 32)


def test_float32_has_a_lower_ceiling() -> None:
    module, x = Attention(5, 5, skip=True), torch.randn(1, 4, 5)
    found = jacobian_spectrum(module, x, dtype=torch.float32)
    assert found.ceiling == 2**23
    assert_close(found.values, true_values(module, x), rtol=1e-5, atol=1e-6)
    assert found.status_names() == ["ok"]
    products = jacobian_spectrum(module, x, dtype=torch.float32, method="lanczos", k=2)
    assert products.converged.all()
    inside = jacobian_spectrum(lambda x: x.float() * 3, x)
    assert inside.ceiling == 2**23
    assert "coarser dtype" in inside.why


class SquareBesides(torch.autograd.Function):
    """x² and a second output that has no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        besides = x.abs()
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(besides)
        return x * x, besides

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_outputs_without_a_derivative_do_not_lower_the_ceiling() -> None:
    """As graying by `svd` has them, and torch calls them float32."""
    layer = torch.diag(torch.logspace(0, -8, 64, dtype=torch.float64))
    graying = {method: TokenGraying(method, 1.0, patch_size=4) for method in ("svd", "dct")}
    blocks: list[Callable[[Tensor], Tensor]] = [
        *(
            lambda x, identity=identity: identity(x.view(1, 1, 8, 8)).flatten(1) @ layer
            for identity in graying.values()
        ),
        lambda x: SquareBesides.apply(x)[0] @ layer,  # pyright: ignore[reportOptionalSubscript]
    ]
    for block in blocks:
        found = jacobian_spectrum(block, 0.5 + torch.rand(1, 64))
        assert found.ceiling == 2**52
        assert found.rank().tolist() == [64]
        assert found.status_names() == ["ok"]
    halves = jacobian_spectrum(lambda x: x.float().split(2, -1)[1].double(), torch.rand(1, 4))
    assert halves.ceiling == 2**23  # a second output that counts


def test_half_precision_input_and_weights() -> None:
    module, x = Attention(5, 5, skip=True).bfloat16(), torch.randn(1, 4, 5).bfloat16()
    assert_close(jacobian_spectrum(module, x).values, true_values(module, x))


def test_seeds() -> None:
    module, x = Attention(8, 8, skip=False), torch.randn(1, 5, 8)
    state = torch.get_rng_state()
    for method in ("lanczos", "density"):
        first, again, other = (
            jacobian_spectrum(module, x, k=2, method=method, steps=8, seed=seed) for seed in (0, 0, 1)
        )
        assert torch.equal(first.smallest, again.smallest)
        assert not torch.equal(first.smallest, other.smallest)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what is not there, and bad input


@pytest.mark.parametrize("method", ["exact", "gram", "lanczos", "density"])
def test_zero_and_not_finite(method: str) -> None:
    x = torch.randn(2, 3, 4)
    zero = jacobian_spectrum(lambda x: x * 0, x, method=method)
    assert zero.status_names() == ["zero", "zero"]
    assert zero.kappa.isnan().all()
    assert (zero.largest == 0).all()
    assert not zero.kappa_is_lower_bound.any()
    for bad in (lambda x: x / 0, lambda x: (x * 0).sqrt(), lambda x: x + math.nan):
        found = jacobian_spectrum(bad, x, method=method)
        assert found.status_names() == ["non_finite", "non_finite"]
        assert found.kappa.isnan().all()
        assert found.largest.isnan().all()
        assert not found.converged.any()


def test_one_value() -> None:
    found = jacobian_spectrum(lambda x: 3 * x, torch.ones(1, 1))
    assert found.values.tolist() == [[3.0]]
    assert found.kappa.tolist() == [1.0]


BAD = [
    ({"x": torch.ones(2, 3, dtype=torch.long)}, "token ids"),
    ({"x": [1.0]}, "got list"),
    ({"x": torch.ones(3)}, r"x\[None\]"),
    ({"x": torch.ones(0, 3)}, "nothing empty"),
    ({"wrt": "weights"}, "'input' or 'params'"),
    ({"method": "svd"}, "the methods are"),
    ({"dtype": torch.float16}, "too coarse"),
    ({"k": 0}, "k must be a whole number from 1 on"),
    ({"k": 2.5}, "k must be a whole number from 1 on, got 2.5"),
    ({"k": 5}, "from 1 to 4, for this Jacobian is 4 × 5"),
    ({"max_entries": 0}, "max_entries must be a whole number from 1 on"),
    ({"tolerance": -1}, "tolerance must be a number from 0 on"),
    ({"tolerance": math.nan}, "tolerance must be a number from 0 on, .* got nan"),
    ({"k": 3, "steps": 2, "method": "lanczos"}, "at least k"),
    ({"steps": 0}, "steps must be a whole number from 1 on"),
    ({"steps": 7.5, "method": "lanczos"}, "steps must be a whole number from 1 on, got 7.5"),
    ({"probes": 0, "method": "density"}, "probes must be a whole number from 1 on"),
    ({"args": torch.ones(1, 5)}, r"give args=\(tensor,\)"),
    ({"block": lambda x: x, "wrt": "params"}, "no parameters of its own"),
    ({"block": nn.ReLU(), "wrt": "params"}, "requires a gradient"),
    ({"block": nn.Linear(5, 4).requires_grad_(False), "wrt": "params"}, "requires a gradient"),
    ({"block": lambda x: None}, "not a tensor"),
    ({"block": lambda x: x.argmax(-1)}, "no derivative"),
    ({"block": lambda x: x.detach()}, "does not depend"),
    ({"block": lambda x: x @ torch.ones(5, 5)}, "does not run in torch.float64"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jacobian_spectrum(**({"block": nn.Linear(5, 4), "x": torch.randn(1, 5)} | change))


def test_not_all_values_no_rank() -> None:
    with pytest.raises(ValueError, match="'exact' or 'gram'"):
        jacobian_spectrum(nn.Linear(5, 4), torch.randn(1, 5), method="lanczos").rank()


def test_it_is_a_public_name() -> None:
    assert wellcond.jacobian_spectrum is jacobian_spectrum


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    block, x = timm_vit()
    truth = true_values(block, x)
    found = jacobian_spectrum(block.cuda(), x.cuda(), k=3, method="lanczos")
    assert found.largest.is_cuda
    assert_close(found.largest.cpu(), truth[:, :3])
    assert_close(jacobian_spectrum(block, x.cuda()).values.cpu(), truth, rtol=0, atol=1e-10)
