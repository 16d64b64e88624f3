"""asa-dct: the leading singular vectors of image tokens are low frequencies, so that the DCT can replace the SVD.

    wellcond reproduce asa-dct --scale smoke                                       # digits and photographs, on a CPU
    wellcond reproduce asa-dct --scale lab --data-dir cifar10=data/cifar10 …       # no GPU; photographs need no folder

The paper says so of the dominant singular vector, without a number. Its DCT is that of DCT graying, over the token
matrix: along the n patches, in their order, and along the d values of a patch, channel by channel. A direction is thus
u vᵀ, with energy 1, and the tenth of its n × d coefficients with the smallest k/n + l/d counts as low. The dominant
direction alone and the ten leading ones together are judged; for the ten it is the mean share, in which each counts
equally, however large its singular value. All are also shown as pictures, in the DCT of the image, whose frequencies
are the visible ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from wellcond.claims.claim import THE_PAPER, Line, MeasuredOn, Options, Record, TableRow
from wellcond.claims.figures import INK, altair, arm_color, titled
from wellcond.claims.measurements import images_of
from wellcond.claims.sets import PHOTOGRAPHS, SETS, GivenData, ImageSet
from wellcond.numerics.dct import dct, dct2
from wellcond.numerics.fused import tokens_of, untokens
from wellcond.verdicts import Part, at_least, interval

__all__ = ["CLAIM", "low_energies", "lowest"]

DIRECTIONS, LOWEST, ENERGY = 10, 0.1, 0.8
IMAGES = {"smoke": 4, "lab": 256}
WHERE = {"tokens": "in the DCT of the tokens", "image": "in the DCT of the image"}


def measure(options: Options, data: GivenData) -> Mapping[str, Any]:
    assert isinstance(data.set, ImageSet)
    images = images_of(options, data, IMAGES[options.scale]).double()
    groups, parts = images.split(16), list[dict[str, Tensor]]()
    with options.steps(len(groups), lines=False) as begin:
        for few in groups:
            begin(f"decomposing images of {data.set.title}")
            parts.append(low_energies(few, data.set.patch_size))  # in float64, on the CPU
    energies = {}
    for where in WHERE:
        shares = torch.cat([part[where] for part in parts])
        kept = {"directions": shares.mean(0), "all": shares.mean(1), "first": shares[:, 0]}
        energies[where] = {name: [round(value, 5) for value in values.tolist()] for name, values in kept.items()}
    return {"images": len(images), "patch": data.set.patch_size, "energies": energies}


def low_energies(images: Tensor, patch: int) -> dict[str, Tensor]:
    """Return the share of each leading direction's energy in the lowest coefficients: (b, directions), by DCT."""
    tokens = tokens_of(images, patch, patch)
    u, _, vh = torch.linalg.svd(tokens, full_matrices=False)
    u, v = u[..., :DIRECTIONS], vh[:, :DIRECTIONS]
    # The DCT of u vᵀ is the outer product of the DCTs of u and v.
    low = lowest(*tokens.shape[1:]).to(tokens)
    in_tokens = torch.einsum("bnr,nd,brd->br", dct(u, -2).square(), low, dct(v, -1).square())
    low = lowest(*images.shape[2:]).to(tokens)
    pictures = (untokens(u[..., [i]] * v[:, [i]], images.shape, patch, patch) for i in range(u.shape[-1]))
    in_image = torch.stack([(dct2(picture).square() * low).sum((1, 2, 3)) for picture in pictures], 1)
    return {"tokens": in_tokens, "image": in_image}


def lowest(rows: int, columns: int, share: float = LOWEST) -> Tensor:
    """Return a mask (rows, columns) of this share of the coefficients: those with the smallest k/rows + l/columns."""
    frequency = torch.arange(rows)[:, None] / rows + torch.arange(columns) / columns
    chosen = frequency.flatten().argsort(stable=True)[: round(share * rows * columns)]
    return torch.zeros(rows * columns, dtype=torch.bool).index_fill(0, chosen, True).view(rows, columns)


def judge(records: Mapping[str, Record]) -> Iterable[Part]:
    """Judge the paper's statement about the first direction, and the same of ten. The interval is over images."""
    share = f"{100 * ENERGY:.0f} % of the energy in the lowest {100 * LOWEST:.0f} % of frequencies"
    for which, who in (("first", "the dominant direction has"), ("all", f"the {DIRECTIONS} leading directions have")):
        for name, record in records.items():
            asked = f"{SETS[name].title}: {who} {share}"
            yield at_least(asked, percent(record, "tokens", which), 100 * ENERGY, unit=" %", of="images")


def percent(record: Record, where: str, which: str) -> list[float]:
    """Return % of energy in the lowest coefficients: by image for `all` and `first`, by direction for `directions`."""
    return [100 * value for value in record["energies"][where][which]]


def says(records: Mapping[str, Record]) -> str:
    def ends(which: str) -> str:
        means = [f"{fmean(percent(record, 'tokens', which)):.3g}" for record in records.values()]
        return " to ".join(dict.fromkeys((min(means, key=float), max(means, key=float))))

    least = min(fmean(percent(record, "tokens", "first")) for record in records.values())
    low = "is of low frequency" if least >= 100 * ENERGY else "is not of low frequency"
    return (
        f"The dominant singular direction of image tokens {low}: the lowest {100 * LOWEST:.0f} % of the DCT's "
        f"frequencies hold {ends('first')} % of its energy (of the ten leading directions {ends('all')} %)."
    )


def summary(record: Record) -> Iterable[Line]:
    for which, title, paper in (
        ("first", "of the dominant direction", "typically low frequencies"),
        ("all", "of the ten leading directions", ""),
    ):
        cells = {name: interval(percent(record, where, which)).with_unit(" %") for where, name in WHERE.items()}
        yield TableRow(f", energy {title} in the lowest tenth", {**cells, THE_PAPER: paper})


def figure(records: Sequence[Record]) -> Any:
    """Plot the share of each direction, by set: in the DCT that graying uses, and in that of the image."""
    alt, panels = altair(), []
    titles = [SETS[record["data"]].title for record in records]
    for where, heading in WHERE.items():
        rows = [
            {"set": title, "direction": at, "energy": energy}
            for record, title in zip(records, titles, strict=True)
            for at, energy in enumerate(percent(record, where, "directions"), start=1)
        ]
        lines = alt.Chart(alt.Data(values=rows)).mark_line(point=True, strokeWidth=2).encode(
            x=alt.X("direction:O", title="singular direction, the dominant one first", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("energy:Q", title=f"% of its energy in the lowest {100 * LOWEST:.0f} %",
                    scale=alt.Scale(domain=[0, 100])),
            color=arm_color(titles, field="set"),
        )  # fmt: skip
        asked = alt.Chart(alt.Data(values=[{"y": 100 * ENERGY}])).mark_rule(color=INK, strokeDash=[4, 3])
        panels.append(alt.layer(asked.encode(y="y:Q"), lines).properties(width=360, height=260, title=heading))
    images = fmean(record["images"] for record in records)
    caption = (
        f"Means over {images:.0f} images of each set, at {records[0]['scale']} scale. Dashed: what is asked of all ten "
        "together. The paper says it of the dominant direction, without a number; patches of 4, 8 and 16 pixels."
    )
    return titled(alt.hconcat(*panels), "How much of a singular direction of image tokens is of low frequency", caption)


CLAIM = MeasuredOn(
    id="asa-dct",
    claim="leading singular vectors of image tokens are low frequencies",
    test="photographs and the four image sets, in the DCT of DCT graying; beside it, in that of the image",
    holds_if="the dominant direction, of which the paper says it, and the ten leading ones, on average, have ≥ 80 % of "
    "their energy in the lowest 10 % of the coefficients",
    sets=("cifar10", "cifar100", "tiny-imagenet", "imagenette", PHOTOGRAPHS.name),
    paper_scale="the paper shows no measurement; on ImageNet-1K it would take a CPU an hour",
    measure=measure,
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
