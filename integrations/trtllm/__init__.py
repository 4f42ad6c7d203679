"""ReplaySSM in TensorRT-LLM's PyTorch backend: importing this registers its model classes over the built-in ones.

Where TensorRT-LLM is not installed, importing it does nothing.
"""

from importlib.util import find_spec

if find_spec("tensorrt_llm") is not None:
    from .register import register

    register()
