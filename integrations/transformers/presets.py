"""Small random-weight models of every supported class and a byte-level tokenizer, built locally: nothing is downloaded.

Weights are drawn here, by name and from one generator, so that a preset is the same model under every supported
transformers version; scales and seeds are chosen so that greedy decoding of `book()` wanders instead of looping.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

PAD, EOS, VOCAB = 256, 257, 264
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Preset:
    """One small model: its class and configuration, the seed of its weights, and what it exercises."""

    name: str
    about: str
    model: str
    seed: int
    config: dict[str, Any]


PRESETS = {one["name"]: Preset(**one) for one in json.loads((HERE / "presets.json").read_text())}
# The trained models that the package ships, made by training/: name -> Hugging Face folder.
TRAINED = {path.parent.name: path.parent for path in sorted((HERE / "models").glob("*/config.json"))}
# What commands take where no model is named.
DEFAULTS = tuple(TRAINED) or ("qwen3.5", "nemotron-h", "kimi-linear")


def book() -> str:
    """The opening of Pride and Prejudice (1813, public domain): the default prompt."""
    return (HERE / "book.txt").read_text()


def pieces(text: str, batch: int) -> list[str]:
    """`batch` beginnings of `text` of different lengths, the longest first: a batch that needs left padding."""
    return [text[: max(1, len(text) * (batch - row) // batch)] for row in range(batch)]


def build(name: str, **sizes: Any) -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerBase]:
    """Returns one preset's model (fp32, CPU, eval) and tokenizer; ``sizes`` stand in place of its configuration's entries.

    Raises: ValueError for a name that is not in PRESETS.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    preset = PRESETS[name]
    kind = getattr(hf, preset.model)
    tokens = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS}
    model = kind(kind.config_class(**preset.config | sizes, **tokens)).eval()
    _draw(model, preset.seed)
    text = tokenizer()
    printable = {token for char, token in text.get_vocab().items() if char.isascii() or char in "ĠĊ"} - {PAD, EOS}
    model.generation_config.suppress_tokens = [i for i in range(VOCAB) if i not in printable]
    model.generation_config.pad_token_id = PAD
    return model, text


def tokenizer() -> hf.PreTrainedTokenizerBase:
    """A byte-level tokenizer: 256 bytes, padding and end of text; pads on the left, as generation needs."""
    alphabet = {char: token for token, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<eos>"])
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


@torch.no_grad()
def _draw(model: nn.Module, seed: int) -> None:
    """Draws every matrix, gate and decay of `model`; norms and the remaining vectors keep their constants."""
    generator = torch.Generator().manual_seed(seed)

    def normal(p: nn.Parameter) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator)

    def uniform(p: nn.Parameter, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(p.shape, generator=generator)

    for name, p in sorted(model.named_parameters()):
        if name.endswith("A_log"):
            safe = getattr(model.get_submodule(name.rpartition(".")[0]), "safe_gate_lower_bound", None)
            p.copy_(torch.zeros_like(p) if safe is not None else uniform(p, 1.0, 16.0).log())
        elif name.endswith("dt_bias"):
            dt = uniform(p, math.log(1e-3), math.log(1e-1)).exp()
            p.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus
        elif "embed" in name:
            p.copy_(normal(p))
        elif p.ndim >= 2:
            w = normal(p) * p.shape[-1] ** -0.5
            # silu's outputs have a positive mean: without this, one direction would choose the same few tokens.
            p.copy_(1.5 * w if "conv" in name else 1.5 * (w - w.mean(-1, keepdim=True)))
    # The head leans away from the token just read: a random model otherwise finds a token that follows itself.
    model.get_output_embeddings().weight.mul_(2.5).sub_(0.5 * model.get_input_embeddings().weight)
