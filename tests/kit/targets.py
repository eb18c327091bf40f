"""Devices and dtypes on which functions of AlphaFold-like models are compared with float64, and how closely."""

import pytest
import torch

TARGETS = [
    pytest.param(("cpu", torch.float64), id="cpu-float64"),
    pytest.param(("cpu", torch.bfloat16), id="cpu-bfloat16"),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bfloat16", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.float16), id="cuda-float16", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.float32), id="cuda-float32", marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
