"""Models, devices and dtypes as the commands' options name them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf

from ..configuration import DTYPES
from ..integrations.transformers.presets import PRESETS, TRAINED, build


def named_dtype(name: str, option: str = "dtype") -> torch.dtype:
    """The dtype of that name; ValueError names the known ones."""
    if name not in DTYPES:
        raise ValueError(f"{option}: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def named_device(name: str) -> torch.device:
    """A device of this machine; ValueError says what it has."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: expected a device of this machine, which has {torch.cuda.device_count()} CUDA GPUs, got {name!r}"
        )
    return device


def load(name: str, dtype: torch.dtype, device: torch.device) -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerBase]:
    """Model (eval) and tokenizer of a preset, of a trained model of this package, or of a checkpoint's folder.

    Raises:
        ValueError, NotImplementedError, OSError: a name or folder that is none of these.
    """
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    if name in PRESETS or name in TRAINED:
        torch.set_num_threads(1)  # their tensors are too small to share: on a busy machine two threads are many times slower
    if name in PRESETS:
        model, tokenizer = build(name)
        model = model.to(dtype)
    else:
        model, tokenizer = _checkpoint(TRAINED.get(name, Path(name)), dtype)
    return model.to(device).eval(), tokenizer


def _checkpoint(folder: Path, dtype: torch.dtype) -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerBase]:
    """The model and tokenizer of a local folder."""
    if not (folder / "config.json").is_file():
        known = ", ".join([*TRAINED, *PRESETS])
        raise ValueError(f"model: expected a preset ({known}) or a folder with a config.json, got {str(folder)!r}")
    config = hf.AutoConfig.from_pretrained(folder, local_files_only=True)
    architecture = getattr(hf, (config.architectures or ["none"])[0], None)
    if architecture is None:
        raise NotImplementedError(f"model: transformers has no class {config.architectures} as {str(folder)!r} asks for")
    model = architecture.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer
