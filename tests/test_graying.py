"""Token Graying against the two algorithms written out in float64, and what it does with images of every kind."""

import math
import sys

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from wellcond import TokenGraying, gray_tokens
from wellcond.graying import explain_graying
from wellcond.numerics import fastpaths
from wellcond.numerics.dct import dct2
from wellcond.numerics.fused import tokens_of, untokens
from wellcond.numerics.trust import trusted_input

METHODS = ["svd", "dct"]
BATCH = torch.export.Dim("batch", max=64)


def algorithm(x, method, epsilon=0.95, restore_scale=True):
    """Algorithms 1 and 2 of Always Skip Attention on one matrix (n, d), in NumPy."""
    x = x.detach().double().numpy()
    if method == "svd":
        u, s, vh = np.linalg.svd(x, full_matrices=False)
        return torch.from_numpy((u * (s / s[0]) ** epsilon) @ vh * (s[0] if restore_scale else 1))
    c = scipy.fft.dctn(x, norm="ortho")
    peak = np.abs(c).max()
    grown = np.sign(c) * (np.abs(c) / peak) ** epsilon * (peak if restore_scale else 1)
    return torch.from_numpy(scipy.fft.idctn(grown, norm="ortho"))


def by_hand(images, method, patch, epsilon=0.95, restore_scale=True):
    """Patch by patch, with loops."""
    ph, pw = patch
    out = torch.empty(images.shape, dtype=torch.float64)
    for b, image in enumerate(images):
        corners = [(i, j) for i in range(0, image.shape[1], ph) for j in range(0, image.shape[2], pw)]
        tokens = torch.stack([image[:, i : i + ph, j : j + pw].flatten() for i, j in corners])
        for (i, j), token in zip(corners, algorithm(tokens, method, epsilon, restore_scale), strict=True):
            out[b, :, i : i + ph, j : j + pw] = token.reshape(-1, ph, pw)
    return out


def relative(got, want):
    return ((got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max().item()


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20)
@given(
    n=st.integers(1, 16),
    d=st.integers(1, 16),
    epsilon=st.sampled_from([0.5, 0.95]),
    restore_scale=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_gray_tokens_is_the_algorithm(method, n, d, epsilon, restore_scale, dtype, seed):
    x = torch.randn(2, 2, n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    got = gray_tokens(x, method, epsilon=epsilon, restore_scale=restore_scale)
    assert (got.shape, got.dtype) == (x.shape, dtype)
    want = torch.stack([algorithm(m, method, epsilon, restore_scale) for m in x.flatten(0, 1)])
    assert relative(got.flatten(0, 1), want) < (1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "patch"),
    [((2, 3, 16, 16), 4), ((1, 3, 32, 48), 16), ((2, 1, 6, 20), (3, 5)), ((1, 4, 8, 8), (8, 8)), ((1, 2, 3, 5), 1)],
)
def test_images_are_grayed_patch_by_patch(method, shape, patch):
    images = torch.randn(shape)
    got = TokenGraying(method, 0.9, patch)(images)
    assert (got.shape, got.dtype) == (images.shape, images.dtype)
    pair = (patch, patch) if isinstance(patch, int) else patch
    assert relative(got, by_hand(images, method, pair, 0.9)) < 1e-5
    printed = TokenGraying(method, 0.9, patch, restore_scale=False)(images)
    assert relative(printed, by_hand(images, method, pair, 0.9, restore_scale=False)) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_the_order_within_a_token_is_that_of_a_convolutions_weight(method):
    """So the model's own embedding of grayed images is that embedding of grayed tokens."""
    embed = nn.Conv2d(3, 10, kernel_size=(4, 8), stride=(4, 8))
    images = torch.randn(2, 3, 16, 24)
    tokens = tokens_of(images, 4, 8)
    torch.testing.assert_close(tokens @ embed.weight.flatten(1).T + embed.bias, embed(images).flatten(2).mT)
    grayed = gray_tokens(tokens, method, epsilon=0.9) @ embed.weight.flatten(1).T + embed.bias
    torch.testing.assert_close(
        grayed, embed(TokenGraying(method, 0.9, (4, 8))(images)).flatten(2).mT, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("patch", [16, 4])
@pytest.mark.parametrize("epsilon", [0.5, 0.95])
def test_photographs_come_out_with_the_power_of_their_condition_number(photographs, device, patch, epsilon):
    images = photographs.to(device)
    before = torch.linalg.svdvals(tokens_of(images, patch, patch).double())
    after = torch.linalg.svdvals(tokens_of(TokenGraying("svd", epsilon, patch)(images), patch, patch).double())
    kappa, kappa_before = after[:, 0] / after[:, -1], before[:, 0] / before[:, -1]
    assert (kappa / kappa_before**epsilon - 1).abs().max() < 0.02
    assert (after[:, 0] / before[:, 0] - 1).abs().max() < 1e-3
    milder = torch.linalg.svdvals(tokens_of(TokenGraying("dct", epsilon, patch)(images), patch, patch).double())
    assert (milder[:, 0] / milder[:, -1] < kappa_before).all()  # dct lowers it too, by how much is the image's affair


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "level"), [(torch.bfloat16, 2e-3), (torch.float16, 3e-4)])
def test_low_precision_costs_no_more_than_rounding_the_result(photographs, device, method, dtype, level):
    """Rounding a result to its dtype is an error of about eps/5, and nothing before it counts, but the kernels' own."""
    images = photographs[:2].to(device, dtype)
    got = TokenGraying(method, 0.95, 16)(images)
    assert got.dtype == dtype
    assert relative(got.cpu(), by_hand(images.cpu(), method, (16, 16))) < (level if device == "cpu" else level + 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dct_follows_autocast_where_it_is_told_to(dtype, device):
    images, patch = torch.randn(4, 3, 16, 16, device=device), (4, 4)
    naive, truth = TokenGraying("dct", 0.95, patch, autocast=True), by_hand(images.cpu(), "dct", patch)
    assert relative(naive(images).cpu(), truth) < 1e-5  # without autocast it has nothing to follow
    with torch.autocast(device, dtype):
        eager, double = naive(images), naive(images.double())
        backend = "inductor" if device == "cuda" else "aot_eager"  # which needs no C++ compiler, and no time
        compiled = torch.compile(naive, fullgraph=True, backend=backend)(images)
    assert (eager.dtype, double.dtype) == (torch.float32, torch.float64)
    eps = torch.finfo(dtype).eps
    assert 0.2 * eps < relative(eager.cpu(), truth) < 10 * eps
    assert relative(double.cpu(), truth) < 1e-9
    torch.testing.assert_close(compiled, eager, rtol=0, atol=8 * eps)
    assert "autocast=True" in repr(naive)
    assert naive(torch.zeros(1, 3, 8, 8)).eq(0).all()
    with pytest.raises(ValueError, match="hold a NaN"):
        naive(torch.full((1, 3, 8, 8), torch.nan))
    with pytest.raises(ValueError, match="autocast=True is for the DCT"):
        TokenGraying("svd", autocast=True)


@pytest.mark.parametrize("method", METHODS)
def test_autocast_changes_nothing(method, device):
    images = torch.randn(2, 3, 16, 16, device=device)
    graying = TokenGraying(method, 0.95, 4)
    with torch.autocast(device, torch.bfloat16):
        under, tokens = graying(images), gray_tokens(images[:, 0], method)
    assert under.dtype == torch.float32
    assert torch.equal(under, graying(images))
    assert torch.equal(tokens, gray_tokens(images[:, 0], method))


@pytest.mark.parametrize("method", METHODS)
def test_the_layout_of_the_images_does_not_matter(method, device):
    images = torch.randn(2, 3, 12, 16, device=device)
    graying = TokenGraying(method, 0.95, 4)
    plain = graying(images)
    torch.testing.assert_close(graying(images.to(memory_format=torch.channels_last)), plain)
    torch.testing.assert_close(graying(images.mT.contiguous().mT), plain)
    torch.testing.assert_close(graying(torch.stack([images, images], -1)[..., 1]), plain)
    torch.testing.assert_close(graying(images[:1].expand(3, -1, -1, -1)), plain[:1].expand(3, -1, -1, -1))


@pytest.mark.parametrize("method", METHODS)
def test_an_image_does_not_see_its_batch(method, device):
    images = (
        torch.randn(3, 3, 16, 16, device=device) * torch.tensor([1e-3, 1.0, 1e3], device=device)[:, None, None, None]
    )
    images[1] = 0
    graying = TokenGraying(method, 0.95, 4)
    together = graying(images)
    assert (together[1] == 0).all()
    for i in range(3):
        torch.testing.assert_close(graying(images[i : i + 1])[0], together[i], rtol=1e-6, atol=0)
    assert graying(images[:0]).shape == (0, 3, 16, 16)


@pytest.mark.parametrize("method", METHODS)
def test_epsilon_one_changes_nothing(method, device):
    images = torch.randn(2, 3, 8, 8, device=device)
    got = TokenGraying(method, 1.0, 4)(images)
    assert relative(got.cpu(), images.cpu().double()) < (1e-6 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_reach_the_images(method):
    images = torch.randn(1, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(TokenGraying(method, 0.7, 2), (images,))
    flat = torch.ones(1, 3, 8, 8, requires_grad=True)  # one singular value, one coefficient, the rest zero
    TokenGraying(method, 0.5, 4)(flat).square().sum().backward()
    assert flat.grad.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_raises_and_says_where_to_look(method):
    images = torch.randn(3, 3, 8, 8)
    images[1, 2, 0, 0] = torch.nan
    images[2, 0, 0, 0] = -torch.inf
    with pytest.raises(ValueError, match=r"2 of 3 .*NaN or Inf.*bad images"):
        TokenGraying(method, 0.95, 4)(images)
    with pytest.raises(ValueError, match=r"2 of 9 .*NaN or Inf"):
        gray_tokens(images, method)


@pytest.mark.parametrize("method", METHODS)
def test_one_graph_under_compile_with_its_gradient_and_a_nan_that_stays_in_its_image(method, device):
    images = torch.randn(3, 3, 8, 8, device=device, requires_grad=True)
    graying = TokenGraying(method, 0.95, 4)
    graph = torch.compile(graying, fullgraph=True)
    got, eager = graph(images), graying(images)
    torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), images)[0] for y in (got, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        images[1, 0, 3, 3] = torch.nan
    got = graph(images)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2]], eager[[0, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_exported_with_any_batch_size(method):
    images = torch.randn(2, 3, 8, 12)
    graying = TokenGraying(method, 0.95, 4)
    exported = torch.export.export(graying, (images,), dynamic_shapes={"images": {0: BATCH}}).module()
    for batch in (1, 2, 5):
        images = torch.randn(batch, 3, 8, 12)
        assert relative(exported(images), by_hand(images, method, (4, 4))) < 1e-3
    images[1, 0, 0, 0] = torch.nan
    got = exported(images)
    assert got[1].isnan().all()
    assert got[[0, 2, 3, 4]].isfinite().all()


ONES = torch.ones(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gray_tokens(torch.ones(2, 2), "fft"), ("'fft'", "svd", "dct")),
        (lambda: TokenGraying("SVD"), ("'SVD'", "svd")),
        (lambda: gray_tokens(torch.ones(2, 2), "svd", epsilon=0), ("epsilon=0", "(0, 1]")),
        (lambda: gray_tokens(torch.ones(2, 2), "dct", epsilon=1.01), ("epsilon=1.01",)),
        (lambda: TokenGraying("dct", math.nan), ("epsilon=nan",)),
        (lambda: TokenGraying("dct", -1.0), ("epsilon=-1.0",)),
        (lambda: gray_tokens(torch.ones(3), "dct"), ("(…, n, d)", "(3,)")),
        (lambda: gray_tokens(torch.ones(3, 0), "dct"), ("empty", "(3, 0)")),
        (lambda: gray_tokens(torch.ones(3, 3, dtype=torch.int64), "dct"), ("int64", "x.float()")),
        (lambda: TokenGraying("svd", 0.95, 4)(ONES.byte()), ("uint8", "x.float()")),
        (lambda: TokenGraying("svd", 0.95, 4)(ONES[0]), ("(batch, channels, height, width)", "(3, 8, 8)")),
        (lambda: TokenGraying("dct", 0.95, 16)(ONES), ("8 × 8", "16 × 16", "resize", "patch_size")),
        (lambda: TokenGraying("dct", 0.95, (8, 3))(ONES), ("8 × 8", "8 × 3")),
        (lambda: TokenGraying("dct", 0.95, 4)(ONES[:, :, :0]), ("0 × 8",)),
        (lambda: TokenGraying("dct", 0.95, 4)(ONES[:, :0]), ("empty",)),
        *[
            (
                lambda patch=patch: TokenGraying("dct", 0.95, patch),
                (f"patch_size={patch!r}", "positive integer", "pair"),
            )
            for patch in (0, -4, 4.0, (4,), (4, 0), (4, 4, 4), (4, 2.5), "16", None)
        ],
    ],
)
def test_errors_name_the_mistake_and_the_way_out(call, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        call()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("patch", [4, (4, 4), [4, 4], np.int64(4), torch.Size([4, 4])])
def test_a_patch_size_is_an_integer_or_a_pair_of_any_kind(patch):
    graying = TokenGraying("dct", 0.95, patch)
    assert graying.patch_size == (4, 4)
    assert graying.token_shape((2, 3, 8, 12)) == (6, 48)
    assert repr(graying) == "TokenGraying('dct', epsilon=0.95, patch_size=(4, 4))"
    assert "restore_scale=False" in repr(TokenGraying("svd", restore_scale=False))
    assert not list(graying.state_dict())


@pytest.mark.parametrize(
    ("method", "dtype", "kind", "path"),
    [
        ("dct", torch.float32, "cpu", "basis"),
        ("dct", torch.float64, "cpu", "basis"),
        ("svd", torch.float32, "cpu", "eigh"),
        ("svd", torch.float64, "cpu", "svd"),
        pytest.param("dct", torch.float32, "cuda", "fused", marks=pytest.mark.gpu),
        pytest.param("svd", torch.bfloat16, "cuda", "fused", marks=pytest.mark.gpu),
        pytest.param("dct", torch.float64, "cuda", "basis", marks=pytest.mark.gpu),
    ],
)
def test_graying_says_which_path_it_takes_and_why(method, dtype, kind, path):
    said, why = explain_graying(method, (196, 768), dtype, torch.device(kind), 0.95)
    assert said == path
    assert len(why.split()) >= 3


def test_half_precision_kernels_are_not_taken_where_they_would_err():
    said, why = explain_graying("dct", (196, 768), torch.float32, torch.device("cuda"), 0.5)
    assert said == "basis"
    assert "DCT basis" in why


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("epsilon", [0.5, 0.89, 0.9, 0.95])
def test_the_precision_that_graying_says_is_the_one_it_computes_in(monkeypatch, kernels, epsilon):
    monkeypatch.setattr("wellcond.graying.fused_kernels", lambda device: kernels)
    path, why = explain_graying("dct", (16, 12), torch.float32, torch.device("cpu"), epsilon)
    assert path == ("fused" if kernels and epsilon >= 0.9 else "basis")
    if path == "basis":
        seen = []
        monkeypatch.setattr(sys.modules[dct2.__module__], "dct2", lambda x: seen.append(str(x.dtype)) or dct2(x))
        gray_tokens(torch.rand(1, 16, 12), "dct", epsilon=epsilon)
        assert [f"torch.{why.split()[0]}"] == seen


def test_tokens_go_back_where_they_came_from():
    images = torch.arange(2 * 3 * 8 * 12).reshape(2, 3, 8, 12).float()
    assert torch.equal(untokens(tokens_of(images, 2, 3), images.shape, 2, 3), images)


@pytest.mark.parametrize(
    ("method", "operator"), [("dct", "wellcond.gray_dct.default"), ("svd", "wellcond.spectral_power.default")]
)
def test_a_compiled_module_takes_the_fused_operator_where_there_are_kernels(monkeypatch, method, operator):
    """Seen in the graph, so that it needs no GPU. Torch 2.11 takes every compilation for an export."""
    monkeypatch.setattr(fastpaths, "_available", lambda kind, index: (True, "for this test"))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *arguments: (images,)  # the kernels themselves are tested elsewhere

    images = torch.randn(2, 3, 16, 16)
    torch.compiler.reset()
    for epsilon in (0.95, 0.92):  # a second module must not turn epsilon into a variable
        torch.compile(TokenGraying(method, epsilon, 8), fullgraph=True, backend=keep)(images)
    torch.compiler.reset()
    for graph in graphs:
        assert [str(node.target) for node in graph.graph.nodes if "wellcond" in str(node.target)] == [operator]
    assert len(graphs) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("padded", [60, 2048])
def test_padding_changes_nothing(method, dtype, padded):
    """Not even the smallest singular values, which in float32 are just above the floor of the matrix alone."""
    counts, d, side = (40, 5, 0), 24, 5.5 if dtype == torch.float32 else 11
    x, keep = torch.randn(3, padded, d, dtype=dtype), torch.zeros(3, padded, dtype=torch.bool)
    for matrix, kept, count in zip(x, keep, counts, strict=True):
        kept[torch.randperm(padded)[:count]] = True
        if count:
            u, _, vh = torch.linalg.svd(torch.randn(count, d, dtype=torch.float64), full_matrices=False)
            matrix[kept] = (u * torch.logspace(0, -side, len(vh), dtype=torch.float64) @ vh).to(dtype)
    x.requires_grad_()
    got = gray_tokens(x, method, epsilon=0.5, keep=keep)
    got.square().sum().backward()
    assert (got[~keep] == 0).all()
    assert (x.grad[~keep] == 0).all()
    for i in range(2):
        alone = x[i, keep[i]].detach().requires_grad_()
        want = gray_tokens(alone, method, epsilon=0.5)
        want.square().sum().backward()
        with torch.no_grad():
            assert (got[i, keep[i]] - want).abs().max() < 1e-5 * want.abs().max()
            assert (x.grad[i, keep[i]] - alone.grad).abs().max() < 1e-5 * alone.grad.abs().max()
            values = torch.linalg.svdvals(got[i, keep[i]].double()), torch.linalg.svdvals(want.double())
        torch.testing.assert_close(*values, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_each_sample(method, dtype):
    images, weight = torch.randn(3, 3, 8, 12, dtype=dtype), torch.randn(3, 8, 12, dtype=dtype)
    graying = TokenGraying(method, 0.8, 4)

    def loss(image):
        return (graying(image[None])[0] * weight).square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(images)
    leaves = images.clone().requires_grad_()
    (alone,) = torch.autograd.grad(sum(map(loss, leaves)), leaves)
    torch.testing.assert_close(together, alone)
    batched = torch.func.vmap(lambda image: graying(image[None])[0])(images)
    torch.testing.assert_close(batched, graying(images))


@pytest.mark.parametrize("method", METHODS)
def test_tensors_without_values_are_not_looked_at(method):
    images, graying = torch.randn(2, 3, 8, 12), TokenGraying(method, 0.95, 4)
    assert graying(images.to("meta")).shape == images.shape
    with FakeTensorMode() as mode:
        assert graying(mode.from_tensor(images)).shape == images.shape
    traced = make_fx(graying)(images)
    other = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(traced(other), graying(other))


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_trusted_input_is_not_looked_at(method):
    x = torch.randn(2, 5, 7)
    x[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="hold a NaN or Inf"):
        gray_tokens(x, method)
    with trusted_input():
        grayed = gray_tokens(x, method)
    assert grayed[0].isnan().any()
    torch.testing.assert_close(grayed[1], gray_tokens(x[1], method))
    with pytest.raises(ValueError, match="hold a NaN or Inf"):
        gray_tokens(x, method)
