"""The served models' layers, as data, and the same facts read from a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .layout import Conv, Layout
from .recurrence import GDN, KDA, KDA_SAFE, MAMBA2, Recurrence

Config = dict[str, Any]


@dataclass(frozen=True)
class Attention:
    """The layers that keep something of every token of the context.

    Attributes:
        layers: how many.
        heads: key-value heads; 1 for a latent that all heads share.
        width: cached elements per token, head and layer: keys and values, or the latent.
        most: most tokens of the context that a step reads, where the layer selects some; None: all.
        index: elements per token and layer that selecting reads.
    """

    layers: int = 0
    heads: int = 1
    width: int = 0
    most: int | None = None
    index: float = 0.0

    def cached(self, context: int) -> float:
        """Elements held of one request."""
        return self.layers * (self.heads * self.width + self.index) * context

    def read(self, context: int) -> float:
        """Elements of one request that a step reads, however many tokens it has."""
        tokens = context if self.most is None else min(context, self.most)
        return self.layers * (self.heads * self.width * tokens + self.index * context)

    def context(self, elements: float) -> float | None:
        """The context of which a step reads so many elements: the inverse of ``read``; None where none has as many."""
        each = self.layers * (self.heads * self.width + self.index)
        if not each:
            return None
        if self.most is None or elements <= each * self.most:
            return elements / each
        return (elements / self.layers - self.heads * self.width * self.most) / self.index if self.index else None


@dataclass(frozen=True)
class Model:
    """A hybrid model's layers that keep something between steps.

    Attributes:
        recurrence, H, G, V, K: of one recurrent layer, before tensor parallelism; see Layout.
        layers: recurrent layers.
        attention: the others.
        weights: bytes of all weights, at 16 bits unless a checkpoint says otherwise; None where unknown.
        architecture: the class that its config.json names, by which engines choose their code; "" where it names none.
        note: what in this row is not read from the model's own files.
    """

    recurrence: Recurrence
    H: int
    G: int
    V: int
    K: int
    layers: int
    attention: Attention = Attention()
    weights: float | None = None
    architecture: str = ""
    note: str = ""

    def layout(self, **options: Any) -> Layout:
        """One layer's layout."""
        return Layout(self.recurrence, self.H, self.G, self.V, self.K, **options)

    @property
    def conv(self) -> Conv:
        """The causal convolution in front of a recurrent layer: over q, k and v."""
        return Conv(2 * self.G * self.K + self.H * self.V)

    def shard(self, ranks: int) -> Model:
        """One rank's part under tensor parallelism; key groups and KV heads fewer than ranks are held by several ranks."""
        if ranks < 1 or self.H % ranks or max(self.G, ranks) % min(self.G, ranks):
            raise ValueError(
                f"tensor-parallel: expected a divisor of the {self.H} value heads and {self.G} key groups, got {ranks}"
            )
        return dataclasses.replace(
            self,
            H=self.H // ranks,
            G=max(1, self.G // ranks),
            attention=dataclasses.replace(self.attention, heads=max(1, self.attention.heads // ranks)),
            weights=None if self.weights is None else self.weights / ranks,
        )


def _gqa(layers: int, heads: int, dim: int) -> Attention:
    return Attention(layers, heads, 2 * dim)


BILLION = 2e9  # bytes of 1e9 weights of 16 bits
QWEN, QWEN_MOE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
NEMOTRON = "NemotronHForCausalLM"
MODELS = {
    "Qwen3.5-4B": Model(GDN, 32, 16, 128, 128, 24, _gqa(8, 4, 256), 4.5 * BILLION, QWEN),
    "Qwen3.5-27B": Model(GDN, 48, 16, 128, 128, 48, _gqa(16, 4, 256), 27 * BILLION, QWEN),
    "Qwen3.5-122B-A10B": Model(GDN, 64, 16, 128, 128, 36, _gqa(12, 2, 256), 122 * BILLION, QWEN_MOE),
    "Qwen3.5-397B-A17B": Model(GDN, 64, 16, 128, 128, 45, _gqa(15, 2, 256), 397 * BILLION, QWEN_MOE),
    "Qwen3-Next-80B-A3B": Model(GDN, 32, 16, 128, 128, 36, _gqa(12, 2, 256), 80 * BILLION, "Qwen3NextForCausalLM"),
    "Kimi-Linear-48B-A3B": Model(KDA, 32, 32, 128, 128, 20, Attention(7, 1, 512 + 64), 48 * BILLION, "KimiLinearForCausalLM"),
    "Kimi-K3": Model(
        KDA_SAFE, 96, 96, 128, 128, 69, Attention(24, 1, 512 + 64), 2800 * BILLION, "KimiK3ForConditionalGeneration"
    ),
    "GLM-5.3-Flash": Model(
        KDA_SAFE, 64, 64, 128, 128, 34, Attention(11, 1, 512, most=2048, index=128 / 16),
        architecture="Glm5NextForConditionalGeneration", note="weights unknown: a checkpoint's folder or --weights says them",
    ),
    "Nemotron-3-Nano-4B": Model(MAMBA2, 96, 8, 80, 128, 21, _gqa(4, 8, 128), 4 * BILLION, NEMOTRON),
    "Nemotron-3-Nano-30B-A3B": Model(MAMBA2, 64, 8, 64, 128, 23, _gqa(6, 2, 128), 31.6 * BILLION, NEMOTRON),
    "Nemotron-3-Super-120B-A12B": Model(MAMBA2, 128, 8, 64, 128, 40, _gqa(8, 2, 128), 120.6 * BILLION, NEMOTRON),
    "Nemotron-3-Ultra-550B-A55B": Model(
        MAMBA2, 256, 8, 64, 128, 48, _gqa(12, 2, 128), 550 * BILLION, NEMOTRON,
        note="its attention layers (12, each with 2 KV heads of 128) are assumed, after Nemotron-3-Super",
    ),
}  # fmt: skip


def find(name: str) -> Model:
    """The model of that name, or that a config.json or a checkpoint's folder describes.

    Raises:
        ValueError: neither, or a config that does not describe a model of a known family.
    """
    by_name = {known.lower(): model for known, model in MODELS.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, a config.json or a folder with one, got {name!r}")
    try:
        config = json.loads(path.read_text())
    except ValueError as failed:
        raise ValueError(f"model: expected JSON in {path}: {failed}") from None
    index = path.with_name("model.safetensors.index.json")
    weights = json.loads(index.read_text())["metadata"]["total_size"] if index.is_file() else None
    return dataclasses.replace(from_config(config), weights=weights)


# ---- config.json -----------------------------------------------------------------------------------------------------------

# What a config.json leaves out is its class's default in transformers.
_DEFAULTS: dict[str, Config] = {
    "qwen3_5": {"num_hidden_layers": 32, "num_key_value_heads": 4},
    "qwen3_5_moe": {"num_hidden_layers": 40, "num_key_value_heads": 2},
    "qwen3_next": {"num_hidden_layers": 48, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 128, "n_groups": 8, "mamba_head_dim": 64, "ssm_state_size": 128,
                   "num_key_value_heads": 8, "head_dim": 128},
    "mamba2": {"num_heads": 128, "n_groups": 8, "head_dim": 64, "state_size": 128, "num_hidden_layers": 64},
    "kimi_linear": {"linear_num_heads": 32, "linear_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "kimi_k3": {},
    "glm5_next": {"linear_num_heads": 64, "linear_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 0,
                  "num_hidden_layers": 45, "linear_lower_bound": -5.0, "index_topk": 2048, "index_head_dim": 128,
                  "index_kpool": 16},
}  # fmt: skip
_QWEN = {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_value_head_dim": 128, "linear_key_head_dim": 128,
         "head_dim": 256, "full_attention_interval": 4}  # fmt: skip
_RECURRENT = ("linear_attention", "mamba")
_ATTENTION = ("full_attention", "attention", "indexed_attention")


def from_config(config: Config) -> Model:
    """The model that a Hugging Face config describes; multimodal ones by their ``text_config``.

    Raises:
        ValueError: a model type of no known family, or a field that is missing.
    """
    text = {"model_type": config.get("model_type")} | (config.get("text_config") or config)
    kind = str(text["model_type"]).removesuffix("_text")
    if kind not in _DEFAULTS:
        raise ValueError(f"model_type: expected one of {', '.join(_DEFAULTS)}, got {text['model_type']!r}")
    text = (_QWEN if kind.startswith("qwen") else {}) | _DEFAULTS[kind] | {k: v for k, v in text.items() if v is not None}
    try:
        model = _READERS[kind.partition("_")[0]](text)
    except KeyError as missing:
        raise ValueError(f"config.json of {kind}: expected {missing.args[0]!r}, found none") from None
    return dataclasses.replace(model, architecture=(config.get("architectures") or [""])[0])


def _layers(c: Config) -> tuple[int, int]:
    """(recurrent, attention) layers."""
    linear = c.get("linear_attn_config", {})
    if "kda_layers" in linear:
        return len(linear["kda_layers"]), len(linear["full_attn_layers"])
    kinds: Sequence[str] = c.get("layer_types") or c.get("layers_block_type") or ()
    if pattern := c.get("hybrid_override_pattern"):
        kinds = [{"M": "mamba", "*": "attention"}.get(letter, "") for letter in pattern]
    if kinds:
        return sum(kind in _RECURRENT for kind in kinds), sum(kind in _ATTENTION for kind in kinds)
    attention = c["num_hidden_layers"] // c["full_attention_interval"]
    return c["num_hidden_layers"] - attention, attention


def _qwen(c: Config) -> Model:
    sizes = (c["linear_num_value_heads"], c["linear_num_key_heads"], c["linear_value_head_dim"], c["linear_key_head_dim"])
    layers, attention = _layers(c)
    return Model(GDN, *sizes, layers, _gqa(attention, c["num_key_value_heads"], c["head_dim"]))


def _nemotron(c: Config) -> Model:
    c = {"mamba_n_groups": c["n_groups"], "attention_head_dim": c["head_dim"]} | c  # older files' names
    sizes = (c["mamba_num_heads"], c["mamba_n_groups"], c["mamba_head_dim"], c["ssm_state_size"])
    layers, attention = _layers(c)
    return Model(MAMBA2, *sizes, layers, _gqa(attention, c["num_key_value_heads"], c["attention_head_dim"]))


def _mamba2(c: Config) -> Model:
    return Model(MAMBA2, c["num_heads"], c["n_groups"], c["head_dim"], c["state_size"], c["num_hidden_layers"])


def _kda(c: Config) -> Model:
    linear = c.get("linear_attn_config", {})
    heads, dim = (linear[name] if name in linear else c[f"linear_{name}"] for name in ("num_heads", "head_dim"))
    bound = linear.get("gate_lower_bound", c.get("linear_lower_bound"))
    row = KDA if bound is None else dataclasses.replace(KDA_SAFE, lower_bound=bound)
    layers, attention = _layers(c)
    latent = Attention(attention, 1, c["kv_lora_rank"] + c["qk_rope_head_dim"])
    if "index_topk" in c:
        latent = dataclasses.replace(latent, most=c["index_topk"], index=c["index_head_dim"] / c["index_kpool"])
    return Model(row, heads, heads, dim, dim, layers, latent)


def _glm5(c: Config) -> Model:
    return _kda({"full_attention_interval": 4} | c)


_READERS: dict[str, Callable[[Config], Model]] = {
    "qwen3": _qwen,
    "nemotron": _nemotron,
    "mamba2": _mamba2,
    "kimi": _kda,
    "glm5": _glm5,
}
