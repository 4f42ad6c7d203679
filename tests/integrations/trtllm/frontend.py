"""TensorRT's genuine Python front end on a machine that has no TensorRT: what PyPI has of it, and no builder.

PyPI's wheels hold the bindings and the lean runtime, whose library has the plugin registry. The bindings also want addresses
of three functions of libraries that PyPI does not have; a stub gives them. Everything else of those libraries stays missing,
so that building an engine fails rather than seems to work.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

WHEELS = {"tensorrt_bindings": "tensorrt-cu13-bindings", "tensorrt_lean_libs": "tensorrt-lean-cu13-libs"}
STUB = """
int getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void *logger, char const *space) { return 1; }
void *getBuilderPluginRegistry(int capability) { return 0; }
"""


def missing() -> str | None:
    """Why the front end cannot be loaded here, or None."""
    if find_spec("tensorrt") is not None:
        return None
    absent = [wheel for package, wheel in WHEELS.items() if find_spec(package) is None]
    if absent:
        return f"needs TensorRT's front end: pip install {' '.join(absent)}"
    return None if shutil.which("cc") else "needs a C compiler, cc, for a stub of TensorRT's libraries"


def load() -> None:
    """Makes ``tensorrt`` importable: the installed one, or the wheels' front end."""
    if find_spec("tensorrt") is not None:
        return
    bindings, lean = (Path(find_spec(package).origin).parent for package in WHEELS)
    folder = Path(tempfile.mkdtemp(prefix="tensorrt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = folder / "tensorrt"
    shutil.copytree(bindings, package)  # the bindings look for libraries beside themselves
    for name in ("libnvinfer", "libnvinfer_plugin"):
        (package / f"{name}.so.11").symlink_to(lean / "libnvinfer_lean.so.11")
    stub = package / "libnvonnxparser.so.11"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", stub, "-"], input=STUB, text=True, check=True)
    sys.path.insert(0, str(folder))
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # functions that are missing matter when they are called
    try:
        with warnings.catch_warnings(action="ignore"):  # of its docstrings' escapes
            import tensorrt.plugin  # noqa: F401
    finally:
        sys.setdlopenflags(flags)
