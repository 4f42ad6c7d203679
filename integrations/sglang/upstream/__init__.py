"""SGLang with ReplaySSM built in: the recipe of ``replayssm patch sglang``. SGLang itself is not imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any

from ....patches.edits import Edit, choice, decorated, entry, fields, statement
from ....patches.recipe import Recipe, Section
from ....patches.vendor import placed

MODULE = "sglang.srt.layers.attention.linear.replayssm"
ENTRY = "replayssm.integrations.sglang.builtin"
IMPORT = f"from {MODULE.rpartition('.')[0]} import replayssm"
ARGUMENTS = "srt/arg_groups/fields/exec_.py"
ALL_ARGUMENTS = "srt/server_args.py"
COMPONENTS = "srt/mem_cache/unified_cache/components"

MESSAGE = """Add ReplaySSM decode backends for GDN, KDA and Mamba-2 layers

`--linear-attn-decode-backend replayssm` and `--mamba-backend replayssm` decode
recurrent layers from a checkpoint of the state and a ring of the inputs since,
which is folded into the state once per window. Draft tokens are verified from
the ring, without a state per draft. Prefill, prefix cache, retraction and
transfers find exact states.

{kernels}
imported in servers that choose it and in no others; with the options off no
code path changes.
"""
KERNELS = {
    "depend": "The recurrence, its kernels and the pool are in the package `replayssm`, which is",
    "vendor": "The recurrence, its kernels and the pool are in `replayssm_kernels`, which is",
}
INSTALL = {"depend": " Install the kernels with `pip install replayssm`.", "vendor": ""}

OPTIONS = """
replayssm_window: A[
    Optional[int],
    "Most tokens between folds of a request's recurrent state with the replayssm backends (default: 16); at least the draft tokens of a step.",
] = None
replayssm_checkpoint: A[
    Optional[str],
    Arg(
        help="Format of the recurrent states with the replayssm backends; fp16+sr rounds stochastically. If not set, follows --mamba-ssm-dtype or the model.",
        choices=["fp32", "bf16", "fp16", "fp16+sr"],
    ),
] = None
replayssm_read: A[
    Optional[str],
    Arg(
        help="Format of a copy of the recurrent states that decoding reads with the replayssm backends (default: none).",
        choices=["e4m3", "int8", "nvfp4"],
    ),
] = None
replayssm_u: A[
    Optional[str],
    Arg(
        help="Dtype of the delta rule's readout helper with the replayssm backends (default: float16, with float32 activations float32).",
        choices=["fp32", "bf16", "fp16"],
    ),
] = None
"""  # noqa: E501 - SGLang writes helps in one line

DOCS = """## ReplaySSM for recurrent layers

`--linear-attn-decode-backend replayssm` (GDN, KDA) and `--mamba-backend replayssm` (Mamba-2) decode from a checkpoint of \
the recurrent state and a ring of the inputs since. The ring is folded into the state once per window \
(`--replayssm-window`, default 16), so that most steps do not write the state. Draft tokens are verified from the ring, \
without a state per draft. `--replayssm-checkpoint` sets the states' format, `--replayssm-read` adds a compact copy that \
decoding reads.{install} CUDA only.

```bash
python -m sglang.launch_server --model-path Qwen/Qwen3-Next-80B-A3B-Instruct --linear-attn-decode-backend replayssm
```
"""


def _around(file: str, anchor: str, hook: str, what: str, **options: Any) -> Edit:
    return Edit(file, anchor, what, decorated(f'replayssm.around("{hook}")'), (IMPORT,), **options)


def _become(file: str, backend: str) -> Edit:
    what = f"{backend} over a pool of ReplaySSM becomes ReplaySSM's"
    return Edit(file, f"{backend}.__init__", what, statement("replayssm.become(self, model_runner)"), (IMPORT,))


GDN = "srt/layers/attention/linear/gdn_backend.py"
KDA = "srt/layers/attention/linear/kda_backend.py"
HYBRID = "srt/layers/attention/hybrid_linear_attn_backend.py"
DISPATCH = "an own decode backend is no error: ReplaySSM's kernel takes the place of Triton's"

VALIDATED = "the options are validated where the Mamba backend's are"
DONATED = "a request's ring is folded before the prefix cache takes its slot"


def _argument(anchor: str, what: str, change: Callable[[Any], Any], earlier: Callable[[Any], Any]) -> Edit:
    """Of a group of server arguments; to 0.5.19 all of them are fields of one class."""
    of_all = f"ServerArgs.{anchor}".rstrip(".")
    return Edit(
        ARGUMENTS, f"ExecMamba.{anchor}".rstrip("."), what, change, otherwise=Edit(ALL_ARGUMENTS, of_all, what, earlier)
    )


EDITS = (
    _argument("mamba_backend", "--mamba-backend replayssm", *[choice("replayssm")] * 2),
    _argument("linear_attn_decode_backend", "--linear-attn-decode-backend replayssm", *[choice("replayssm")] * 2),
    _argument(
        "", "options --replayssm-window, -checkpoint, -read, -u",
        fields(OPTIONS), fields(OPTIONS.replace("\n] = None", '\n    NS("exec.mamba"),\n] = None')),
    ),
    Edit(
        "srt/arg_groups/mamba_hook.py", "handle_mamba_backend", VALIDATED,
        statement("replayssm.resolve(server_args)", first=True), (IMPORT,),
        otherwise=Edit(  # to 0.5.18
            ALL_ARGUMENTS, "ServerArgs._handle_mamba_backend", VALIDATED,
            statement("replayssm.resolve(self)", first=True), (IMPORT,),
        ),
    ),
    Edit(
        "kernels/ops/mamba/triton_ops/ssu_dispatch.py", "_BACKEND_REGISTRY", "Mamba-2's state update by name",
        entry("replayssm", "replayssm.state_update"), (IMPORT,),
    ),
    _around(GDN, "GDNKernelDispatcher.__init__", "dispatch", DISPATCH),
    _become(GDN, "GDNAttnBackend"),
    _around(KDA, "KDAKernelDispatcher.__init__", "dispatch", DISPATCH),
    _become(KDA, "KDAAttnBackend"),
    _become(HYBRID, "Mamba2AttnBackend"),
    _around(
        HYBRID, "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify", "commit",
        "accepted drafts move the ring's cursors; convolution windows stay SGLang's",
    ),
    _around(
        "srt/speculative/spec_utils.py", "commit_mamba_states_after_verify", "accept",
        "which drafts of a tree were accepted is kept for the commit",
    ),
    _around(
        "srt/mem_cache/kv_cache_configurator.py", "KVCacheConfigurator._handle_max_mamba_cache", "size",
        "the memory budget counts rings, and no state per draft",
    ),
    _around(
        "srt/mem_cache/memory_pool.py", "HybridReqToTokenPool._init_mamba_pool", "make_pool",
        "the pool has rings beside its states",
    ),
    _around(
        f"{COMPONENTS}/mamba.py", "MambaComponent.prepare_for_caching_req", "donate", DONATED,
        otherwise=_around(f"{COMPONENTS}/mamba_component.py", "MambaComponent.prepare_for_caching_req", "donate", DONATED),
    ),
    _around(  # to 0.5.20
        "srt/mem_cache/mamba_radix_cache.py", "MambaRadixCache.cache_finished_req", "donate", DONATED, optional=True,
    ),
    Edit(
        "srt/observability/metrics_collector.py", "SchedulerMetricsCollector.log_stats",
        "with --enable-metrics, what ReplaySSM did is shown with SGLang's own values",
        statement("replayssm.show(self)"), (IMPORT,),
    ),
    _around(
        "srt/disaggregation/decode.py", "DecodeTransferQueue._commit_transfer_to_req", "arrive",
        "a state that comes from a prefill server gets its compact copy",
    ),
)  # fmt: skip


def recipe(style: str) -> Recipe:
    """The kernels as a dependency ("depend"), or copied into the package ("vendor")."""
    text = partial(_text, resources.files(__package__) / "files")
    seam, copied = placed(style, text("replayssm.py"), ENTRY, f"{MODULE}_kernels", columns=88)
    docs = DOCS.replace("{install}", INSTALL[style])
    return Recipe(
        package="sglang", distribution="sglang", home="python", mark="python/pyproject.toml",
        message=MESSAGE.format(kernels=KERNELS[style]), edits=EDITS,
        files={f"{MODULE.partition('.')[2].replace('.', '/')}.py": seam, **copied},
        beside={"test/registered/unit/layers/test_replayssm_backend.py": text("test_replayssm_backend.py")},
        sections=(
            Section(
                "docs_new/docs/advanced_features/attention_backend.mdx", docs.splitlines()[0], docs,
                "a paragraph on the backends and their options",
            ),
        ),
    )  # fmt: skip


def _text(folder: resources.abc.Traversable, name: str) -> str:
    return (folder / name).read_text()
