"""timm's ConvMixer: a depthwise convolution takes the place of attention and has the block's only skip."""

from torch import Tensor

from wellcond.models.families.family import BlockKind, Family, PatchProjection, register
from wellcond.models.families.forwards import Skipless


class ConvMixer(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        return self.add_skip("sa", x, self.fn(x))


NO_SKIP = "a ConvMixer has no skip around its pointwise convolution"

register(
    Family(
        models={"timm.models.convmixer.ConvMixer": PatchProjection(path="stem.0")},
        blocks={
            "timm.models.convmixer.Residual": BlockKind(
                taps={"in": "0.fn:input", "sa": "0.fn:output", "+sa": "0:output", "mlp": ":output"},
                lacks={"+mlp": NO_SKIP},
                skips={"sa": "0"},
                why_no_skip=NO_SKIP,
                channels_first=True,
                sits_at="0",
            )
        },
        skipless={"timm.models.convmixer.Residual": ConvMixer},
    )
)
