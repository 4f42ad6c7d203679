"""FlashInfer with ReplaySSM as a backend: the recipe of ``replayssm patch flashinfer``. FlashInfer itself is not imported."""

from __future__ import annotations

import ast
from importlib import resources

from ....patches.dispatch import dispatched
from ....patches.edits import Edit
from ....patches.recipe import Recipe, Section
from ....patches.vendor import placed

ENTRY = "replayssm.integrations.flashinfer"
NEEDS = 'pytest.importorskip("replayssm")\n\n'

MESSAGE = """Add the backend "replayssm" to recurrent decode calls

`backend="replayssm"` runs `checkpointing_ssu`, `replayssm_materialize`,
`selective_state_update`, `gated_delta_rule_decode_pretranspose`,
`gated_delta_rule_mtp_ucache_flush` and the decode part of `recurrent_kda` on
Triton kernels, over the caller's own tensors, in the layouts they have. No
kernel is compiled per number of tokens or head group; fp16 activations, windows
above 16, rings with T = 1 and GPUs from SM80 are served as well.

The kernels are in {kernels}, which is imported by the
first such call. Other backends, and what "auto" chooses, do not change.
"""
KERNELS = {"depend": "the package `replayssm`", "vendor": "`flashinfer/replayssm_kernels`"}
INSTALL = {"depend": " It needs ``pip install replayssm``.", "vendor": ""}

DOCS = """ReplaySSM backend
-----------------

``backend="replayssm"`` runs :func:`checkpointing_ssu`, :func:`replayssm_materialize`, :func:`selective_state_update`,
``flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose``, ``gated_delta_rule_mtp_ucache_flush`` and the decode part of
``flashinfer.kda.recurrent_kda`` on Triton kernels. States, rings and cursors stay the caller's tensors, in the same layouts.
Any number of tokens up to the window, windows above 16, fp16 activations and GPUs from SM80 are served by one build.
Arguments that choose among FlashInfer's own kernels have no effect.{install}
"""

# Per function: where FlashInfer defines it, where we do, and what its docstring says of the backend.
FUNCTIONS = {
    "checkpointing_ssu": ("mamba/checkpointing_ssu.py", "mamba.py", ("runs Triton kernels, which need no scratch tensors.",)),
    "replayssm_materialize": ("mamba/replayssm_materialize.py", "materialize.py", ("also takes fp16 and fp32 rings.",)),
    "selective_state_update": ("mamba/selective_state_update.py", "update.py", ("runs Triton kernels, int8 states too.",)),
    "gated_delta_rule_decode_pretranspose": (
        "gdn_decode.py", "gdn.py",
        ("runs Triton kernels, with fp16 states too. Rows padded", "with negative indices get zeros."),
    ),
    "gated_delta_rule_mtp_ucache_flush": (
        "gdn_kernels/gdn_decode_bf16_wy_ucache_flush.py", "ucache.py",
        ("as ``backend`` runs Triton kernels for any T up to the window,", "fp32 states and rings of any length included."),
    ),
    "recurrent_kda": ("kda.py", "kda.py", ("runs Triton kernels for decode and verification; it has no prefill.",)),
}  # fmt: skip


def _edit(name: str) -> Edit:
    file, ours, doc = FUNCTIONS[name]
    dots = "." * (file.count("/") + 1)
    return Edit(
        file, name, f'{name} with backend="replayssm"',
        dispatched("replayssm", f"replayssm_ops().{name}", _parameters(ours, name), doc),
        (f"from {dots}replayssm import replayssm_ops",),
    )  # fmt: skip


def _parameters(file: str, name: str) -> list[str]:
    """Those of our call, from its source: it needs torch to be imported."""
    tree = ast.parse((resources.files(__package__.rpartition(".")[0]) / file).read_text())
    (call,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name)
    return [one.arg for one in (*call.args.args, *call.args.kwonlyargs)]


def recipe(style: str) -> Recipe:
    """The kernels as a dependency ("depend"), or copied into the package ("vendor")."""
    files = resources.files(__package__) / "files"
    seam, copied = placed(style, (files / "replayssm.py").read_text(), ENTRY, "flashinfer.replayssm_kernels", columns=88)
    test = (files / "test_replayssm_backend.py").read_text()
    docs = DOCS.replace("{install}", INSTALL[style])
    return Recipe(
        package="flashinfer", distribution="flashinfer-python", home=".", mark="pyproject.toml",
        message=MESSAGE.format(kernels=KERNELS[style]), edits=tuple(_edit(name) for name in FUNCTIONS),
        files={"replayssm.py": seam, **copied},
        beside={"tests/mamba/test_replayssm_backend.py": test if style == "depend" else test.replace(NEEDS, "")},
        sections=(Section("docs/api/mamba.rst", docs.splitlines()[0], docs, "a section on the backend"),),
    )  # fmt: skip
