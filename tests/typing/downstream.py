"""What a user of the package writes. pyright and mypy check it in strict mode; nothing runs it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module, Sequential

import flashbwd


def train(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flashbwd.attention(q, k, v, causal="top_left", window_size=(128, 0))
    out, lse = flashbwd.attention(q, k, v, return_lse=True)
    pairs: Tensor = flashbwd.triangle_attention(q, k, v, lse, mask=None, scale=0.5)
    print(pairs.shape)
    grads: flashbwd.AttentionGrads = flashbwd.attention_backward(out, q, k, v, out, lse)
    bias: Tensor | None = grads.dbias
    plan: flashbwd.Plan = flashbwd.plan_attention_backward(out, q, k, v, out, lse)
    reasons: list[str] = [f"{backend}: {reason}" for backend, reason in plan.reasons.items()]
    print(reasons, plan.workspace_bytes + 1)
    return grads.dq if bias is None else bias


def layers() -> Module:
    block: flashbwd.SelfAttention = flashbwd.SelfAttention(64, 4, num_kv_heads=2, causal=True)
    return Sequential(flashbwd.LayerNorm(64), block, flashbwd.RMSNorm(64))


def switch_on() -> int:
    with flashbwd.enable(norms=False), flashbwd.use_backend("auto"):
        counts: dict[str, flashbwd.OperatorStats] = flashbwd.stats(reset=True)
    flashbwd.disable()
    return sum(count.hits for count in counts.values())


def norms(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    z, h = flashbwd.dropout_add_rms_norm(flashbwd.layer_norm(x, gamma), x, gamma, dropout_p=0.1)
    return z, h
