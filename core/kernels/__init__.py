"""Backend `triton`: device code, one operation a file, and its launchers."""

from . import arguments, compact, conv, cursor, decode, materialize, verify

__all__ = ["arguments", "compact", "conv", "cursor", "decode", "materialize", "verify"]
