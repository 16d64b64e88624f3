import pytest
import torch

from wellcond.theory import draws


@pytest.mark.parametrize("kind", draws.WEIGHTS)
def test_weights_have_zero_mean_and_the_variance_that_is_said(kind):
    w = draws.weights(kind, 400, 16, 8, draws.generator(0, kind))
    assert w.shape == (400, 16, 8)
    assert abs(float(w.mean())) < 5 * 0.25 / w.numel() ** 0.5
    assert float(w.square().mean()) == pytest.approx(1 / 16, rel=0.03)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (9, 4), (4, 9)])
def test_orthogonal_weights_are(rows, columns):
    w = draws.weights("orthogonal", 5, rows, columns, draws.generator(0))
    gram = w.mT @ w if rows >= columns else w @ w.mT
    torch.testing.assert_close(gram, torch.eye(min(rows, columns)).double().expand_as(gram))


def test_unknown_weights():
    with pytest.raises(ValueError, match="gaussian, uniform, orthogonal"):
        draws.weights("cauchy", 1, 2, 2, draws.generator(0))


def test_streams_depend_on_their_names_alone():
    first = torch.rand(3, generator=draws.generator(1, "a", 2))
    assert torch.equal(first, torch.rand(3, generator=draws.generator(1, "a", 2)))
    assert not torch.equal(first, torch.rand(3, generator=draws.generator(1, "b", 2)))
    assert not torch.equal(first, torch.rand(3, generator=draws.generator(2, "a", 2)))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_is_what_loops_over_heads_give(heads):
    source = draws.generator(0)
    x, (wq, wk, wv) = draws.tokens(3, 5, 8, source), [draws.weights("gaussian", 3, 8, 8, source) for _ in range(3)]
    p = 8 // heads
    linear, soft = [], []
    for h in range(heads):
        part = slice(h * p, (h + 1) * p)
        q, k, v = x @ wq[..., part], x @ wk[..., part], x @ wv[..., part]
        linear.append(q @ k.mT @ v)
        soft.append(torch.nn.functional.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(draws.linear_attention(x, wq, wk, wv, heads=heads), torch.cat(linear, -1))
    torch.testing.assert_close(draws.softmax_attention(x, wq, wk, wv, heads=heads), torch.cat(soft, -1))


def test_kappa_at_a_rank_is_that_of_the_pseudo_inverse():
    a = draws.tokens(4, 7, 3, draws.generator(0)) @ draws.tokens(4, 3, 6, draws.generator(1))
    expected = torch.linalg.matrix_norm(a, 2) * torch.linalg.matrix_norm(torch.linalg.pinv(a, rtol=1e-10), 2)
    torch.testing.assert_close(draws.kappa_at_rank(a, 3), expected)
