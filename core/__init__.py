"""ReplaySSM: decode recurrent layers from a checkpoint and a ring of recent inputs, writing the state once per window."""

from . import recurrence, schedule
from .cursor import PLAN, Plan
from .export import Export
from .layout import Buffers, Conv, Layout
from .recurrence import GDN, GLA, KDA, KDA_SAFE, MAMBA2, Recurrence
from .state import ReplayState

__version__ = "0.1.0"

__all__ = [
    "GDN",
    "GLA",
    "KDA",
    "KDA_SAFE",
    "MAMBA2",
    "PLAN",
    "Buffers",
    "Conv",
    "Export",
    "Layout",
    "Plan",
    "Recurrence",
    "ReplayState",
    "recurrence",
    "schedule",
]
