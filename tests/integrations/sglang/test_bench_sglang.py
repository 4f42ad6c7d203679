"""`replayssm bench sglang` as far as a CPU goes: jobs as for the GPU but for options of the device."""

import pytest

from replayssm.bench.sglang import launch, modes, shapes

from .alone import alone, together
from .cpu_options import OPTIONS


def on_cpu(job):
    """The job with the CPU's options in place of the GPU's."""
    names = {one.partition("=")[0] for one in launch.GPU} | {"--load-format", "--dtype", "--mem-fraction-static"}
    kept, taking = [], False
    for one in job["options"]:
        taking = one == "--cuda-graph-bs-decode" or (taking and not one.startswith("--"))
        if not taking and one.partition("=")[0] not in names:
            kept.append(one)
    return job | {"options": [*OPTIONS, *kept]}


def rows(job, rank=0):
    from replayssm.bench.sglang import job as jobs

    from . import cpu  # noqa: F401

    return list(jobs.rows(rank, job))


def test_speed(models):
    """Both batches one after another in one process; clock and tokens, no GPU."""
    job = launch.speed(models["nemotron-h"], modes.OURS, [1, 2, 3], False, settle=1, steps=3, profiled=1, memory=0.3)
    job["options"] += ["--max-running-requests=2"]
    found = alone(rows, on_cpu(job) | {"device": "cpu", "length": 6}, plugins="replayssm")
    assert [row["batch"] for row in found] == [1, 2, 3]
    for row in found[:2]:
        assert row["wall_ms_per_step"] > 0 and row["ms_per_step"] is None and row["max_requests"] == 2
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["wall_ms_per_step"] * 1e3, rel=0.01)
    assert "skipped" in found[2]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"tp": 2}, {"separate": True}], ids=["one", "tp", "separate"])
def test_parity(models, more):
    def job(mode, **more):
        return on_cpu(launch.parity(models["nemotron-h"], mode, [1, 3], 12, 256, "float32", **more))

    stock, many = alone(rows, job(modes.STOCK)), job(modes.OURS, **more)
    ours = together(many["processes"], rows, many, plugins="replayssm")[-1]
    for a, b, batch in zip(stock, ours, (1, 3), strict=True):
        found = launch.compared(a["answers"], b["answers"], launch.TIES["float32"])
        assert found["equal"] == found["requests"] == batch and found["tokens"] == 12 * batch


def resolved(folder, options):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from . import cpu  # noqa: F401

    load_plugins()
    arguments = prepare_server_args(["--model-path", str(folder), "--skip-tokenizer-init", *options])
    arguments.resolve_once()
    return arguments.linear_attn_decode_backend, arguments.mamba_backend, arguments.enable_linear_replayssm


@pytest.mark.parametrize("mode", modes.MODES)
def test_modes(tmp_path, mode):
    """SGLang takes the options, and they mean the mode."""
    folder = shapes.write("Qwen3.5-4B", tmp_path)
    job = on_cpu(launch.speed(folder, mode, [1], False, 1, 1, 1, 0.3))
    backend, _, native = alone(resolved, folder, job["options"], plugins="replayssm" if mode == modes.OURS else "none")
    assert (backend == "replayssm") == (mode == modes.OURS) and native == (mode == modes.NATIVE)
