"""The training engine: a configuration, a training loop, and a run folder that survives interruptions."""

from wellcond.train.config import Config
from wellcond.train.recipes import RECIPES, recipe

__all__ = ["RECIPES", "Config", "recipe"]
