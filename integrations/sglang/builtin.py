"""What a SGLang that has ReplaySSM built in calls (docs/patches.md); the plugin registers the same functions as hooks."""

from .arguments import resolve
from .hooks import accept, arrive, become, commit, dispatch, donate, make_pool, show, size
from .kernels import ReplaySSU

__all__ = ["ReplaySSU", "accept", "arrive", "become", "commit", "dispatch", "donate", "make_pool", "resolve", "show", "size"]
