"""TensorRT-LLM with ReplaySSM built in: the recipe of ``replayssm patch trtllm``. TensorRT-LLM itself is not imported."""

from __future__ import annotations

from importlib import resources

from ....patches.edits import Edit, decorated, fields
from ....patches.recipe import Recipe, Section
from ....patches.vendor import placed

ENTRY = "replayssm.integrations.trtllm.builtin"

MESSAGE = """Add kv_cache_config.mamba_replay: ReplaySSM decode for recurrent layers

`kv_cache_config.mamba_replay: {{window: 16}}` decodes Mamba-2, Gated DeltaNet
and KDA layers of the PyTorch backend from a checkpoint of the state and a ring
of the inputs since, which is folded into the state once per window: plain
decode as well as verification of drafts.

The recurrence and its kernels are in {kernels}, which is
imported where the field is set and nowhere else.
"""
KERNELS = {"depend": "the package `replayssm`", "vendor": "`_torch/replayssm_kernels`"}
INSTALL = {"depend": " It needs `pip install replayssm`.", "vendor": ""}

OPTION = """
mamba_replay: Optional[MambaReplayConfig] = Field(
    default=None,
    status="prototype",
    description="ReplaySSM decode of recurrent layers; unused if unset.",
)
"""

DOCS = """## ReplaySSM for Recurrent Layers

`mamba_replay` in `kv_cache_config` decodes recurrent layers (Mamba-2, Gated DeltaNet, KDA) from a checkpoint of their state \
and a ring of the inputs since. The ring is folded into the state once per window, so that most steps do not write it; \
drafts are verified from the ring.{install}

```yaml
kv_cache_config:
  mamba_replay:
    window: 16
```
"""

IMPORT = "from .. import replayssm"


def _around(file: str, anchor: str, decorator: str, what: str) -> Edit:
    return Edit(file, anchor, what, decorated(f"replayssm.{decorator}"), (IMPORT,))


EDITS = (
    Edit(
        "llmapi/llm_args.py", "KvCacheConfig", "the field kv_cache_config.mamba_replay", fields(OPTION),
        ("from .mamba_replay_config import MambaReplayConfig",),
    ),
    _around(
        "_torch/pyexecutor/model_loader.py", "ModelLoader._load_and_validate_config", "configured",
        "the loaded configuration carries what the field says",
    ),
    _around(
        "_torch/models/modeling_auto.py", "AutoModelForCausalLM.from_config", 'around("built")',
        "recurrent modules of a built model decode with ReplaySSM",
    ),
    _around(
        "_torch/pyexecutor/_util.py", "get_kv_cache_manager_cls", 'around("selected")',
        "the cache manager's recurrent state is ReplaySSM's",
    ),
)  # fmt: skip


def recipe(style: str) -> Recipe:
    """The kernels as a dependency ("depend"), or copied into the package ("vendor")."""
    folder = resources.files(__package__) / "files"

    def text(name: str) -> str:
        return (folder / name).read_text()

    data = ["integrations/trtllm/contract.yaml"]
    seam, copied = placed(style, text("replayssm.py"), ENTRY, "tensorrt_llm._torch.replayssm_kernels", columns=100, data=data)
    docs = DOCS.replace("{install}", INSTALL[style])
    return Recipe(
        package="tensorrt_llm", distribution="tensorrt-llm", home=".", mark="setup.py",
        message=MESSAGE.format(kernels=KERNELS[style]), edits=EDITS,
        files={
            "_torch/replayssm.py": seam, "llmapi/mamba_replay_config.py": text("mamba_replay_config.py"), **copied,
        },
        beside={"tests/unittest/_torch/modules/mamba/test_mamba_replay.py": text("test_mamba_replay.py")},
        sections=(Section("docs/source/features/kvcache.md", docs.splitlines()[0], docs, "a section on the field"),),
    )  # fmt: skip
