"""The integration's own kernels compile for a GPU, on a machine that has none."""

import pytest

from tests import test_compile


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_100", "sm_120"))]
)
def test_own_kernels_compile(target, tmp_path):
    made = test_compile.compiled("--own", target, script="tests/integrations/flashinfer/compile_kernels.py", cache=tmp_path)
    assert {kernel for kernel, _ in made} == {"_tables_kernel", "_fold_kernel"}
