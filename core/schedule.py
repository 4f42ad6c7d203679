"""Flush scheduling: when a step folds, which window a layer wants, what that costs.

The rule itself is ``cursor.flush_rule``, with ``cursor.phase`` against steps on which all requests fold. An engine may force
a flush; it never decides one.
"""

from __future__ import annotations

from .cursor import flush_rule, phase
from .layout import Layout

__all__ = ["best_window", "flush_rule", "phase"]


def best_window(layout: Layout, windows: range = range(1, 65), tokens: int = 1, acceptance: float = 1.0) -> int:
    """The window of least bytes per step for this layout (about ``sqrt(4 S / r)``), from the byte model alone.

    Only windows that hold the layout's ``T_max`` tokens are considered.

    Args:
        tokens, acceptance: of a step; see ``Layout.step_bytes``.
    """
    fitting = [W for W in windows if W >= layout.T_max]
    if not fitting:
        raise ValueError(f"windows: expected one of at least T_max = {layout.T_max}, got {windows}")
    return min(fitting, key=lambda W: layout.with_window(W).step_bytes(tokens, acceptance).replay.total)
