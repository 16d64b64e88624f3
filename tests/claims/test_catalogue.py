import pytest

from wellcond.claims import CLAIMS, QUEUE, Claim, Statement, claim, register_claim
from wellcond.claims.catalogue import OURS
from wellcond.theory.registry import STATEMENTS


def test_every_claim_says_what_when_and_how():
    assert len(OURS) == 42
    for id_, one in CLAIMS.items():
        assert id_ == one.id
        assert 0 < len(f"{id_}: {one.claim}") <= 120  # a line of the overview
        assert one.test
        assert one.holds_if


def test_statements_are_those_of_the_theory():
    assert {id_ for id_, one in CLAIMS.items() if isinstance(one, Statement)} == set(STATEMENTS)


def test_the_queue_has_every_claim_but_the_statements():
    queued = {id_ for step in QUEUE for id_ in step.claims}
    assert queued == {id_ for id_ in OURS if not isinstance(CLAIMS[id_], Statement)}
    for ids, sets in QUEUE:
        for one in map(claim, ids):
            assert not one.built or not sets or set(sets) <= {"cifar10", "cifar100", "tiny-imagenet"}


def test_every_set_of_a_built_claim_is_in_the_queue():
    for id_ in OURS:
        one = CLAIMS[id_]
        steps = [step for step in QUEUE if id_ in step.claims]
        if one.built and one.sets:
            assert set(one.sets) <= {name for step in steps for name in step.sets or one.sets}


def test_a_wrong_id_is_told_the_nearest():
    with pytest.raises(ValueError, match="did you mean asa-fig1c"):
        claim("asa-fig1cc")


def test_an_id_is_taken_once():
    stated = Claim(id="asa-fig6", claim="a", test="b", holds_if="c")
    with pytest.raises(ValueError, match="there is a claim asa-fig6 already"):
        register_claim(stated)
    assert register_claim(CLAIMS["asa-fig6"]) is CLAIMS["asa-fig6"]
    with pytest.raises(ValueError, match="letters, digits and hyphens"):
        register_claim(Claim(id="../x", claim="a", test="b", holds_if="c"))
    with pytest.raises(ValueError, match="a claim is a TrainedArms"):
        register_claim("asa-fig6")  # pyright: ignore[reportArgumentType]
