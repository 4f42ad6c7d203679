"""The wheel, built by way of the sdist, holds every file of the source folders under its import name."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"core": "replayssm", "integrations": "replayssm/integrations", "bench": "replayssm/bench"}

TRAINED = [f"integrations/transformers/models/of-the-test/{name}" for name in ("config.json", "model.safetensors")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a build folder in the tree would bring back files that were deleted since."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TRAINED:  # as training/ makes them
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_file(wheel):
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {"replayssm/__init__.py", "replayssm/kernels/__init__.py", "replayssm/integrations/__init__.py"} <= expected
    assert shipped == expected | {f"replayssm/{name}" for name in TRAINED}


def test_metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.partition("<")[0].partition(">")[0] for line in required) == ["torch", "triton"]
    extras = {"cli", "export", "transformers", "sglang", "flashinfer", "trtllm", "docs", "dev"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    assert metadata["License-Expression"] == "Apache-2.0"
    entry_points = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "replayssm = replayssm.cli:main" in entry_points
