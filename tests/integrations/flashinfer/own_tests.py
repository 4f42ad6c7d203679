"""Runs FlashInfer's own tests of these ops with its names bound to our calls, and says why what fails does.

usage: python tests/integrations/flashinfer/own_tests.py CHECKOUT OUT.json [FILE | -k EXPRESSION] ...

CHECKOUT: a checkout of FlashInfer's repository, or its tests/ folder's part of one; nothing of it is in ours. FlashInfer itself
must be importable from elsewhere, with einops and pytest, on a CUDA machine. FILE: below CHECKOUT/tests, default all of FILES.
OUT.json takes every test's outcome; the table counts tests that reached our calls.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, __file__.rsplit("/", 4)[0])

FILES = (
    "mamba/test_checkpointing_ssu.py",
    "mamba/test_replayssm_materialize.py",
    "mamba/test_selective_state_update_stp.py",
    "mamba/test_selective_state_update_mtp.py",
    "mamba/test_selective_state_update_varlen.py",
    "gdn/test_decode_ucache.py",
    "gdn/test_decode_delta_rule.py",
    "gdn/test_decode_pretranspose_noncontiguous_pool.py",
    "gdn/test_decode_pretranspose_bf16_padded_pool.py",
    "kda/test_recurrent_kda.py",
)
# What we refuse, or do, otherwise than FlashInfer: docs/flashinfer.md. The first that an error's text fits.
REASONS = (
    (r"rand_seed: expected None for a state of torch\.(bfloat16|float32)", "a seed for a state that rounds to nearest"),
    (r"intermediate_state_indices: expected .* got None", "snapshots without their indices"),
    (r"DID NOT RAISE", "FlashInfer refuses what we can do"),
    (r"Regex pattern did not match|expected at least 2 T", "refused with another error than FlashInfer's"),
    (r"A: expected one value a head|D: expected one value a head", "weights that differ within a head"),
    (r"supported are multiples of 16 up to 256", "a dimension that is no multiple of 16"),
    (r"FileNotFoundError.*gdn_decode_bf16_wy_ucache", "loads a kernel of FlashInfer's by its path"),
    (r"No module named", "something the test needs is not installed"),
)


class Ours:
    """Binds FlashInfer's names before tests are imported, notes which tests reach our calls and how they end."""

    def __init__(self) -> None:
        self.calls, self.results = 0, []

    def pytest_configure(self, config) -> None:
        from replayssm.integrations import flashinfer as fi
        from replayssm.integrations.flashinfer import gdn, kda, mamba, materialize, ucache, update

        def counting(checked):
            def check(*args):
                self.calls += 1
                return checked(*args)

            return check

        for module in (gdn, kda, mamba, materialize, ucache, update):
            module.checked = counting(module.checked)
        self.installed = fi.install()
        self.flush = fi.gated_delta_rule_mtp_ucache_flush

    def pytest_collection_modifyitems(self, items) -> None:
        for item in items:  # this file loads its kernel by path
            if hasattr(item.module, "_load_flush"):
                item.module._load_flush = lambda arm: SimpleNamespace(gated_delta_rule_mtp_ucache_flush=self.flush)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.before = self.calls
        return (yield)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr) if report.longrepr else ""
            self.results.append(
                {"test": report.nodeid, "outcome": report.outcome, "ours": self.calls > self.before, "text": text[-2000:]}
            )

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            text = str(report.longrepr)[-2000:]
            self.results.append({"test": report.nodeid, "outcome": "not collected", "ours": False, "text": text})


def reason(text: str) -> str:
    """Why a test failed, as far as it is on purpose."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return next((why for pattern, why in REASONS if re.search(pattern, text)), "unexplained: " + (errors or [text])[0][:160])


def main(checkout: Path, out: Path, arguments: list[str]) -> None:
    """Run, write ``out``, print a table."""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp())
    options = arguments[arguments.index("-k") :] if "-k" in arguments else []
    names = arguments[: len(arguments) - len(options)] or FILES
    files = [path for name in names if (path := checkout.resolve() / "tests" / name).is_file()]
    ours = Ours()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)  # FlashInfer's sources in a checkout are not its package
        (Path(empty) / "pytest.ini").write_text("[pytest]\n")
        plain = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", "pytest.ini", "--rootdir", str(checkout.resolve())]
        pytest.main([*plain, "--tb=short", *map(str, files), *options], plugins=[ours])
    for one in ours.results:
        if one["outcome"] in ("failed", "not collected"):
            one["reason"] = reason(one["text"])
    import flashinfer
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"flashinfer": flashinfer.__version__, "device": device, "ops": ours.installed.ops, "absent": ours.installed.absent}
    out.write_text(json.dumps(about | {"tests": ours.results}, indent=1))
    table(ours.results)


def table(results: list[dict]) -> None:
    """Counts of each file, and reasons."""
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for one in results:
        reached = one["ours"] or (one["outcome"] == "failed" and not one["reason"].startswith("unexplained"))
        counts[one["test"].partition("::")[0]][one["outcome"] if reached else f"{one['outcome']}, not ours"] += 1
    for file, of in counts.items():
        print(f"{file}: {', '.join(f'{n} {outcome}' for outcome, n in sorted(of.items()))}")
    total = sum(counts.values(), collections.Counter())
    passed, failed = total["passed"], total["failed"]
    print(f"reached our calls: {passed} of {passed + failed} pass ({100 * passed / max(1, passed + failed):.1f} %)")
    why = collections.Counter(one["reason"] for one in results if "reason" in one)
    for text, n in why.most_common():
        print(f"{n:6d}  {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).resolve(), sys.argv[3:])
