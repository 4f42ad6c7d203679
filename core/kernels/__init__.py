"""Backend `triton`: device code, one operation a file, and its launchers."""

from . import arguments, compact, conv, conventional, count, cursor, decode, materialize, prepared, verify

__all__ = ["arguments", "compact", "conv", "conventional", "count", "cursor", "decode", "materialize", "prepared", "verify"]
