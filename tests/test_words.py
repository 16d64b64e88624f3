"""Sites, skips, statuses and verdicts stand once, in words.py: no other file lists them again."""

import ast
from pathlib import Path

import pytest

from wellcond import words

SOURCE = Path(words.__file__).parent
LISTS = {name: set(getattr(words, name)) for name in words.__all__ if name.isupper()}
LISTS |= {"Decided": {"holds", "does not hold", "undecided"}}
EXCEPT = ("words.py",)
MANY = 3  # so many words of one kind are a list of them, even where one is missing


def repeated(source: str) -> list[str]:
    """Every literal list, tuple or set (a Literal[…], too) that says what words.py says, as `line: words`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.List | ast.Tuple | ast.Set):
            continue
        said = {part.value for part in node.elts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
        if len(said) < max(2, len(node.elts)):
            continue
        same = [name for name, known in LISTS.items() if said == known or (len(said) >= MANY and said <= known)]
        found += [f"line {node.lineno}: {ast.unparse(node)} is of words.{same[0]}"] if same else []
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_words_stand_once(path):
    if str(path.relative_to(SOURCE)) not in EXCEPT:
        assert repeated(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        'SITES = ("sa", "+sa", "mlp", "+mlp")',
        'def f(x):\n    return x in ["mlp", "sa"]',
        'for site in {"in", "sa", "+mlp"}: pass',
        'Verdict = Literal["holds", "does not hold", "undecided"]',
        'bad = ("non_finite", "zero")',
    ],
)
def test_the_walk_notices(source):
    assert len(repeated(source)) == 1


@pytest.mark.parametrize(
    "source", ['("mlp", "+mlp")', '{"sa": "c2", "+sa": "c1", "mlp": "c6"}', '("sa", 6.0, 3.0)', "()"]
)
def test_the_walk_lets_pass(source):
    assert repeated(source) == []


def test_the_lists_fit_together():
    assert (*words.OUTSIDE_SITES, *words.BLOCK_SITES) == words.SITES
    assert set(words.DEFAULT_SITES) == {*words.SKIPS, *(f"+{skip}" for skip in words.SKIPS)}
    assert set(words.LEFT_OUT) < set(words.NO_KAPPA) < set(words.STATUSES)
    assert words.VERDICTS[-1] == "out of reach here"
    assert words.OUTCOMES[-1] == "not run"


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("attention", "sa"), ("Self-Attention", "sa"), ("attn", "sa"), ("+attention", "+sa"), ("FFN", "mlp"),
        ("feed_forward", "mlp"), ("+ffn", "+mlp"), ("sa", "sa"), ("SA", "sa"), ("in", "in"), ("*sa", "*sa"), ("", ""),
    ],
)  # fmt: skip
def test_what_others_call_attention_and_mlp(said, ours):
    assert words.our_word(said) == ours


def test_the_nearest_name_is_what_was_meant():
    known = ["linear", "skyformer", "nystrom"]
    assert words.meant("skyfomer", known) == "; did you mean skyformer?"
    assert words.meant("Linear", known) == "; did you mean linear?"
    assert words.meant("xyzzy", known) == ""
    assert words.meant("attention", words.SKIPS) == "; did you mean sa?"
    assert words.meant("nystrom2", ["nystrom", "nystrom1"], most=2).count("nystrom") == 2
