"""The training engine: a configuration, a loop, a folder that survives whatever happens."""

from wellcond.train.config import Config
from wellcond.train.recipes import RECIPES, recipe

__all__ = ["RECIPES", "Config", "recipe"]
