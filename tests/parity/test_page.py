"""docs/parity.md is what `replayssm report` makes of the committed results, and says what they say."""

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from replayssm.bench import matrix
from replayssm.bench.results import COMMITTED

DOCS = Path(__file__).parents[2] / "docs"


def row(**other):
    found = {"family": "gdn", "act": "float32", "state": "fp32", "read": None, "scenario": "decode", "native": False,
             "implementation": "core torch", "output_bound": 1e-6, "state_bound": 5e-7, "output_error": 3e-7,
             "state_error": 2e-7, "tokens": 9, "tokens_differing": 0}  # fmt: skip
    return found | other


def page(*rows):
    header = {"device": "A", "date": "2030-01-01", "torch": "2", "triton": "3", "commit": "abcdef" * 7}
    return matrix.fill(matrix.BARE, {"cpu": {"header": header, "rows": list(rows)}})


def test_committed_page_is_what_report_writes():
    text, found = (DOCS / matrix.PAGE).read_text(), matrix.load(COMMITTED.parent)
    assert text == matrix.fill(text, found), "run `replayssm report`"
    assert all("### " + name in text for name in found)


def test_cells():
    absent = {"absent": "it cannot", "implementation": "other"}
    text = page(
        row(), row(**absent), row(scenario="rejection", lossless_error=2e-6), row(scenario="verify", **absent),
        row(native=True, implementation="theirs", state_error=1e-2), row(native=True, implementation="none", state_error=None),
        row(scenario="migration", to="core Triton", tokens_differing=2), row(scenario="migration", to="c", **absent),
    )  # fmt: skip
    assert "| gdn, decode | 1e-06 / 5e-07 | 3e-07 / 2e-07 | [a] |" in text and "- [a] not available: it cannot" in text
    assert "| **3e-07 / 2e-07; 2e-06** |  |" in text and "gdn, verify" not in text
    assert "| **3e-07 / 1e-02** | 3e-07 / - |" in text
    assert "| core torch → core Triton | **3e-07 / 2e-07; 2 tokens** |" in text and "other → c" not in text
    assert "3 results of ours, 2 beyond their bounds; 27 greedy tokens, 2 differ." in text


def test_pages_without_results_or_markers(tmp_path):
    assert "Not run yet" in matrix.fill(matrix.BARE, {}) and matrix.load(tmp_path) == {}
    with pytest.raises(ValueError, match="expected one pair of markers"):
        matrix.fill("text", {})
    (tmp_path / "cpu").mkdir()
    for name, commit in (("parity", "a"), ("parity-bf16", "a"), ("parity-more", "b")):
        one = {"header": {"commit": commit, "date": name}, "rows": [row()]}
        (tmp_path / "cpu" / f"{name}.json").write_text(json.dumps(one))
        if commit == "a":
            assert len(matrix.load(tmp_path)["cpu"]["rows"]) == (1 if name == "parity" else 2)
    with pytest.raises(ValueError, match="parity-more.json as in the files beside it"):
        matrix.load(tmp_path)
    (tmp_path / "cpu" / "parity-a.json").write_text("[]")
    with pytest.raises(ValueError, match="expected an object with header and rows"):
        matrix.load(tmp_path)
