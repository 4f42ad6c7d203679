"""Parity: the same requests by every implementation, beside fp64."""

from .implementation import Entry, Implementation, Ours, implementations
from .matrix import cells, row, rows, within
from .problem import Problem
from .scenarios import PADDING, SCENARIOS, scenario

__all__ = [
    "PADDING",
    "SCENARIOS",
    "Entry",
    "Implementation",
    "Ours",
    "Problem",
    "cells",
    "implementations",
    "row",
    "rows",
    "scenario",
    "within",
]
