"""Files that a patched FlashInfer gets; they are formatted as FlashInfer formats its own, in 88 columns."""
