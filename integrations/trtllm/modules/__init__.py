"""Folders for TensorRT-LLM's ``--custom_module_dirs``."""
