"""Packs SGLang and what it imports, for a GPU machine with torch and Triton but no network.

0.5.17 is the newest SGLang whose compiled kernels load with torch 2.11. Left out, for size: FlashAttention, CUTLASS and
kernels of other GPUs; so `launch.GPU` chooses Triton's.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..stage import download

PACKAGES = {
    "sglang": "0.5.17", "sglang-kernel": "0.4.5", "flashinfer-python": "0.6.15.post1", "apache-tvm-ffi": "0.1.11",
    "transformers": "5.12.1", "tokenizers": "0.22.2", "compressed-tensors": "0.20.1", "gguf": "0.19.0", "httpx": "0.28.1",
    "openai": "2.6.1", "pydantic": "2.14.4", "pydantic-core": "2.50.5", "torch-memory-saver": "0.0.10", "xgrammar": "0.2.9",
    "annotated-types": "0.8.0", "decorator": "5.3.1", "dill": "0.4.1", "distro": "1.9.0", "easydict": "1.13",
    "fastapi": "0.165.0", "interegular": "0.3.3", "jiter": "0.19.0", "loguru": "0.7.3", "msgspec": "0.23.0",
    "opentelemetry-api": "1.45.2", "orjson": "3.13.0", "partial-json-parser": "0.2.1.1.post7", "pybase64": "1.5.1",
    "python-multipart": "0.0.32", "pyzmq": "27.3.0", "sentencepiece": "0.2.1", "setproctitle": "1.3.8", "sniffio": "1.3.1",
    "starlette": "1.10.0", "typing-inspection": "0.4.5", "uvicorn": "0.54.0", "watchfiles": "1.2.0",
}  # fmt: skip
_LEFT_OUT = ("flash_ops", "infllm_ops", "flashmla_ops", "/sm100/", "flashinfer/data/cutlass/", "flashinfer/data/spdlog/")
_NOTEBOOKS = """
def display(*args, **kwargs): pass
def clear_output(*args, **kwargs): pass
class HTML(str): pass
class Markdown(str): pass
class Image: pass
"""


def stage(out: Path, cache: Path, python: str, say: Callable[[str], None] = print) -> Path:
    """Writes ``out``/sglang.tar.xz, about 47 MB; wheels are kept in ``cache``. Returns the archive.

    Args:
        python: version of the GPU machine's Python, as "3.12".
    """
    site = out / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for name, version in PACKAGES.items():
        say(f"fetching {name} {version}")
        with zipfile.ZipFile(download(name, version, cache / "wheels", python)) as wheel:
            wheel.extractall(site, [path for path in wheel.namelist() if not any(part in path for part in _LEFT_OUT)])
    for data in list(site.glob("*.data")):
        for part in ("purelib", "platlib"):
            if (data / part).is_dir():
                shutil.copytree(data / part, site, dirs_exist_ok=True)
        shutil.rmtree(data)
    # SGLang imports it for notebooks, and it brings fifteen packages.
    (site / "IPython").mkdir()
    (site / "IPython/__init__.py").touch()
    (site / "IPython/display.py").write_text(_NOTEBOOKS)
    archive = out / "sglang.tar.xz"
    say(f"packing {archive}")
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        packed.add(site, arcname=".")
    shutil.rmtree(site)
    return archive
