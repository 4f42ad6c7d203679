"""Files that a patched SGLang gets; they are formatted as SGLang formats its own, in 88 columns."""
