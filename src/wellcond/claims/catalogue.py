"""All claims, of the papers and our own, in the ledger's order; and the queue, which runs the most valuable first.

    claim("asa-fig1c")                  # an unknown id raises ValueError, with the nearest id
    CLAIMS["asa-fig6"].built            # True: it can be run; False if only stated so far
    register_claim(TrainedArms(…))      # add one from another package

A claim that can be run has a file beside this one, named after its id (asa-fig1c: asa_fig1c.py), which defines `CLAIM`
with all its text; only the id is listed here. The rules for all verdicts are in docs/claims.md.
"""

import importlib
from typing import NamedTuple

from wellcond.claims.claim import Claim, Statement
from wellcond.words import meant

__all__ = ["CLAIMS", "OURS", "QUEUE", "Step", "claim", "register_claim"]


class Step(NamedTuple):
    """Claims to run together, on these data sets; if none are named, each claim on all of its own."""

    claims: tuple[str, ...]
    sets: tuple[str, ...] = ()


_SKIPS = ("asa-fig1c", "asa-fig1b", "asa-fig2")
QUEUE = (
    Step(_SKIPS, ("cifar100",)),
    Step(_SKIPS, ("tiny-imagenet",)),
    Step(_SKIPS, ("cifar10",)),
    Step(("asa-table2",)),
    Step(("sky-table1",)),
    Step(("sky-lra", "sky-time", "sky-fig1", "sky-fig2", "sky-approx")),
    Step(("new-cures", "cut-init", "spec-attn", "cond-tokens", "pre-attn")),
    Step(("asa-table3", "asa-fig4")),
    Step(("new-kernel-skip",)),
    Step(("asa-fig3", "asa-fig7", "asa-fig8", "asa-assume1", "asa-assume2", "asa-dct", "asa-lowprec", "asa-table1")),
    Step(("asa-table5",)),
    Step(("asa-fig6",), ("cifar10", "cifar100")),
    Step(("asa-table4", "asa-fig5")),
    Step(("asa-fig6",), ("tiny-imagenet",)),
    Step(("new-graying-details",)),
    Step(("new-kappa-predicts", "new-early-warning")),  # from the rows of all the others
)
"""What `wellcond reproduce --all` runs, the most valuable first. Statements of theory are run by `wellcond theory`."""


def _stated(id_: str, claim: str, test: str, holds_if: str) -> Claim:
    return Claim(id=id_, claim=claim, test=test, holds_if=holds_if)


def _statement(id_: str, claim: str, holds_if: str) -> Statement:
    test = "many draws and examples: `wellcond theory`; its evidence says which"
    return Statement(id=id_, claim=claim, test=test, holds_if=holds_if)


_NO_VIOLATION = "no violation; and say what C really is"
_FAILURES = "failure rate ≤ δ, with the explicit constants"
_SAME = "the runs of new-cures"
_GAIN = "as its paper says, at lab scale: interval of the gain above 0"

_ORDER: tuple[str | Claim, ...] = (
    "asa-fig1b",
    "asa-fig1c",
    "asa-fig2",
    "asa-fig3",
    "asa-fig4",
    "asa-fig5",
    "asa-fig6",
    "asa-fig7",
    "asa-fig8",
    "asa-table1",
    "asa-table2",
    "asa-table3",
    "asa-table4",
    "asa-table5",
    "asa-assume1",
    "asa-assume2",
    "asa-dct",
    "asa-lowprec",
    _statement("asa-prop41", "linear attention without its skip is bounded by C·κ(X)³", _NO_VIOLATION),
    _statement(
        "asa-prop42",
        "the skip brings the condition number down",
        "κ with the skip is smaller, and ten times smaller, in every draw that meets the assumptions",
    ),
    _statement("asa-eq6", "an MLP only multiplies the condition number", _NO_VIOLATION),
    _statement(
        "asa-eq24",
        "a depthwise convolution only multiplies the condition number",
        "no violation, whatever the padding and the number of channels",
    ),
    "sky-lra",
    "sky-time",
    "sky-fig1",
    "sky-fig2",
    "sky-table1",
    "sky-approx",
    _statement(
        "sky-lemma1",
        "softmax's scores are a positive semi-definite kernel",
        "no eigenvalue below 0, and the identity holds, to rounding",
    ),
    _statement("sky-lemmaC1", "a random sum of matrices stays near its mean (Lemma C.1, matrix Bernstein)", _FAILURES),
    _statement("sky-lemmaC2", "enough sampled columns keep a Gram matrix, nearly (Lemma C.2)", _FAILURES),
    _statement("sky-theorem2", "enough landmarks approximate kernelized attention up to ε (Theorem 2)", _FAILURES),
    _statement(
        "sky-lemma3",
        "the matrix that Skyformer inverts has its singular values between 0 and 1 (Lemma 3)",
        "all singular values in (0, 1) and ‖I − N‖ < 1 in every draw; with its correction (λmax = 1 exactly)",
    ),
    _stated(
        "new-cures",
        "which change lets attention do without its skip, or improves it with the skip",
        "every cure on CIFAR-10, 15 epochs, no attention skip; the best four with three seeds on CIFAR-10 and "
        "Tiny-ImageNet, with both skips, without `sa`, without any; AdamW, and SOAP or Muon for those that ask for it",
        "per finalist: the share of the lost points that comes back, interval above 0; and its gain with skips",
    ),
    _stated("cut-init", "Cutting the Skip: its initialisation trains transformers without skips", _SAME, _GAIN),
    _stated("spec-attn", "spectral conditioning of attention's weights improves accuracy", _SAME, _GAIN),
    _stated("cond-tokens", "conditioned tokens improve accuracy", _SAME, _GAIN),
    _stated("pre-attn", "preconditioned attention improves accuracy", _SAME, _GAIN),
    "new-kappa-predicts",
    "new-kernel-skip",
    "new-early-warning",
    "new-graying-details",
)
CLAIMS: dict[str, Claim] = {}
"""All claims by id: ours in their order, then those registered from outside."""


def claim(id_: str) -> Claim:
    """Return the claim with this id. Raises ValueError for an unknown one, naming the nearest id, or else all."""
    if id_ not in CLAIMS:
        all_of_them = f"; the ids are {', '.join(CLAIMS)}"
        raise ValueError(f"there is no claim {id_!r}{meant(id_, CLAIMS) or all_of_them}")
    return CLAIMS[id_]


def register_claim(added: Claim) -> Claim:
    """Register a claim of your own, so that `reproduce` and the ledger know it. Returns it.

    Raises ValueError if the id is taken or has other characters than ASCII letters, digits and hyphens. Registering an
    equal claim again changes nothing.
    """
    if not isinstance(added, Claim):
        raise ValueError(f"a claim is a TrainedArms, a Measured or a Claim of wellcond.claims, not {added!r}")
    if not added.id.replace("-", "").isalnum() or not added.id.isascii():
        raise ValueError(f"a claim's id is letters, digits and hyphens, as in my-claim; got {added.id!r}")
    if CLAIMS.setdefault(added.id, added) != added:
        raise ValueError(f"there is a claim {added.id} already: {CLAIMS[added.id].claim}; give yours another id")
    return added


for one in _ORDER:
    file = one.replace("-", "_") if isinstance(one, str) else ""
    register_claim(importlib.import_module(f"wellcond.claims.{file}").CLAIM if isinstance(one, str) else one)
OURS = tuple(CLAIMS)
"""The ids of the claims above. The ledger lists each of them, with or without evidence."""
