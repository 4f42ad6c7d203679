"""TensorRT plugins: planning, decode and verify steps and commits of ReplaySSM as layers of a TensorRT network.

Checked against TensorRT's Python front end; never built into an engine (docs/tensorrt-plugin.md).
"""

from .registration import register

__all__ = ["register"]
