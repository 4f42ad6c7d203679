"""Files that a patched TensorRT-LLM gets; they are formatted as it formats its new files, in 100 columns."""
