"""Backend `triton`: device code, one operation a file, and its launchers."""

from . import arguments, conv, cursor, decode, materialize, verify

__all__ = ["arguments", "conv", "cursor", "decode", "materialize", "verify"]
