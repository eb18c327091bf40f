"""The `kernels` package of Hugging Face loads a wheel that is written as a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed package goes before the one of the tree

import flashbwd  # noqa: E402
from scripts import kernels_layout  # noqa: E402

FOLDER = Path(flashbwd.__file__).parent
CUDA_VARIANT = "torch-stable-abi210-cu130-x86_64-linux"
CPU_VARIANT = "torch-stable-abi210-cpu-x86_64-linux"


def wheel(folder: Path, *, kernels: bool) -> Path:
    """A wheel of the package under test."""
    path = folder / f"flashbwd-{flashbwd.__version__}-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in FOLDER.rglob("*"):
            if file.suffix in (".py", ".so") and file.name != "_C_cuda.so":
                archive.write(file, file.relative_to(FOLDER.parent))
        if kernels:
            archive.writestr(kernels_layout.KERNELS, b"")
    return path


def python(program: str, folder: Path, **environment: str) -> str:
    """The output of a program in a process that does not see the package under test."""
    hidden = f"import sys; sys.path = [p for p in sys.path if p not in ({str(ROOT)!r}, {str(FOLDER.parent)!r})]\n"
    hidden += "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    command = [sys.executable, "-c", hidden + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("kernels", "variants"), [(False, {CPU_VARIANT}), (True, {CPU_VARIANT, CUDA_VARIANT})])
def test_a_wheel_has_a_variant_for_the_cpu_and_with_kernels_one_for_cuda(
    tmp_path: Path, kernels: bool, variants: set[str]
) -> None:
    written = kernels_layout.write_layout(wheel(tmp_path, kernels=kernels), tmp_path / "kernel")
    assert {path.name for path in written} == variants
    for path in written:
        metadata = json.loads((path / "metadata.json").read_text())
        assert metadata["backend"]["type"] == ("cuda" if path.name == CUDA_VARIANT else "cpu")
        assert (path / kernels_layout.KERNELS).exists() is (path.name == CUDA_VARIANT)


def test_a_file_that_is_no_wheel_of_flashbwd_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a wheel of flashbwd"):
        kernels_layout.write_layout(tmp_path / "torch-2.11.0-cp311-cp311-linux_x86_64.whl", tmp_path)


def test_the_kernels_package_loads_the_layout(tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    kernels_layout.write_layout(wheel(tmp_path, kernels=False), tmp_path / "kernel")
    program = """
from pathlib import Path
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path("kernel"), backend="cpu")
q, k, v = torch.randn(3, 1, 8, 2, 16, dtype=torch.float64).unbind()
x, y = q.clone().requires_grad_(), q.clone().requires_grad_()
kernel.attention(x, k, v).sum().backward()
torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (y, k, v))).sum().backward()
torch.testing.assert_close(x.grad, y.grad)
assert callable(kernel.attention_forward)  # the form that Transformers calls
print(sys.modules["flashbwd"].__file__)
"""
    variant = tmp_path / "kernel" / "build" / CPU_VARIANT
    assert python(program, tmp_path) == str(variant / "flashbwd" / "__init__.py")
