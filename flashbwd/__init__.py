"""Attention backward, and the LayerNorm backward beside it, as fast, complete and readable CUDA kernels for PyTorch."""

from __future__ import annotations

from flashbwd.attention import (
    AttentionGrads,
    Plan,
    RngState,
    attention,
    attention_backward,
    plan_attention_backward,
    use_backend,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionGrads",
    "Plan",
    "RngState",
    "__version__",
    "attention",
    "attention_backward",
    "plan_attention_backward",
    "use_backend",
]
