"""The call that causes a CUDA error raises it in Python, although torch and flashbwd each have a CUDA runtime of their
own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cases, inputs
from support import run
from torch import Tensor

pytestmark = pytest.mark.gpu

FAULTS = Path(__file__).parent / "_built" / "fault_kernels.so"

# The start of each subprocess. Device errors are tested in a subprocess, because they make a CUDA context unusable.
PRELUDE = f"""
import torch
torch.ops.load_library({str(FAULTS)!r})
ops = torch.ops.flashbwd_testing
x = torch.zeros(64, device="cuda")
ops.add_one(x)
assert x.eq(1).all()

def raised(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
"""


@pytest.fixture(scope="module")
def faults() -> Any:
    if not FAULTS.exists():
        pytest.fail(f"{FAULTS} is missing; build it with: python setup.py build_test_modules")
    torch.ops.load_library(FAULTS)
    return torch.ops.flashbwd_testing


@pytest.fixture
def x() -> Tensor:
    return torch.zeros(64, device="cuda")


def attention_works() -> None:
    problem = inputs.build(cases.BY_NAME["heads_4to2"], torch.bfloat16, "cuda")
    problem.check(*run(problem))


def in_a_process(program: str) -> None:
    assert FAULTS.exists(), f"{FAULTS} is missing; build it with: python setup.py build_test_modules"
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done"), done.stdout + done.stderr


def test_the_operator_of_an_invalid_launch_raises(faults: Any, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"flashbwd: invalid (configuration argument|argument)"):
        faults.bad_launch(x)
    assert faults.pending_error(x) == 0
    faults.add_one(x)
    torch.cuda.synchronize()
    assert bool(x.eq(1).all())
    attention_works()


def test_the_next_launch_does_not_report_an_earlier_error(faults: Any, x: Tensor) -> None:
    faults.unreported_bad_launch(x)
    assert faults.pending_error(x) != 0
    faults.add_one(x)
    torch.cuda.synchronize()
    assert bool(x.eq(1).all())
    attention_works()
    with pytest.raises(RuntimeError, match="flashbwd: invalid"):
        faults.bad_launch(x)  # reports its own error and clears the runtime
    assert faults.pending_error(x) == 0


def test_torch_does_not_see_an_error_of_this_runtime(faults: Any, x: Tensor) -> None:
    faults.unreported_bad_launch(x)
    (torch.ones(8, device="cuda") + 1).sum().item()  # torch checks its runtime's last error after each launch
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="flashbwd: invalid"):
        faults.bad_launch(x)


def test_an_error_left_in_torchs_runtime_is_not_reported_here() -> None:
    in_a_process("""
left = torch.cuda.cudart().cudaHostUnregister(x.data_ptr())  # not host memory; returned, not raised
assert int(left) != 0
ops.add_one(x)
assert ops.pending_error(x) == 0
print("done")
""")


@pytest.mark.parametrize(
    ("fault", "message"),
    [("illegal_address", "illegal memory access|misaligned address"), ("trap", "unspecified launch failure|trap")],
)
def test_an_error_on_the_device_surfaces_at_the_next_synchronisation(fault: str, message: str) -> None:
    in_a_process(f"""
import re
ops.{fault}(x)
first = raised(torch.cuda.synchronize)
assert re.search({message!r}, first), first
assert raised(lambda: (x + 1).sum().item())
print("done")
""")


def test_attention_after_a_lost_context_raises_and_does_not_exit() -> None:
    in_a_process("""
import flashbwd
q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
lse = torch.zeros(1, 2, 64, device="cuda")
flashbwd.attention_backward(q, q, q, q, q, lse)
torch.cuda.synchronize()
ops.trap(x)
assert raised(torch.cuda.synchronize)

def attention():
    flashbwd.attention_backward(q, q, q, q, q, lse)
    torch.cuda.synchronize()

assert raised(attention)
print("done")
""")


def test_wrong_lengths_on_the_device_do_not_end_the_process() -> None:
    """The host does not check lengths on the device. Wrong lengths may at most raise an exception."""
    in_a_process("""
import flashbwd
q = torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16)
lse = torch.zeros(2, 64, device="cuda")
lengths = torch.tensor([0, 2**30], dtype=torch.int32, device="cuda")

def attention():
    flashbwd.attention_backward(
        q, q, q, q, q, lse, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=64, max_seqlen_k=64
    )
    torch.cuda.synchronize()

raised(attention)
print("done")
""")
