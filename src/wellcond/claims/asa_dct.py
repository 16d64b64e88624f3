"""asa-dct: the leading singular vectors of image tokens are low frequencies, so that the DCT may stand for the SVD.

    wellcond reproduce asa-dct --scale smoke                                       # digits and photographs, on a CPU
    wellcond reproduce asa-dct --scale lab --data-dir cifar10=data/cifar10 …       # no GPU needed; photographs are made

The paper says it of the dominant singular vector, without a number. Its DCT is that of DCT graying, over the token
matrix: one cosine transform along the n patches, in their order, and one along the d values of a patch, channel by
channel. So a direction is u vᵀ, of energy 1, and of its n × d coefficients the tenth with the smallest k/n + l/d is
low. Judged are the ten leading directions together. Beside it, unjudged: the dominant one alone, which is what the
paper speaks of, and the same directions as pictures, in the two-dimensional DCT of the image, whose frequencies are
those that one sees.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from wellcond.claims.claim import MeasuredOn, Options, Record
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
    parts = [low_energies(few, data.set.patch_size) for few in images.split(16)]  # in float64, on the CPU
    shares = {where: torch.cat([part[where] for part in parts]) for where in WHERE}
    found = {
        where: {
            "directions": [round(value, 5) for value in energies.mean(0).tolist()],
            "all": [round(value, 5) for value in energies.mean(1).tolist()],
            "first": [round(value, 5) for value in energies[:, 0].tolist()],
        }
        for where, energies in shares.items()
    }
    return {"images": len(images), "patch": data.set.patch_size, "energies": found}


def low_energies(images: Tensor, patch: int) -> dict[str, Tensor]:
    """(b, directions) each: the share of every leading direction's energy in the lowest coefficients."""
    tokens = tokens_of(images, patch, patch)
    u, _, vh = torch.linalg.svd(tokens, full_matrices=False)
    u, v = u[..., :DIRECTIONS], vh[:, :DIRECTIONS]
    # The DCT of u vᵀ is the outer product of theirs.
    low = lowest(*tokens.shape[1:]).to(tokens)
    in_tokens = torch.einsum("bnr,nd,brd->br", dct(u, -2).square(), low, dct(v, -1).square())
    low = lowest(*images.shape[2:]).to(tokens)
    pictures = [
        untokens(u[..., [i]] * v[:, [i]], images.shape, patch, patch) for i in range(u.shape[-1])
    ]  # one at a time: of an image of 224 pixels each is as large as the image
    in_image = torch.stack([(dct2(picture).square() * low).sum((1, 2, 3)) for picture in pictures], 1)
    return {"tokens": in_tokens, "image": in_image}


def lowest(rows: int, columns: int, share: float = LOWEST) -> Tensor:
    """(rows, columns), bool: this share of the coefficients, those with the smallest k/rows + l/columns."""
    frequency = torch.arange(rows)[:, None] / rows + torch.arange(columns) / columns
    chosen = frequency.flatten().argsort(stable=True)[: round(share * rows * columns)]
    return torch.zeros(rows * columns, dtype=torch.bool).index_fill(0, chosen, True).view(rows, columns)


def judge(records: Mapping[str, Record]) -> Iterable[Part]:
    """The interval is over images."""
    for name, record in records.items():
        found, title = record["energies"]["tokens"], SETS[name].title
        share = f"{100 * ENERGY:.0f} % of the energy in the lowest {100 * LOWEST:.0f} %"
        asked = f"{title}: the {DIRECTIONS} leading directions have {share}"
        yield at_least(asked, _percent(found["all"]), 100 * ENERGY, unit=" %", of="images")


def _percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def summary(record: Record) -> Iterable[str]:
    for where, title in WHERE.items():
        found = record["energies"][where]
        said = f"{interval(_percent(found['all']))} % for the {len(found['directions'])} leading directions"
        dominant = f"{interval(_percent(found['first']))} % for the dominant one"
        yield (
            f", {title}: of the energy, the lowest {100 * LOWEST:.0f} % of the coefficients have {said}, {dominant}, "
            f"{100 * found['directions'][-1]:.0f} % for the last of them; the paper: the dominant one typically is of "
            "low frequency"
        )


def figure(records: Sequence[Record]) -> Any:
    """The share of each direction, by set: in the DCT that graying takes, and in that of the image."""
    alt, panels = altair(), []
    titles = [SETS[record["data"]].title for record in records]
    for where, title in WHERE.items():
        rows = [
            {"set": SETS[record["data"]].title, "direction": at, "energy": 100 * energy}
            for record in records
            for at, energy in enumerate(record["energies"][where]["directions"], start=1)
        ]
        lines = alt.Chart(alt.Data(values=rows)).mark_line(point=True, strokeWidth=2).encode(
            x=alt.X("direction:O", title="singular direction, the dominant one first", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("energy:Q", title=f"% of its energy in the lowest {100 * LOWEST:.0f} %",
                    scale=alt.Scale(domain=[0, 100])),
            color=arm_color(titles, field="set"),
        )  # fmt: skip
        asked = alt.Chart(alt.Data(values=[{"y": 100 * ENERGY}])).mark_rule(color=INK, strokeDash=[4, 3])
        panels.append(alt.layer(asked.encode(y="y:Q"), lines).properties(width=360, height=260, title=title))
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
    holds_if="the ten leading directions have ≥ 80 % of their energy in the lowest 10 % of the coefficients",
    sets=("cifar10", "cifar100", "tiny-imagenet", "imagenette", PHOTOGRAPHS.name),
    paper_scale="the paper shows no measurement; on ImageNet-1K it would take a CPU an hour",
    measure=measure,
    judge=judge,
    summary=summary,
    figure=figure,
)
