"""Takes the peers' kernels out of their released packages, for a GPU machine that may have no network.

Run it on any Linux machine with a package index and, for the compiled kernels, a CUDA toolkit (no GPU); then copy the folder.
Of vLLM and SGLang, which would install gigabytes, only the kernels' files are taken, with stubs for the names they import; so
the folder shadows real installations and is for a benchmark's own process alone. flash-linear-attention and FlashInfer keep
their packages, FlashInfer without sources other than those of the kernels compiled here through its own generator.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from replayssm import MAMBA2

from .work import MODELS

VERSIONS = {
    "vllm": "0.33.0",
    "sglang": "0.5.23",
    "flashinfer-python": "0.7.2.post1",
    "fla-core": "0.6.0",
    "apache-tvm-ffi": "0.1.15.post2",
}
# What FlashInfer's generator imports and runs, beside torch.
BUILD_REQUIREMENTS = "click einops filelock jinja2 ninja numpy nvidia-ml-py packaging requests tabulate tqdm".split()

_VLLM = "vllm/model_executor/layers/mamba/ops/"
_SGLANG = "sglang/kernels/ops/attention/"
_MEMBERS: dict[str, tuple[str, ...]] = {
    "vllm": tuple(
        _VLLM + name
        for name in (
            "configs/selective_state_update/",
            "mamba_ssm.py",
            "replayssm_config.py",
            "selective_state_update_replayssm_output_only.py",
            "triton_helpers.py",
        )
    ),
    "sglang": (
        *(_SGLANG + "fla/" + name for name in ("fused_recurrent.py", "op.py", "utils.py")),
        _SGLANG + "kda_packed_decode.py",
        *(
            _SGLANG + "linear/" + name
            for name in (
                "fused_recurrent_linear_replayssm.py",
                "fused_sigmoid_gating_recurrent.py",
                "gdn_replayssm_spec_decode.py",
                "kda_replayssm_spec_decode.py",
            )
        ),
        "sglang/kernels/jit/csrc/attention/kda_packed_decode.cuh",
        "sglang/kernels/jit/include/",
    ),
    "fla-core": ("fla/",),
    "apache-tvm-ffi": ("tvm_ffi/", "apache_tvm_ffi"),
    "flashinfer-python": ("flashinfer/", "flashinfer_python"),
}
# FlashInfer's generator reads these even when the object is there.
_FLASHINFER_SOURCES = ("checkpointing_ssu", "selective_state_update", "flashinfer_mamba_binding")
# Megabytes that importing the kernels used here does not touch.
_LEFT_BEHIND = (
    "flashinfer/experimental/b12x/",
    "flashinfer/experimental/cake_vsa_sm90_cute/",
    "flashinfer/fused_moe/backends/cudnn_frost/artifacts/",
    "flashinfer/moe_ep/kernel_src/",
    "tvm_ffi/3rdparty/",
    "tvm_ffi/include/",
    "tvm_ffi/src/",
)

_STUBS = {
    "vllm/envs.py": "VLLM_TUNED_CONFIG_FOLDER = None\n",
    "vllm/_custom_ops.py": "",
    "vllm/logger.py": """
        class Silent:
            def __getattr__(self, name):
                return lambda *args, **kwargs: None

        def init_logger(name):
            return Silent()
        """,
    "vllm/platforms/__init__.py": """
        import torch

        class Platform:
            def is_device_capability_family(self, capability):
                return torch.cuda.get_device_capability()[0] * 10 == capability

            def __getattr__(self, name):
                return lambda *args: False

        current_platform = Platform()
        """,
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\n\nHAS_TRITON = True\n",
    "vllm/utils/platform_utils.py": """
        import torch

        def get_device_name_as_file_name():
            return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
        """,
    "vllm/v1/attention/backends/utils.py": "NULL_BLOCK_ID = 0\n",
    "sglang/srt/utils/__init__.py": """
        import torch

        def get_device_sm():
            major, minor = torch.cuda.get_device_capability()
            return 10 * major + minor

        def is_cuda():
            return torch.cuda.is_available()

        def is_gfx95_supported():
            return False

        def is_hip():
            return False

        def is_sm90_supported():
            return is_cuda() and torch.cuda.get_device_capability()[0] == 9
        """,
    "sglang/srt/utils/common.py": """
        import torch

        torch_release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
        """,
    "sglang/kernels/jit/utils.py": """
        import functools
        from pathlib import Path

        import torch

        cache_once = functools.cache

        def is_arch_support_pdl():
            return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9

        def make_cpp_args(*args):
            return ", ".join(str(arg).lower() for arg in args)

        def load_jit(name, *args, **kwargs):
            import tvm_ffi

            return tvm_ffi.load_module(str(Path(__file__).with_name(f"{name}.so")))
        """,
}
_SGLANG_KDA = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "attention/kda_packed_decode.cuh"

namespace sglang {
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, (KdaPackedDecodeKernel<8, PDL>::run));
}
"""


def mamba2_objects(tokens: Iterable[int]) -> list[dict[str, int]]:
    """FlashInfer's objects for the measured Mamba-2 layers, each for so many tokens a step."""
    models = [model for model in MODELS.values() if model.recurrence is MAMBA2]
    return [{"V": m.V, "K": m.K, "heads_per_group": m.H // m.G, "groups": m.G, "T": T} for m in models for T in tokens]


def stage(
    out: Path,
    cache: Path,
    python: str,
    arch: str,
    cuda: Path | None,
    objects: Iterable[dict[str, int]],
    say: Callable[[str], None] = print,
) -> None:
    """Fill ``out``; wheels and compiled objects are kept in ``cache``, so that a second run is quick.

    Args:
        python: version of the GPU machine's Python, as "3.12".
        arch: its compute capability, as "9.0".
        cuda: root of the CUDA toolkit that compiles FlashInfer's and SGLang's CUDA kernels; None leaves them out.
        objects: FlashInfer's, each {"V", "K", "heads_per_group", "groups", "T"}.
    """
    for name, text in (("python", python), ("arch", arch)):
        if not all(part.isdigit() for part in text.split(".")) or text.count(".") != 1:
            raise ValueError(f"{name}: expected two numbers as in '9.0', got {text!r}")
    if cuda is not None and not (cuda / "bin" / "nvcc").is_file():
        raise ValueError(f"cuda: expected a CUDA toolkit's root with bin/nvcc, got {cuda}; --no-compile leaves its kernels out")
    wheels, cache = cache / "wheels", cache.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name, members in _MEMBERS.items():
        say(f"fetching {name} {VERSIONS[name]}")
        _extract(
            download(name, VERSIONS[name], wheels, python), out, lambda path, m=members: path.startswith(m) and _travels(path)
        )
    for path, text in _STUBS.items():
        _write(out / path, text)
    for package in ("vllm", "sglang"):
        for folder in (out / package, *(p for p in (out / package).rglob("*") if p.is_dir())):
            (folder / "__init__.py").touch()
    if cuda is None:
        shutil.rmtree(out / "flashinfer")
        return
    environment = _build_environment(cache, cuda, arch)
    say("compiling SGLang's KDA decode")
    _sglang_kda(out, cuda, arch, environment)
    for each in objects:
        say(f"compiling FlashInfer's Mamba-2 kernels for {each}")
        command = [sys.executable, str(Path(__file__).with_name("flashinfer_objects.py")), json.dumps(each)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            built = Path(line)
            if built.suffix != ".so":
                say(f"  not built: {line}")
                continue
            target = out / "flashinfer" / "data" / "aot" / built.stem
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(built, target)


def _travels(path: str) -> bool:
    """Whether a wheel's member goes along: not FlashInfer's sources of other kernels, nor what nothing here imports."""
    if path.startswith(_LEFT_BEHIND):
        return False
    if not path.startswith("flashinfer/"):
        return True
    if path.startswith("flashinfer/data/"):
        return Path(path).parent.name == "csrc" and Path(path).name.startswith(_FLASHINFER_SOURCES)
    return path.endswith(".py")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))


def download(name: str, version: str, wheels: Path, python: str) -> Path:
    """The wheel of this version, downloaded unless it is there."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not (found := sorted(wheels.glob(pattern))):
        compact = python.replace(".", "")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary=:all:", "--implementation", "cp", "--python-version", python,
                   "--abi", f"cp{compact}", "--abi", "abi3", "--abi", "none", "--dest", str(wheels)]  # fmt: skip
        for glibc in range(17, 40):
            command += ["--platform", f"manylinux_2_{glibc}_x86_64"]
        command += ["--platform", "manylinux2014_x86_64", f"{name}=={version}"]
        subprocess.run(command, check=True)
        found = sorted(wheels.glob(pattern))
    return found[-1]


def _extract(wheel: Path, out: Path, wanted: Callable[[str], bool]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out, [path for path in archive.namelist() if wanted(path)])


def _build_environment(cache: Path, cuda: Path, arch: str) -> dict[str, str]:
    """Environment of the compilations: FlashInfer with its sources, and a stub of the driver's library to link with."""
    site, stubs = cache / "build", cache / "stubs"
    if not (site / "flashinfer").is_dir():
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        name = "flashinfer-python"
        _extract(download(name, VERSIONS[name], cache / "wheels", here), site, bool)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
        subprocess.run([*install, f"apache-tvm-ffi=={VERSIONS['apache-tvm-ffi']}", *BUILD_REQUIREMENTS], check=True)
    stubs.mkdir(exist_ok=True)
    driver = ["c++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", "/dev/null", "-o", str(stubs / "libcuda.so")]
    subprocess.run(driver, check=True)
    return os.environ | {
        "PYTHONPATH": str(site),
        "PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CUDA_HOME": str(cuda),
        "FLASHINFER_CUDA_ARCH_LIST": arch + ("a" if arch == "9.0" else ""),
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stubs}",
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
    }


def _sglang_kda(out: Path, cuda: Path, arch: str, environment: dict[str, str]) -> None:
    """The CUDA kernel that SGLang compiles at first use, where its loader's stub finds it."""
    jit, includes = out / "sglang" / "kernels" / "jit", Path(environment["PYTHONPATH"]) / "tvm_ffi" / "include"
    compact, source = arch.replace(".", ""), jit / "kda_packed_decode.cu"
    suffix, pdl = ("a" if compact == "90" else ""), "true" if int(compact) >= 90 else "false"
    source.write_text(_SGLANG_KDA.replace("PDL", pdl))
    command = [str(cuda / "bin" / "nvcc"), "-shared", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC",
               f"-DSGL_CUDA_ARCH={compact}0", "-gencode", f"arch=compute_{compact}{suffix},code=sm_{compact}{suffix}",
               f"-I{jit / 'csrc'}", f"-I{jit / 'include'}", f"-I{includes}", str(source),
               "-o", str(jit / "kda_packed_decode_8.so")]  # fmt: skip
    subprocess.run(command, env=environment, check=True)
