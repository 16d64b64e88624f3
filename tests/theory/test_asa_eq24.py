import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory import asa_eq24
from wellcond.theory.draws import generator, kappa, tokens


@pytest.fixture(scope="module")
def cases():
    """By name; seed and number of draws are this file's own."""
    return {case.name: case for case in asa_eq24.cases(70, seed=1)}


def test_the_matrices_do_what_torchs_depthwise_convolution_does():
    kernels = torch.randn(3, 5, 3, 3, dtype=torch.float64)
    x = torch.randn(3, 16, 5, dtype=torch.float64)
    out = asa_eq24.depthwise(x, asa_eq24.convolution_matrices(kernels, side=4))
    for image, kernel, expected in zip(x, kernels, out, strict=True):
        picture = image.mT.reshape(1, 5, 4, 4)
        found = torch.nn.functional.conv2d(picture, kernel[:, None], padding=1, groups=5)
        torch.testing.assert_close(found.reshape(5, 16).mT, expected)


@pytest.mark.parametrize("n", [5, 6])
def test_all_pass_matrices_are_orthogonal_circulants(n):
    t = asa_eq24.all_pass_matrices(2, 3, n, generator(0))
    torch.testing.assert_close(t @ t.mT, torch.eye(n).double().expand_as(t))
    torch.testing.assert_close(t.roll((1, 1), (-2, -1)), t)
    still = asa_eq24.all_pass_matrices(2, 3, n, generator(0), spread=0.0)
    torch.testing.assert_close(still, torch.eye(n).double().expand_as(still))


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 3), st.integers(0, 2**31))
def test_one_kernel_for_all_channels_obeys_it(matrix, n, h, log_kappa, seed):
    x, t = matrix(n, h, 1.0, seed)[None], matrix(n, n, log_kappa, seed + 1)
    shared = t.expand(1, h, n, n)
    assert bool(kappa(asa_eq24.depthwise(x, shared)) <= asa_eq24.bound_of(x, shared) * (1 + 1e-6))


@given(st.integers(2, 6), st.integers(1, 6), st.floats(1e-4, 0.05), st.integers(0, 2**31))
def test_kernels_close_to_each_other_do_little_harm(matrix, n, h, spread, seed):
    x = matrix(n, h, 0.5, seed)[None]
    t = asa_eq24.all_pass_matrices(1, h, n, generator(seed), spread)
    known, usable = asa_eq24._near_bound(x, t)
    if bool(usable):
        assert bool(kappa(asa_eq24.depthwise(x, t)) <= known * (1 + 1e-9))


def test_the_example_makes_two_channels_equal():
    for example in asa_eq24.examples():
        out = torch.tensor(example.matrices["output"])
        assert torch.equal(out[:, 0], out[:, 1])
        assert (example.bound, example.measured) == (pytest.approx(1), math.inf)


def test_the_zero_padded_example_is_torchs_convolution():
    kernels = torch.zeros(2, 1, 3, 3, dtype=torch.float64)
    kernels[0, 0, 1, 1] = kernels[1, 0, 1, 0] = kernels[1, 0, 1, 2] = 1
    _, example = asa_eq24.examples()
    picture = torch.tensor(example.matrices["X"]).double().mT.reshape(1, 2, 2, 2)
    out = torch.nn.functional.conv2d(picture, kernels, padding=1, groups=2)
    torch.testing.assert_close(out.reshape(2, 4).mT, torch.tensor(example.matrices["output"]).double())


def test_zero_padded_swaps_are_permutations():
    t = asa_eq24.convolution_matrices(asa_eq24.swapping_kernels(40, 3, generator(0)), 2)
    torch.testing.assert_close(t @ t.mT, torch.eye(4).double().expand_as(t))
    assert len(t.flatten(0, 1).unique(dim=0)) == 4


def test_the_bound_is_that_of_the_flattened_convolution():
    x, t = tokens(1, 4, 3, generator(0)), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    expected = kappa(torch.block_diag(*t[0])) * kappa(x[0])
    torch.testing.assert_close(asa_eq24.bound_of(x, t)[0], expected)


def test_separate_kernels_break_it_and_a_shared_one_does_not(cases):
    for h in asa_eq24.CHANNELS:
        broken = cases[f"all-pass kernels, orthonormal X, {h} channels"]
        assert broken.failures == broken.draws
    for h in asa_eq24.SMALL:
        assert cases[f"zero-padded swaps, 2 × 2 places, orthonormal X, {h} channels"].failures > 35
        assert cases[f"gaussian kernels, 2 × 2 places, {h} channels"].failures > 0
    assert [case.name for case in cases.values() if case.part == "instead" and case.failures] == []
