"""Backend `triton`: device code, one operation a file, and its launchers."""
