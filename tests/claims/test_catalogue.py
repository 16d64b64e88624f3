import pytest

from wellcond.claims.catalogue import CLAIMS, EXPERIMENTS, THEORY, claim, experiment
from wellcond.theory.registry import STATEMENTS


def test_every_claim_says_what_when_and_how():
    assert len(CLAIMS) == 35
    for id_, one in CLAIMS.items():
        assert id_ == one.id
        assert one.claim
        assert one.test
        assert one.holds_if


def test_statements_are_those_of_the_theory():
    assert set(THEORY) == set(STATEMENTS)


def test_an_experiment_runs_judges_and_draws():
    for id_ in EXPERIMENTS:
        module = experiment(id_)
        for name in ("reproduce", "judge", "figure", "summary", "plan_paper"):
            assert callable(getattr(module, name))


def test_a_wrong_id_is_told_the_nearest():
    with pytest.raises(ValueError, match="did you mean asa-fig1c"):
        claim("asa-fig1cc")
    with pytest.raises(ValueError, match="wellcond theory asa-eq6"):
        experiment("asa-eq6")
    with pytest.raises(ValueError, match="cannot be run yet; those that can are asa-fig1b, asa-fig1c"):
        experiment("asa-fig6")
