"""What is trained: the model a configuration asks for, its loss, and what is counted in validation.

    task = make_task(config, data)
    loss = task.loss(model, batch)                           # a scalar, for one part of a batch
    task.count(model, batch)                                 # sums over samples: batches and ranks merge by adding

The surgery (removed skips, another attention, graying) is done here, before the model is compiled or wrapped.
"""

import math
import warnings
from typing import Any, Protocol, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from wellcond.data import Batch, DataSet
from wellcond.models import gray, remove_skip
from wellcond.models.build import check_patches, create_model
from wellcond.models.mae import MaskedAutoencoder, MaskedOutput
from wellcond.models.surgery import GrayingSettings
from wellcond.train.config import Config
from wellcond.train.starting import start_from, start_masked_from

__all__ = ["Classify", "Masked", "Task", "make_task"]


class Task(Protocol):
    metric: str
    """The name of what is best when largest: kept as the best value."""
    chance: float
    """The loss of who has learned nothing and guesses: a training that ends above it is lost."""
    notes: list[str]
    """What a user must know of the model that was built, one sentence each: what it did not take from a file."""

    def build(self) -> nn.Module:
        """The model, on the CPU, with its surgery and its starting weights."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the samples of a batch, "count" among them."""
        ...


def make_task(config: Config, data: DataSet) -> Task:
    if config.task == "mae":
        return Masked(config, data)
    return Classify(config, data)


class Classify:
    """Images to classes; also the linear probe, which trains a fresh head alone."""

    metric = "top1"

    def __init__(self, config: Config, data: DataSet):
        self.config, self.data = config, data
        self.notes: list[str] = []
        self.chance = math.log(len(data.classes))  # of mixed and smoothed labels, too

    def build(self) -> nn.Module:
        config = self.config
        model = create(config, num_classes=len(self.data.classes), channels=self.data.train.channels)
        operate(model, config)
        if config.checkpoint:
            self.notes = start_from(model, config.checkpoint)
        if config.task == "linear_probe":
            from wellcond.models.mae import linear_probe

            model = linear_probe(cast(VisionTransformer, model))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        # Labels are numbers, or shares of the classes where images were mixed or labels smoothed: torch takes both.
        return nn.functional.cross_entropy(model(*batch.inputs), batch.targets)

    def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, labels = model(*batch.inputs).float(), batch.targets
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        return {
            "loss": nn.functional.cross_entropy(logits, labels, reduction="sum").double(),
            "top1": top[:, 0].sum().double(),
            "top5": top.any(1).sum().double(),
            "count": torch.tensor(float(len(labels)), dtype=torch.float64, device=logits.device),
        }


class Masked:
    """Masked autoencoding: no labels; what is best is the smallest error on the validation images."""

    metric = "score"  # minus the loss: the larger the better, as an accuracy
    chance = 1.0  # the mean for every pixel, of images whose deviation is 1

    def __init__(self, config: Config, data: DataSet):
        self.config, self.data = config, data
        self.notes: list[str] = []

    def build(self) -> nn.Module:
        config = self.config
        encoder = create(config, num_classes=0, channels=self.data.train.channels)
        operate(encoder, config.changed({"gray": ""}))  # the autoencoder grays for itself
        model = MaskedAutoencoder(
            cast(VisionTransformer, encoder),
            decoder_dim=config.decoder_dim,
            decoder_depth=config.decoder_depth,
            decoder_heads=config.decoder_heads,
            mask_ratio=config.mask_ratio,
            normalize_pixels=config.normalize_pixels,
            gray="all" if config.gray_masked == "all" and config.gray else "visible" if config.gray else None,
            graying=GrayingSettings(method=config.gray, epsilon=config.epsilon) if config.gray else None,
            keep_positions=config.pretrained,  # they are trained ones
        )
        if config.checkpoint:
            self.notes = start_masked_from(model, config.checkpoint)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return MaskedOutput(*model(*batch.inputs)).loss

    def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        number = torch.tensor(float(len(batch.targets)), dtype=torch.float64, device=batch.targets.device)
        loss = MaskedOutput(*model(*batch.inputs)).loss.double() * number
        return {"loss": loss, "score": -loss, "count": number}


def create(config: Config, *, num_classes: int, channels: int) -> nn.Module:
    """The timm model, its random weights drawn from the seed."""
    settings: dict[str, Any] = {"num_classes": num_classes, **config.model_kwargs}
    if channels != 3:
        settings.setdefault("in_chans", channels)
    if config.drop_path:
        settings.setdefault("drop_path_rate", config.drop_path)
    torch.manual_seed(config.seed)
    if config.model.startswith("convmixer") and settings.keys() & {"dim", "depth", "kernel_size", "patch_size"}:
        # Their names fix the size, and timm's functions for them take no other; the class does.
        if config.pretrained:
            raise ValueError(f"the weights of {config.model} are of its own size; leave pretrained or model_kwargs out")
        from timm.models.convmixer import ConvMixer

        try:
            model: nn.Module = ConvMixer(**settings)
        except TypeError as error:
            raise ValueError(f"a ConvMixer of another size needs dim and depth: {error}") from None
    else:
        model = create_model(config.model, settings, pretrained=config.pretrained)
    check_patches(model, config.model, (config.image_size, config.image_size))
    return model


def operate(model: nn.Module, config: Config) -> None:
    """Graying, removed skips and another attention, in place."""
    if config.attention:
        from wellcond.models import replace_attention  # pyright: ignore[reportAttributeAccessIssue]

        replace_attention(model, config.attention, **config.attention_kwargs)
    for skip in config.remove_skips:
        with warnings.catch_warnings():
            if config.layer_scale is not None:
                warnings.simplefilter("ignore")
            remove_skip(model, skip, layer_scale=config.layer_scale)
    if config.gray:
        gray(model, config.gray, epsilon=config.epsilon)
