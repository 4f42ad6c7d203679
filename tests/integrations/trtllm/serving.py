"""TensorRT-LLM's loop in miniature over the fakes, every request beside its fp64 truth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from replayssm import GDN, KDA, KDA_SAFE, MAMBA2, Layout, reference
from replayssm.integrations.trtllm.contract import load
from tests.cases import weights
from tests.integrations.trtllm import fake_managers, fake_mixers, fakes

CLASSES = {"mamba2": "Mamba2Mixer", "gdn": "Qwen3NextGatedDeltaNet", "kda": "KimiKDALinearAttention"}
ARCHITECTURES = {"mamba2": "NemotronHForCausalLM", "gdn": "Qwen3_5ForCausalLM", "kda": "KimiLinearForCausalLM"}
ROWS = {"mamba2": MAMBA2, "gdn": GDN, "kda": KDA, "kda_safe": KDA_SAFE}
SIZES = {"mamba2": (4, 2, 16, 32), "gdn": (4, 2, 16, 32), "kda": (2, 2, 16, 16)}
MANAGERS = {
    "current": ("MambaHybridCacheManagerV2", fake_managers.CurrentV2),
    "strategy": ("MambaHybridCacheManagerV2", fake_managers.StrategyV2),
    "state": ("NemotronHybridCacheManagerV2", fake_managers.StateV2),
}
LAYERS, SLOTS, BATCH, WIDTH = 2, 7, 6, 4
BOUND = 5e-5


class Model(nn.Module):
    """The behaviour of the fake model classes: recurrent modules, and a parameter or two that a subclass must pass on."""

    def __init__(self, model_config, extra=None):
        nn.Module.__init__(self)
        self.model_config, self.extra = model_config, extra
        self.layers = nn.ModuleList(model_config.fake_modules())


def behaviours(form: str) -> dict:
    """What the fakes do."""
    name, manager = MANAGERS[form]
    mixers = {one: getattr(fake_mixers, one) for one in CLASSES.values()}
    return mixers | {
        name: manager,
        "model": Model,
        "register_auto_model": register_auto_model,
        "_promote_mamba_state_triton": fake_managers._promote_mamba_state_triton,
        "TensorWrapper": fake_managers.TensorWrapper,
        "convert_to_torch_tensor": fake_managers.convert_to_torch_tensor,
        "ReplayStateUpdateMetadata": fake_managers.ReplayStateUpdateMetadata,
        "get_kv_cache_manager_cls": get_kv_cache_manager_cls,
    }


REGISTERED: dict[str, type] = {}


def register_auto_model(name):
    """The fake of the function of this name."""
    return lambda cls: REGISTERED.setdefault(name, cls)


def get_kv_cache_manager_cls(model_config, kv_cache_config, is_disagg=None, cache_transceiver_config=None):
    """The fake of the function of this name."""
    return model_config.fake_manager


@dataclass
class Truth:
    """One request as it should be: every layer's state and convolution window in fp64."""

    states: list[Tensor]
    windows: list[Tensor]
    slotless: bool = field(default=False)


class Serving:
    """A model, a cache manager and requests.

    Args:
        form: of the cache manager.
        family: with "_safe" for Kimi's lower-bound gate.
        drafts: of a verify step; 0 decodes plainly.
        built_in: as a patched TensorRT-LLM calls us; else by registered classes.
        settings: what stands under ``model_kwargs: replayssm``.
    """

    def __init__(
        self, form, family, drafts, monkeypatch, seed=0, pool=torch.float32, device="cpu", built_in=False, **settings
    ):  # fmt: skip
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device = torch.device(device)
        self.row, family = ROWS[family], family.removesuffix("_safe")
        self.family, self.drafts, self.form = family, drafts, form
        H, G, V, K = self.sizes = SIZES[family]
        self.channels = H * V + 2 * G * K
        self.width = self.channels + {"mamba2": H, "gdn": 2 * H, "kda": H * K + H}[family]
        modules = fakes.generate(load(), form, behaviours(form))
        fakes.install(modules, monkeypatch)
        monkeypatch.setattr("tests.integrations.trtllm.serving.REGISTERED", {})
        from replayssm.integrations.trtllm import builtin, register

        self.registered = [] if built_in else register.register()
        self.selected = partial(builtin.selected, get_kv_cache_manager_cls) if built_in else None
        self.config = self._config(modules, {"mode": "require", "debug": True} | settings)
        architecture = self.config.pretrained_config.architectures[0]
        known = load().models[architecture]
        base = getattr(modules[known.module], known.class_name)
        made = partial(builtin.built, base) if built_in else REGISTERED[architecture]
        self.model = made(self.config, extra=3)
        self.manager = self._manager(pool)
        self.truth: dict[int, Truth] = {}
        self.worst = 0.0
        self._next = 0

    def _config(self, modules, settings):
        mixer = next(vars(m)[CLASSES[self.family]] for m in modules.values() if CLASSES[self.family] in vars(m))
        layout = Layout(self.row, *self.sizes)
        self.w = [weights(layout, self.generator, self.device) for _ in range(LAYERS)]
        self.conv = [self._randn(self.channels, WIDTH) / 2 for _ in range(LAYERS)]

        def build():
            return [
                mixer(2 * i + 1, self.row, self.sizes, self.w[i], self.conv[i]) for i in range(LAYERS)
            ]  # attention layers lie between

        lower = self.row.lower_bound or None
        pretrained = SimpleNamespace(
            architectures=[ARCHITECTURES[self.family]],
            linear_attn_config={"gate_lower_bound": lower},
            replayssm=settings,
        )
        name, _ = MANAGERS[self.form]
        manager = next(vars(m)[name] for m in modules.values() if name in vars(m))
        return SimpleNamespace(pretrained_config=pretrained, fake_modules=build, fake_manager=manager)

    def _manager(self, pool):
        from tensorrt_llm._torch.pyexecutor._util import get_kv_cache_manager_cls

        H, G, V, K = self.sizes
        spec = SimpleNamespace(tokens_per_gen_step=self.drafts + 1) if self.drafts else None
        extra = {"kda_replay_num_spec": self.drafts} if self.form == "current" and self.family == "kda" and self.drafts else {}
        config = SimpleNamespace(slots=SLOTS, device=self.device, enable_kv_pool_rebalance=False)
        return (self.selected or get_kv_cache_manager_cls)(self.config, None)(
            K, WIDTH, H, G, V, LAYERS, [True] * LAYERS, torch.float32, pool, config, None, num_layers=0, num_kv_heads=0,
            head_dim=1, tokens_per_block=32, max_seq_len=99, max_batch_size=BATCH, mapping=None, spec_config=spec, **extra,
        )  # fmt: skip

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    # ---- requests ------------------------------------------------------------------------------------------------------

    @property
    def recurrent(self):
        """The shim's own."""
        return self.manager.replayssm.recurrent

    def admit(self) -> int:
        """A request, with a slot that held another's NaN."""
        rid, (H, _, V, K) = self._next, self.sizes
        self._next += 1
        self.manager.fake_take(rid)
        self.truth[rid] = Truth(
            [torch.zeros(H, V, K, dtype=torch.float64, device=self.device) for _ in range(LAYERS)],
            [torch.zeros(WIDTH - 1, self.channels, dtype=torch.float64, device=self.device) for _ in range(LAYERS)],
        )
        return rid

    def finish(self, rid: int) -> None:
        """The request leaves; its slot is free."""
        del self.truth[rid]
        self.manager.fake_free_request(rid)

    def suspend(self, rid: int) -> None:
        """The request's pages leave the pool."""
        self.manager.suspend_request(self.request(rid))

    @staticmethod
    def request(rid, dummy=False):
        """What the engine calls a request."""
        return SimpleNamespace(py_request_id=rid, is_dummy=dummy, is_context_finished=True)

    # ---- a step --------------------------------------------------------------------------------------------------------

    def step(self, prompts: dict[int, int], running: list[int], dummies: int = 0, verify: bool = True) -> list[int]:
        """Prompt tokens of some requests, then a plain or a verify step of others and of rows that stand for none.

        Returns:
            Tokens kept of the running ones.
        """
        T = self.drafts + 1 if self.drafts and verify else 1
        for i in range(dummies):
            if -1 - i not in self.manager.kv_cache_map:
                self.manager.kv_cache_map[-1 - i] = SimpleNamespace(slot=SLOTS - 1, is_active=True)  # all share one slot
        padding = [self.request(-1 - i, dummy=True) for i in range(dummies)]
        contexts = [self.request(rid) for rid in prompts]
        generations = [self.request(rid) for rid in running] + padding
        batch = SimpleNamespace(context_requests=contexts, generation_requests=generations)
        self.manager.prepare_resources(batch)
        lengths = [*prompts.values(), *[T] * len(generations)]
        hidden = self._randn(LAYERS, sum(lengths), self.width)
        metadata = self._metadata(prompts, len(generations), sum(prompts.values()), sum(lengths))
        spec = SimpleNamespace(runtime_draft_len=T - 1) if self.drafts and verify else None
        outputs = []
        for layer, module in enumerate(self.model.layers):
            if self.family == "mamba2":
                module.forward(hidden[layer], metadata, metadata.mamba_metadata, spec)
            else:
                module.fake_forward(hidden[layer], metadata, spec)
            outputs.append(module.fake_done.pop())
        kept = [self.random.randint(1, T) for _ in running]
        if self.drafts and verify and generations:
            accepted = torch.tensor([1] * len(prompts) + kept + [T] * dummies, dtype=torch.int32, device=self.device)
            self.manager.update_mamba_states(metadata, accepted, self.manager.cuda_state_indices)
        self._compare(hidden, outputs, [*prompts, *running], lengths, [*prompts.values(), *kept])
        return kept

    def _metadata(self, prompts, rows, prompt_tokens, tokens):
        return SimpleNamespace(
            num_contexts=len(prompts),
            num_seqs=len(prompts) + rows,
            seq_lens=torch.zeros(len(prompts) + rows),
            num_ctx_tokens=prompt_tokens,
            num_tokens=tokens,
            kv_cache_manager=self.manager,
            mamba_metadata=SimpleNamespace(state_indices=self.manager.cuda_state_indices),
            fake_lengths=list(prompts.values()),
            fake_begun=[bool(self.truth[rid].states[0].any()) for rid in prompts],
        )

    def _compare(self, hidden, outputs, rids, lengths, kept):
        first = 0
        for rid, length, stay in zip(rids, lengths, kept, strict=False):
            of = self.truth[rid]
            for layer, module in enumerate(self.model.layers):
                x = hidden[layer, first : first + length]
                raw = module.fake_split(x)[0].double()
                convolved = reference.causal_conv(raw, self.conv[layer], None, of.windows[layer]).float()
                inputs = module.fake_inputs(convolved, x)
                wanted, _ = reference.decode(self.row, of.states[layer], **inputs, **self.w[layer])
                some = {name: one[:stay] for name, one in inputs.items()}
                _, of.states[layer] = reference.decode(self.row, of.states[layer], **some, **self.w[layer])
                of.windows[layer] = torch.cat([of.windows[layer], raw[:stay]])[-(WIDTH - 1) :]
                got = outputs[layer][first : first + length]
                error = float(((got - wanted).abs().max() / wanted.square().mean().sqrt().clamp(min=1e-3)).nan_to_num(9e9))
                self.worst = max(self.worst, error)
                assert error < self.bound, f"request {rid}, layer {layer}: {error:.1e} off the oracle"
            first += length

    bound = BOUND

    def states_of(self, rid: int) -> float:
        """How far the materialized states of a request are off its truth."""
        slot = torch.tensor([self.manager._request_id_to_state_index[rid]], dtype=torch.int32, device=self.device)
        states = self.recurrent.state.materialize(slot)[:, 0].double()
        wanted = torch.stack(self.truth[rid].states)
        return float((states - wanted).abs().max() / wanted.square().mean().sqrt())
