"""A soak test of the state as a service: an engine in miniature, and random walks of it beside the fp64 oracle."""

from .engine import Engine, Setup
from .step import STYLES
from .walk import Report, walk

__all__ = ["STYLES", "Engine", "Report", "Setup", "walk"]
