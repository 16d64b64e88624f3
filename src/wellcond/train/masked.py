"""Masked autoencoding as a task: no labels; what is best is the smallest error on the validation images."""

from typing import cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from wellcond.data import Batch, DataSet
from wellcond.models.mae import MaskedAutoencoder, MaskedOutput
from wellcond.models.surgery import GrayingSettings
from wellcond.train.config import Config
from wellcond.train.starting import start_masked_from
from wellcond.train.tasks import create, operate

__all__ = ["Masked"]


class Masked:
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
