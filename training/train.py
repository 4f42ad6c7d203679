"""Trains one of the small models that the package ships.

usage: python -m training.train FAMILY [--minutes M | --steps N] [--text FOLDER] [--out FOLDER] [--device DEVICE] ...

FAMILY is mamba2, gdn or kda. Needs training.data's text. Writes a Hugging Face folder, bf16: config.json, model.safetensors,
generation_config.json, the tokenizer, and training.json: settings, losses, held-out loss and recall over 131,072 tokens.
Flash-linear-attention (the fla-core package) speeds gdn and kda up; without it transformers' own code trains, more slowly.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from replayssm.integrations.transformers import window
from replayssm.integrations.transformers.presets import EOS, PAD, VOCAB, tokenizer

from .carry import carried
from .chunks import install
from .evaluate import evaluate
from .streams import Streams

HERE = Path(__file__).parent


def main() -> None:
    """Train, evaluate, write."""
    args = arguments()
    hf.logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    batches = iter(DataLoader(Streams(args.text, args.rows, args.length, args.seed), batch_size=None, num_workers=1))
    next(batches)  # the worker starts before CUDA does
    model = build(args.family, args.window)
    chunk = install(args.family, args.device)
    model.to(args.device).train()
    record = {"family": args.family, "parameters": sum(p.numel() for p in model.parameters()), "chunk": chunk}
    record |= {name: getattr(args, name) for name in ("rows", "length", "window", "rate", "seed")}
    record |= train(model, batches, args)
    model.to(torch.bfloat16).eval()
    record["held_out"] = evaluate(model, args.text / "book.txt", args.device, args.evaluate)
    save(model, args.out, record)
    print(json.dumps({"held_out": record["held_out"]}, indent=1), flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=["mamba2", "gdn", "kda"])
    parser.add_argument("--minutes", type=float, help="of training, after the first step; the rate follows the clock")
    parser.add_argument("--steps", type=int, help="of training; the rate follows the steps")
    parser.add_argument("--text", type=Path, default=HERE / "text")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=16, help="streams side by side")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a stream per step")
    parser.add_argument("--window", type=int, default=128, help="tokens that attention sees")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", type=int, default=131_072, help="tokens of each held-out stream")
    args = parser.parse_args()
    if (args.minutes is None) == (args.steps is None):
        parser.error("expected one of --minutes and --steps")
    return args


def build(family: str, size: int) -> hf.PreTrainedModel:
    """A new model with attention over `size` tokens; time constants of the recurrence drawn as its authors do."""
    given = json.loads((HERE / "models.json").read_text())[family]
    kind = getattr(hf, given["model"])
    tokens = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS}
    shared = {"attn_implementation": window.NAME, "sliding_window": size, "max_position_embeddings": 131_072}
    model = kind(kind.config_class(**given["config"], **tokens, **shared))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(1.0, 16.0).log())
            elif name.endswith("dt_bias"):
                dt = torch.empty_like(p).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus
    return model


def train(model: nn.Module, batches, args: argparse.Namespace) -> dict:
    """AdamW with a cosine over steps or minutes; each stream's state is carried on, for a while, from step to step."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95), fused=args.device != "cpu")
    chance, losses, step, left = random.Random(args.seed), [], 0, 0
    total, begin, progress, cache = torch.zeros((), device=args.device), time.monotonic(), 0.0, None
    while progress < 1.0:
        tokens, weights = (x.to(args.device, non_blocking=True) for x in next(batches))
        if left == 0:  # begin anew: from one window to 131,072 tokens go by in between
            cache, left = carried(model.config), int(math.exp(chance.uniform(0.0, math.log(64))))
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 200)
            group["lr"] = args.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        loss = objective(model, tokens, weights, cache, args.device)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        step, left = step + 1, left - 1
        if step == 1:
            begin = time.monotonic()  # compilation and tuning of kernels apart
        progress = step / args.steps if args.steps else (time.monotonic() - begin) / (60 * args.minutes)
        if step % 50 == 0 or progress >= 1.0:
            mean, seconds = float(total) / (step - (losses[-1][0] if losses else 0)), time.monotonic() - begin
            if not math.isfinite(mean):
                raise FloatingPointError(f"loss: {mean} after step {step}")
            losses.append((step, round(mean, 4)))
            total.zero_()
            if step % 200 == 0 or progress >= 1.0 or step == 50:
                rate = (step - 1) * args.rows * args.length / max(seconds, 1e-9)
                print(f"{args.family} {step:6} {seconds:6.0f} s  loss {mean:.4f}  {rate:,.0f} tokens/s", flush=True)
    return {"steps": step, "tokens": step * args.rows * args.length, "seconds": round(seconds), "losses": losses}


def objective(model: nn.Module, tokens: Tensor, weights: Tensor, cache: hf.DynamicCache, device: str) -> Tensor:
    """Weighted mean cross-entropy of a window [B, T + 1] of the streams."""
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        logits = model(tokens[:, :-1], past_key_values=cache, use_cache=True).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def save(model: hf.PreTrainedModel, folder: Path, record: dict) -> None:
    """The model as a Hugging Face folder that generates printable text, and the record of its training."""
    text = tokenizer()
    printable = {token for char, token in text.get_vocab().items() if char.isascii() or char in "ĠĊ"} - {PAD, EOS}
    printable -= set(text.encode("[]"))  # facts and questions
    model.generation_config.suppress_tokens = [i for i in range(VOCAB) if i not in printable]
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"attn_implementation": window.NAME}  # transformers does not write it, but reads it
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
