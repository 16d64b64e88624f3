"""Data sets to train on: from folders, archives, shards and hubs, and small ones that are built in.

    data = open_data("digits", image_size=8)                        # built in
    data = open_data("folder:imagenette", image_size=224)           # train/CLASS/FILE and val/CLASS/FILE
    batches = TrainBatches(data.train.to("cuda"), batch_size=256, seed=0, device="cuda", …)

`register_source` adds a kind of data; see docs/data.md.
"""

from wellcond.data import (  # noqa: F401 (they register their words)
    cifar,
    digits,
    folders,
    gray_tokens,
    hub,
    listops,
    pathfinder,
    texts,
)
from wellcond.data.augment import Augmentation
from wellcond.data.batches import EvalBatches, TrainBatches
from wellcond.data.dataset import DataSet, Images
from wellcond.data.files import ImageFiles
from wellcond.data.images import ImageSample, read_images, sample_images
from wellcond.data.loading import Batch, Batches, Part, eval_batches, train_batches
from wellcond.data.sequences import SequenceSet
from wellcond.data.sources import SOURCES, Settings, open_data, register_source
from wellcond.data.stream import StreamBatches, StreamEvalBatches

__all__ = [
    "open_data",
    "SOURCES",
    "Settings",
    "register_source",
    "DataSet",
    "Images",
    "ImageFiles",
    "SequenceSet",
    "Augmentation",
    "Batch",
    "Batches",
    "Part",
    "train_batches",
    "eval_batches",
    "TrainBatches",
    "EvalBatches",
    "StreamBatches",
    "StreamEvalBatches",
    "ImageSample",
    "read_images",
    "sample_images",
]
