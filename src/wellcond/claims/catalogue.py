"""The claims of both papers, and two of our own: an id, what is claimed, how it is tested, when it holds.

    CLAIMS["asa-fig1c"].claim                    # in the papers' order
    experiment("asa-fig1c")                      # the module that runs, judges and draws it; ValueError where none yet

A verdict is one of: holds, holds in part, does not hold, undecided (with the smallest effect that could have been
seen), out of reach here (with what it would take). The rules for all of them are in docs/claims.md.
"""

import difflib
import importlib
from dataclasses import dataclass
from types import ModuleType

__all__ = ["CLAIMS", "EXPERIMENTS", "THEORY", "Claim", "claim", "experiment"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    claim: str
    test: str
    """At `lab` scale, on real data."""
    holds_if: str


def _claims(*rows: tuple[str, str, str, str]) -> dict[str, Claim]:
    return {id_: Claim(id=id_, claim=said, test=test, holds_if=when) for id_, said, test, when in rows}


_JACOBIAN = (
    "lower ε, better-conditioned Jacobian of an attention block",
    "exact spectrum at 64 tokens; extreme values and density at 197",
    "monotone in ε",
)
_COMPUTED = "many draws and examples: `wellcond theory`; its evidence says which"
_BOUND = (_COMPUTED, "no violation; and say what C really is")
_THEOREM = (_COMPUTED, "failure rate ≤ δ, with the explicit constants")

CLAIMS = _claims(
    (
        "asa-fig1b",
        "`sa` is far worse conditioned than the other three sites in a trained ViT-Tiny",
        "CIFAR-10 and Tiny-ImageNet models of asa-fig1c; κ on 10 % of validation",
        "mean log κ(`sa`) − max of the others ≥ 1.5 in ≥ 10 of 12 blocks, trained; and say what training changed",
    ),
    (
        "asa-fig1c",
        "removing the attention skip is catastrophic, the MLP skip modest; worse on larger data",
        "CIFAR-10, CIFAR-100, Tiny-ImageNet × three arms",
        "drop(sa) ≥ 3 × drop(mlp) on each; drop(sa) grows with the data set",
    ),
    (
        "asa-fig2",
        "training loss of the three arms; the sa-less one is slow and diverges",
        "the Tiny-ImageNet runs of asa-fig1c",
        "its loss stays above the others throughout; divergence seen or not, at which rates",
    ),
    (
        "asa-fig3",
        "linear attention cubes κ; the skip repairs it; softmax alike",
        "ViT-Tiny linear (k = 16) and softmax, trained",
        "log κ(`sa`) ≥ 2 × log κ(`in`) for linear; `+sa` back near the input's",
    ),
    (
        "asa-fig4",
        "graying lowers κ of `+sa` through training, more for lower ε",
        "ViT-Tiny, SVD ε ∈ {.9, .7, .5}, DCT ε ∈ {.97, .95, .9}",
        "ordered by ε at ≥ 90 % of epochs",
    ),
    (
        "asa-fig5",
        "DCT graying lowers κ in almost every layer",
        "ViT-Base on Imagenette at 224",
        "lower in ≥ 10 of 12",
    ),
    (
        "asa-fig6",
        "a ConvMixer does not need its skip",
        "ConvMixer 256/8 on the three sets",
        "the interval of the drop inside ± 1 point on each",
    ),
    ("asa-fig7", *_JACOBIAN),
    ("asa-fig8", *_JACOBIAN),
    (
        "asa-table1",
        "time: SVD graying 6.3 ×, DCT 1.012 ×",
        "ViT-B step, batch 256, bf16",
        "measured ratios, both ways: `torch.linalg.svd` and ours",
    ),
    (
        "asa-table2",
        "graying adds 1.2 to 1.8 points to ViT-Tiny on Tiny-ImageNet, linear and softmax",
        "six arms, 100 epochs",
        "interval of the gain above 0 for each",
    ),
    (
        "asa-table3",
        "an ε in the middle is best; κ_in, κ_out fall with ε",
        "ε sweep, ViT-Tiny on Tiny-ImageNet",
        "κ monotone; best ε inside the range",
    ),
    (
        "asa-table4",
        "the gain carries to ViT-S/B, Swin-S, CaiT-S, PVT v2",
        "each on Imagenette at 224",
        "pooled gain's interval above 0; per model as it comes",
    ),
    ("asa-table5", "MAE + DCT graying", "MAE on Tiny-ImageNet, fine-tuned", "interval of the gain above 0"),
    (
        "asa-assume1",
        "the network's Jacobian is as ill-conditioned as its worst block's",
        "small ViTs where both can be computed",
        "rank correlation over models and checkpoints",
    ),
    (
        "asa-assume2",
        "κ of a block's output tells κ of its Jacobian",
        "blocks × ε × checkpoints",
        "rank correlation ≥ .7",
    ),
    (
        "asa-dct",
        "leading singular vectors of image tokens are low frequencies",
        "photographs and the four image sets",
        "energy of the top singular directions in the lowest DCT coefficients",
    ),
    (
        "asa-lowprec",
        "the DCT suffers in low precision",
        "bf16, fp16, TF32, fp32",
        "error measured, accuracy of a training in each",
    ),
    ("asa-prop41", "linear attention without its skip is bounded by C·κ(X)³", *_BOUND),
    (
        "asa-prop42",
        "the skip brings the condition number down",
        _COMPUTED,
        "κ with the skip is smaller, and ten times smaller, in every draw that meets the assumptions",
    ),
    ("asa-eq6", "an MLP only multiplies the condition number", *_BOUND),
    (
        "asa-eq24",
        "a depthwise convolution only multiplies the condition number",
        _COMPUTED,
        "no violation, whatever the padding and the number of channels",
    ),
    (
        "sky-lra",
        "accuracy of softmax, kernelized, Nyströmformer, Skyformer on the five tasks",
        "Text, ListOps, Pathfinder, Image as published; Retrieval from pairs of film reviews",
        "Skyformer not below softmax by more than 1 point (interval), averaged",
    ),
    (
        "sky-time",
        "Skyformer trains faster and smaller",
        "same runs, and against SDPA (the paper compared with a checkpointed softmax)",
        "time and peak memory per task",
    ),
    (
        "sky-fig1",
        "validation loss over training time: Skyformer converges faster; Text over-fits at once; softmax stalls on "
        "Pathfinder",
        "same runs",
        "time to a given loss; the two remarks seen or not",
    ),
    (
        "sky-fig2",
        "singular values of attention outputs decay fast, slower on harder tasks",
        "layer 2 of the trained softmax models",
        "decay ordered as published",
    ),
    (
        "sky-table1",
        "instability ratios: kernelized and Skyformer < 1, Nyströmformer ≈ 1",
        "20 steps, five tasks, ≥ 5 seeds",
        "interval below 1; Nyströmformer's inside 1 ± .05",
    ),
    (
        "sky-approx",
        "approximation error falls with landmarks; Skyformer (softmax-kernel form) best at d ≥ 128",
        "Q, K from trained models of ours; n 512–4096, d 16–256",
        "ordering at d ≥ 128",
    ),
    (
        "sky-lemma1",
        "softmax's scores are a positive semi-definite kernel",
        _COMPUTED,
        "no eigenvalue below 0, and the identity holds, to rounding",
    ),
    ("sky-lemmaC1", "the paper's Lemma C1", *_THEOREM),
    ("sky-lemmaC2", "the paper's Lemma C2", *_THEOREM),
    ("sky-theorem2", "the paper's Theorem 2", *_THEOREM),
    (
        "sky-lemma3",
        "the paper's Lemma 3",
        _COMPUTED,
        "all singular values in (0, 1) and ‖I − N‖ < 1 in every draw; with its correction (λmax = 1 exactly)",
    ),
    (
        "new-kernel-skip",
        "kernelized attention loses less than softmax when its skip goes (nobody has published this)",
        "softmax / linear / kernelized / Skyformer × skip or not × graying or not, CIFAR-10 and Tiny-ImageNet",
        "interval of drop(softmax) − drop(kernelized) above 0",
    ),
    (
        "new-early-warning",
        "κ of early steps predicts the arms that will diverge",
        "all runs above: κ at 5 % of training against the final loss",
        "AUC's interval above .7",
    ),
)
EXPERIMENTS = {"asa-fig1b": "asa_fig1b", "asa-fig1c": "asa_fig1c"}
"""Those that `wellcond reproduce` can run, and their modules."""
THEORY = tuple(id_ for id_ in CLAIMS if CLAIMS[id_].test == _COMPUTED)
"""Those that `wellcond theory` checks."""


def claim(id_: str) -> Claim:
    """The claim of this id; ValueError with the nearest, or all of them."""
    if id_ not in CLAIMS:
        near = difflib.get_close_matches(id_, CLAIMS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"there is no claim {id_!r}; {hint}The ids are {', '.join(CLAIMS)}")
    return CLAIMS[id_]


def experiment(id_: str) -> ModuleType:
    """The module that runs, judges and draws this claim; ValueError for an unknown id, or one that has none yet."""
    claim(id_)
    if id_ in THEORY:
        raise ValueError(f"{id_} is a statement to compute, not to train: wellcond theory {id_}")
    if id_ not in EXPERIMENTS:
        raise ValueError(f"{id_} cannot be run yet; those that can are {', '.join(EXPERIMENTS)}")
    return importlib.import_module(f"wellcond.claims.{EXPERIMENTS[id_]}")
