"""The probe: sites → rows, live or once."""

from wellcond.probe.probe import Probe

__all__ = ["Probe"]
