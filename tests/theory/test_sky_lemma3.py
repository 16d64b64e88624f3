import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory import sky_lemma3
from wellcond.theory.draws import generator


@given(st.integers(1, 24), st.floats(0.05, 3), st.floats(1e-4, 10), st.integers(0, 2**31))
def test_the_spectrum_ends_at_one_exactly_and_stays_above_gamma(d, spread, gamma, seed):
    m = sky_lemma3.sampled_kernel(1, d, spread, generator(seed))[0]
    n = sky_lemma3.normalized(m, gamma)
    values = torch.linalg.eigvalsh(n)
    largest = m.sum(-1).max() + gamma
    assert float(values[-1]) == pytest.approx(1, abs=1e-12)
    assert float(values[0]) >= float(gamma / largest) * (1 - 1e-9) - 1e-14
    assert float(torch.linalg.matrix_norm(torch.eye(d).double() - n, 2)) < 1
    top = (m.sum(-1) + gamma).sqrt()  # the eigenvector that the lemma overlooks
    torch.testing.assert_close(n @ top, top)


def test_landmarks_are_rows_of_one_kernel():
    m = sky_lemma3.sampled_kernel(3, 40, 0.5, generator(0)) * 40
    torch.testing.assert_close(m, m.mT)
    assert float(m.max()) == 1.0
    assert float(torch.linalg.eigvalsh(m).min()) > -1e-9
    assert bool((m > 0).all())


def test_a_singular_matrix_converges_from_its_transpose_and_not_from_the_identity():
    n = sky_lemma3.normalized(torch.ones(2, 2).double(), 0.0)
    from_i, from_n = torch.eye(2).double(), n / 1.5
    for _ in range(8):
        from_i, from_n = (z @ (13 * torch.eye(2) - n @ z @ (15 * torch.eye(2) - n @ z @ (7 * torch.eye(2) - n @ z))) / 4
                          for z in (from_i, from_n))  # fmt: skip
    torch.testing.assert_close(from_n, torch.linalg.pinv(n))
    away = torch.tensor([1.0, -1.0]).double()
    torch.testing.assert_close(from_i @ away, 3.25**8 * away)


def test_the_examples():
    equal, without_gamma, negative = sky_lemma3.examples()
    assert equal.measured == pytest.approx(1)
    assert without_gamma.measured == pytest.approx(1)
    assert negative.measured == pytest.approx(10)


def test_the_open_interval_is_refuted_in_every_draw_and_the_rest_holds():
    found = list(sky_lemma3.cases(40, seed=4))
    assert len([case for case in found if case.settings.get("fact") == "start"]) == 2
    for case in found:
        expected = case.draws if case.name.startswith("λmax < 1") else 0
        assert case.failures == expected, case.name
