import pytest

from wellcond.theory import STATEMENTS, check, statement
from wellcond.theory.registry import DRAWS


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_statement_says_what_was_tested_and_what_was_not(name):
    said = statement(name)
    assert said.id == name
    texts = [said.title, said.plain, said.claim, said.tested, said.not_tested]
    for text in (*texts, *(fact.says for fact in said.instead), *(fact.proof for fact in said.instead if fact.proof)):
        assert len(text) > 20
        assert "  " not in text
    assert said.instead
    for fact in said.instead:
        assert (fact.mark == "theorem") == bool(fact.proof) == bool(fact.key)  # cases check a theorem under its key


def test_the_same_seed_gives_the_same_finding_and_another_does_not():
    first, again, other = (check("sky-lemmaC1", draws=40, seed=seed) for seed in (1, 1, 2))
    assert first.as_dict() == again.as_dict()
    assert first.as_dict() != other.as_dict()


def test_a_finding_rests_on_its_worst_case():
    seen = []
    found = check("sky-lemma3", draws=40, on_case=seen.append)
    claim = [case for case in found.cases if case.part == "claim"]
    assert seen == found.cases
    assert found.headline.margin == min(case.margin for case in claim)
    assert found.verdict == "holds in part"
    assert found.trained == "none was given"


def test_unknown_statements_are_answered_with_the_list():
    with pytest.raises(ValueError, match="'asa-prop43'; there are asa-prop41, asa-prop42"):
        check("asa-prop43")


def test_too_few_draws():
    with pytest.raises(ValueError, match="take 40 or more"):
        check("sky-lemmaC1", draws=39)


def test_the_default_depth_decides_every_rate():
    assert DRAWS * 0.5 >= 80  # zero failures of 80 draws put the interval below δ = 0.05
