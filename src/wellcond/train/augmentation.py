"""The configuration's augmentation: the fields that wellcond.data knows by the same names."""

from wellcond.data import Augmentation
from wellcond.train.config import Config

__all__ = ["augmentation_of"]


def augmentation_of(config: Config) -> Augmentation:
    names = Augmentation.__dataclass_fields__
    return Augmentation(**{name: getattr(config, name) for name in names if hasattr(config, name)})
