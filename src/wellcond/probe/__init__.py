"""The probe: measure the conditioning of a model's tokens at its sites, once or during training, as rows."""

from wellcond.probe.probe import Probe

__all__ = ["Probe"]
