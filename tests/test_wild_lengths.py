"""cu_seqlens and seqused on the GPU may contradict the lengths that the host knows. The call must then end, access
only its tensors, raise no CUDA error, and not disturb the next call. Its results are undefined."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SECONDS = 120  # time limit for all lengths of a program, each of which takes milliseconds

# The program prints the name of each case before it runs, so that the last line of a hang names the case.
PROGRAM = """
import sys
import torch
import flashbwd

backend, head_dim, bias, deterministic = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "bias", sys.argv[4] == "ordered"
ROWS, HEADS, LONGEST, GUARD = 600, 3, 128 if backend == "short" else 300, 64
LENGTHS = {
    "right": [0, 300, 600],
    "longer than max_seqlen": [0, 10, 600],
    "beyond the rows": [0, 300, 5000],
    "far beyond the rows": [0, 2**30, 2**31 - 1],
    "decreasing": [0, 500, 100],
    "negative": [-40, -300, 200],
    "not from 0": [77, 200, 600],
    "overlapping": [0, 600, 300],
    "nothing": [0, 0, 0],
}
USED = {"none": None, "right": [300, 7], "beyond": [10**6, 2**31 - 1], "negative": [-3, -(2**31)]}
torch.manual_seed(0)

def rows(n, heads=HEADS, dtype=torch.bfloat16):
    return torch.randn(n, heads, head_dim, device="cuda", dtype=dtype)

def guarded():
    whole = torch.full((ROWS + 2 * GUARD, HEADS, head_dim), 7.0, device="cuda", dtype=torch.bfloat16)
    return whole, whole[GUARD : GUARD + ROWS]

def int32(values):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device="cuda")

q, k, v, dout = (rows(ROWS) for _ in range(4))
lse = torch.full((HEADS, ROWS), 6.0, device="cuda")
out = torch.zeros_like(dout)

def call(lengths_q, lengths_k, used_k):
    buffers = [guarded() for _ in range(3)]
    options = {}
    if bias:
        options["attn_bias"] = torch.zeros(1, 1, LONGEST, LONGEST, device="cuda", dtype=torch.bfloat16)
    with flashbwd.use_backend(backend):
        grads = flashbwd.attention_backward(
            dout, q, k, v, out, lse, cu_seqlens_q=int32(lengths_q), cu_seqlens_k=int32(lengths_k),
            seqused_k=int32(used_k), max_seqlen_q=LONGEST, max_seqlen_k=LONGEST, deterministic=deterministic,
            dq=buffers[0][1], dk=buffers[1][1], dv=buffers[2][1], **options,
        )
    torch.cuda.synchronize()
    for whole, _ in buffers:
        assert whole[:GUARD].eq(7).all() and whole[GUARD + ROWS :].eq(7).all(), "wrote outside a gradient"
    return [x.clone() for x in grads[:3]]

right = LENGTHS["right"]
before = call(right, right, None)
for name_q, lengths_q in LENGTHS.items():
    for name_k, lengths_k in LENGTHS.items():
        for name_used, used in USED.items():
            print(f"q {name_q}, k {name_k}, seqused_k {name_used}", flush=True)
            call(lengths_q, lengths_k, used)
after = call(right, right, None)
for old, new in zip(before, after):
    torch.testing.assert_close(new, old, rtol=2e-2, atol=2e-2)
print("done")
"""


HEAD_DIMS = [("short", d) for d in (64, 96)]
HEAD_DIMS += [("sm90", d) for d in (64, 96, 128, 192, 256)] + [("sm80", d) for d in (64, 128, 320)]
CALLS = [(*of, "plain") for of in HEAD_DIMS] + [(*of, "bias") for of in HEAD_DIMS if of != ("sm90", 256)]


@pytest.mark.parametrize("order", ["default", "ordered"])
@pytest.mark.parametrize(("backend", "head_dim", "bias"), CALLS)
def test_calls_end_inside_their_tensors_whatever_the_lengths_on_the_gpu(
    backend: str, head_dim: int, bias: str, order: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program), backend, str(head_dim), bias, order]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        pytest.fail(f"never ended: {printed.splitlines()[-1:] or ['the first call']}")
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert done.stdout.splitlines()[-1] == "done"
