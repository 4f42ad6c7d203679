.PHONY: demo test lint docs patches gpu gpu-bench

demo: .venv/stamp
	.venv/bin/replayssm run

test: .venv/stamp
	ci/cpu

lint: .venv/stamp
	ci/lint

docs: .venv/stamp
	ci/docs

patches: .venv/stamp
	ci/patches

gpu:
	ci/gpu

gpu-bench:
	ci/gpu-bench

.venv/stamp: pyproject.toml setup.py ci/constraints.txt ci/engines.txt ci/sglang.txt ci/environment
	ci/environment
