"""`replayssm report`: the committed page is what it writes, and results of every kind become figures and tables."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from replayssm.bench import advice, report, results, tables
from replayssm.bench.sglang import modes
from replayssm.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"
HEADER = {"device": "NVIDIA H200", "date": "2030-01-01", "driver": "1", "torch": "2", "triton": "3", "commit": "abcdef" * 7,
          "read_ceiling": 4.5e12}  # fmt: skip


def row(**other):
    return {"family": "gdn", "layer": "Qwen3.5-4B", "batch": 4, "T": 1, "W": 16, "state": "fp32", "read": None, "us": 50.0,
            "floor_us": 40.0, "bytes": 1e6, "layers": 3, "u": "float16",
            "peers": {"slow": 200.0, "fast": 100.0, "its replay": 60.0, "checkpointing": 55.0}} | other  # fmt: skip


def step(mode, batch, ms, **other):
    return {"model": "m", "mode": mode, "batch": batch, "ms_per_step": ms, "wall_ms_per_step": ms + 1, "tokens_per_s": 1e3 * ms,
            "max_requests": 300 if mode == "stock" else 900} | other  # fmt: skip


@pytest.fixture
def every():
    decode = [row(batch=batch, family=family) for family in tables.FAMILIES for batch in (1, 4)]
    decode += [row(batch=4, W=32, us=60.0, us_no_flush=40.0, floor_no_flush_us=30.0)]
    decode += [
        row(batch=4, state="fp32", read="e4m3", W=W, us=25.0 + W, us_no_flush=10.0, floor_no_flush_us=8.0) for W in (24, 16)
    ]
    trace = [{"layer": "Qwen3.5-4B", "batch": 256, "W": 16, "us": [1.0, 2.0, 3.0], "slowest_over_mean": 1.25}]
    return {
        "decode": {"header": HEADER, "rows": decode, "trace": trace},
        "verify": {"header": HEADER, "rows": [row(T=T, us=50.0 + T, one_step_us=80.0) for T in (1, 4)]},
        "materialize": {"header": HEADER, "rows": [row(op=op, count=n) for op in ("materialize", "fold") for n in (0, 8)]},
        "drift": {"header": HEADER, "rows": [
            {"model": "m", "format": f, "state": f, "read": None, "position": p, "kl_mean": k, "kl_p99": 9 * k,
             "top1": 0.5, "loss": 2.0, "recall": None, "state_error": [k, 2 * k]}
            for f, p, k in (("nvfp4", 1024, 1e-2), ("nvfp4", [1024, 2048], 2e-2), ("e4m3", 1024, 1e-3))
        ], "conventional": [{"model": "m", "position": [1024, 2048], "loss": 1.25}]},
        "sglang": {"header": HEADER, "rows": [
            *(step(mode, batch, ms) for batch in (256, 1) for mode, ms in zip(modes.MODES, (4.0, 3.0, 2.0), strict=True)),
            step("stock", 1, 8.0, speculative=True), step("ours", 1, 4.0, speculative=True),
            {"model": "m", "mode": "stock", "batch": 512, "speculative": True, "max_requests": 300, "skipped": "300 fit"},
            step("ours", 512, 9.0, speculative=True), step("ours", 1, 2.5, tp=2),
        ]},
    }  # fmt: skip


def test_precision_page_is_what_layouts_and_measured_errors_say():
    text = (DOCS / report.PRECISION).read_text()
    assert all(report.BEGIN.format(name) in text for name in ("helper", "scales", "advice"))
    assert text == report.advise(text, results.load()), "run `replayssm report`"
    table = advice.advice([])
    assert "| fp32 | nvfp4 | 1.32 /" in table  # 1 + 0.594 / 4, and the ring's 0.17
    assert "| not measured |" in table and "| 3.0e-03 |" in table and "times as fast" not in table


def test_advice_has_measured_times():
    rows = [row(batch=256, family=f, state="fp16+sr", read="nvfp4", W=W, us=us)
            for f, W, us in (("gdn", 16, 50.0), ("gdn", 32, 20.0), ("mamba2", 16, 40.0))]  # fmt: skip
    table = advice.advice(rows + [row(batch=1, state="fp16+sr", read="nvfp4", us=1.0)])
    assert "| times as fast, 256 requests |" in table and table.count("| 5.0 / - / 2.5 |") == 1
    assert "times as fast" not in advice.advice([row(batch=256)]), "fp32 alone is no advice on formats"


def page():
    return "\n".join(f"{report.BEGIN.format(name)}\nbefore\n{report.END}\nkept" for name in report.SECTIONS)


def test_committed_page_is_what_report_writes():
    """Numbers and figures of docs/benchmarks.md are those of bench/results; `replayssm report` makes them so."""
    text = (DOCS / report.PAGE).read_text()
    assert text == report.fill(text, results.load()), "run `replayssm report`"
    linked = set(re.findall(r"\(figures/(\w+)\.png\)", text))
    assert linked == set(report.drawable(results.load()))
    assert all((DOCS / "figures" / f"{name}.png").is_file() for name in linked)


def test_readme_s_table_is_what_report_writes(every):
    text = (DOCS.parent / report.README).read_text()
    assert report.BEGIN.format("summary") in text
    assert text == report.summarise(text, results.load()), "run `replayssm report`"
    found = report.summarise(f"a\n{report.BEGIN.format('summary')}\nold\n{report.END}\nz", every)
    assert found.startswith("a\n") and found.endswith("\nz") and "old" not in found
    assert "| Qwen3.5-4B (Gated DeltaNet) | 4 | 50 | 100 | 2.00 x | 54 | 100 | 1.85 x |" in found
    del every["verify"]
    assert "| 4 | 50 | 100 | 2.00 x | - | - | - |" in report.summarise(found, every)


def test_tables(every):
    found = report.section("decode", every)
    assert "NVIDIA H200, 2030-01-01, driver 1, torch 2, Triton 3, commit abcdefabcdef; read ceiling 4.50 TB/s." in found
    assert (
        "| Qwen3.5-4B (gdn) | fp32 | 4 | 16 | 50.0 | 40.0 | 0.80 | 2.00 (fast, 100.0 µs) | 1.10 (checkpointing, 55.0 µs) |"
        in found
    )
    assert "e4m3" not in found and "60.0" not in found, "fp32 at its fastest window alone"
    found = report.section("formats", every)
    assert (
        "| Qwen3.5-4B (gdn) | fp32, read e4m3 | float16 | 4 | 16 | 41.0 | 0.98 | 2.44 (fast, 100.0 µs) | 10.0 | 0.80 | 4.00 |"
        in found
    )
    assert "| 4 | 32 | 60.0 | 0.67 | 1.67 (fast, 100.0 µs) | 40.0 | 0.75 | 1.00 |" in found and found.count("Qwen3.5-4B") == 2
    found = report.section("verify", every)
    assert (
        "| Qwen3.5-4B (gdn) | 4 | 4 | 16 | 54.0 | 0.74 | 0.68 | 1.85 (fast, 100.0 µs) | 1.02 (checkpointing, 55.0 µs) |"
        in found
    )
    assert "| Qwen3.5-4B | 256 | 16 | 1.25 |" in report.section("trace", every)
    assert "| Qwen3.5-4B (gdn) | fold | 4 | 8 | 3 | 50.0 | 1.0 | 0.80 |" in report.section("materialize", every)
    found = report.section("drift", every)
    assert "| model | format | 1,024 tokens | 2,048 tokens |" in found
    assert "| m | nvfp4 | 1.0e-02 | 2.0e-02 |" in found and "| m | e4m3 | 1.0e-03 | - |" in found
    assert "to 2,048 tokens:" in found and "| m | nvfp4 | 1.8e-01 | 50.00% | 2.000 | - | 4.0e-02 |" in found
    assert "| m | e4m3 | 9" not in found and "| m | 1.250 |" in found
    found = report.section("engines", every)
    for line in ("m | 1 | 4.00 | 3.00 | 2.00 | 2.00 | 1.50 | 1.67 | 2,000 | 300 | 900",
                 "m, speculative | 1 | 8.00 | - | 4.00 | 2.00 | - | 1.80 | 4,000 | 300 | 900",
                 "m, speculative | 512 | - | - | 9.00 | - | - | - | 9,000 | 300 | 900",
                 "m, 2 GPUs | 1 | - | - | 2.50 | - | - | - | 2,500 | - | 900"):  # fmt: skip
        assert f"| {line} |" in found


def test_nothing_is_missing_and_every_figure_is_drawn(every, tmp_path):
    figures = pytest.importorskip("replayssm.bench.figures", exc_type=ModuleNotFoundError)
    assert report.missing(every) == []
    drawable = report.drawable(every)
    assert set(drawable) == {"speed_up", "share", "trace", "verify", "materialize", "drift", "engines"}
    for name, rows in drawable.items():
        figures.save(getattr(figures, name)(rows), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_the_figures(every):
    """What is drawn is what the rows say."""
    figures = pytest.importorskip("replayssm.bench.figures", exc_type=ModuleNotFoundError)
    drawable = report.drawable(every)

    def lines(name, panel=0):
        axes = getattr(figures, name)(drawable[name]).axes[panel]
        return {
            line.get_label(): [list(map(float, xs)) for xs in line.get_data()]
            for line in axes.lines
            if line.get_marker() != "None"
        }

    assert lines("speed_up") == {
        "Qwen3.5-4B, best conventional": [[1, 4], [2.0, 2.0]],
        "Qwen3.5-4B, best replaying": [[1, 4], [1.1, 1.1]],
    }
    assert lines("share")["Qwen3.5-4B"] == [[1, 4], [0.8, 0.8]]
    assert lines("verify")["Qwen3.5-4B, batch 4"] == [[1, 4], [51 / 80, 54 / 80]]
    assert lines("verify")["_Qwen3.5-4B, batch 4"] == [[1, 4], [55 / 80, 55 / 80]]
    assert lines("trace")["Qwen3.5-4B: slowest 1.25 x mean"] == [[0, 1, 2], [1, 2, 3]]
    assert lines("materialize", 1)["Qwen3.5-4B"] == [[0, 8], [0.8, 0.8]]
    assert lines("drift")["nvfp4"] == [[1024, 2048], [1e-2, 2e-2]]
    assert lines("engines") == {
        "stock": [[1, 256], [2.0, 2.0]], "_stock": [[1, 256], [5 / 3, 5 / 3]],
        "its own replay": [[1, 256], [1.5, 1.5]], "_its own replay": [[1, 256], [4 / 3, 4 / 3]],
        "stock, speculative": [[1], [2.0]], "_stock, speculative": [[1], [9 / 5]],
    }  # fmt: skip


def test_what_is_absent_is_said(every):
    """A file, a key of a file, or what its rows need."""
    partial = copy.deepcopy(every)
    partial["drift"]["rows"][2]["kl_mean"] = 0.0
    del partial["verify"], partial["decode"]["trace"], partial["drift"]["rows"][0]["kl_mean"]
    for one in partial["decode"]["rows"]:
        one["peers"] = {}
    assert report.missing(partial) == [
        "decode.json has no rows with peers; `replayssm bench decode` writes them",
        "decode.json has no trace; `replayssm bench decode` writes them",
        "there is no verify.json; `replayssm bench verify` writes it",
    ]
    assert (
        report.section("verify", partial) == "*Not measured yet: there is no verify.json; `replayssm bench verify` writes it.*"
    )
    found = report.section("decode", partial)
    assert "speed_up" not in found and "![share](figures/share.png)" in found and found.endswith("writes them.*")
    found = report.section("drift", partial)
    assert "| m | nvfp4 | - | 2.0e-02 |" in found and "| m | e4m3 | 0.0e+00 | - |" in found


def test_a_page_keeps_what_is_outside_its_markers(every):
    once = report.fill(page(), every)
    assert once.count("kept") == len(report.SECTIONS) and "before" not in once
    assert report.fill(once, every) == once


@pytest.mark.parametrize("change", [("report: drift", "report: drft"), (report.END, ""), ("report: trace", "report: decode")])
def test_markers_that_do_not_fit(change, every):
    with pytest.raises(ValueError, match="expected a pair of markers for each of decode, formats, trace, verify"):
        report.fill(page().replace(*change, 1), every)


def test_command(every, tmp_path):
    pytest.importorskip("matplotlib")
    del every["drift"], every["sglang"]
    (tmp_path / "results").mkdir()
    for name, one in every.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(one))
    args = ["report", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "docs")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "missing: there is no drift.json; `replayssm drift` writes it" in done.output
    assert "## Verify" in (tmp_path / "docs" / report.PAGE).read_text()
    assert CliRunner().invoke(app, args).exit_code == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "docs/figures").iterdir()}
    assert set(drawn) == {f"{name}.png" for name in ("speed_up", "share", "trace", "verify", "materialize")}
    (tmp_path / "docs" / report.PAGE).write_text(page())
    assert CliRunner().invoke(app, args).exit_code == 0
    assert (tmp_path / "docs" / report.PAGE).read_text() == report.fill(page(), results.load(tmp_path / "results"))
    assert drawn == {path.name: path.read_bytes() for path in (tmp_path / "docs/figures").iterdir()}


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "expected an object with header and rows"), ("{", "expected JSON in")], ids=["list", "cut"]
)
def test_results_that_cannot_be_read(text, message, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "decode.json").write_text(text)
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path), "--out", str(tmp_path / "docs")])
    assert done.exit_code == 2 and not (tmp_path / "docs").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("replayssm: results: ") and message in line
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "none")])
    assert done.exit_code == 2 and "results: expected a folder with decode.json" in done.stderr
