"""Training steps of a whole transformer block, with PyTorch's gradients and with this library's.

All peers run the same model code. This library's peers also call ``flashbwd.enable()``, and its compiled peer uses the
options of ``flashbwd.integrations.inductor``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

import flashbwd
from flashbwd.bench.cases import BLOCK, BLOCK_COMPILED, DTYPES, TORCH_BLOCK, TORCH_BLOCK_COMPILED, BlockCase
from flashbwd.bench.peers import Peer, Prepared


class Attention(nn.Module):
    """Causal self-attention over (B, S, width) with GQA: groups of query heads share a KV head."""

    def __init__(self, case: BlockCase, bias: bool) -> None:
        super().__init__()
        self.head_dim = case.width // case.heads
        self.splits = [case.width, case.heads_kv * self.head_dim, case.heads_kv * self.head_dim]
        self.grouped = case.heads != case.heads_kv
        self.qkv = nn.Linear(case.width, sum(self.splits), bias=bias)
        self.proj = nn.Linear(case.width, case.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.splits, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.proj(out.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """A block of GPT-2: LayerNorm before attention and before an MLP with GELU; all layers have biases."""

    def __init__(self, case: BlockCase) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(case.width), nn.LayerNorm(case.width)
        self.attention = Attention(case, bias=True)
        self.up, self.down = nn.Linear(case.width, case.hidden), nn.Linear(case.hidden, case.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
    """A block of Llama without rotary embeddings: RMSNorm before attention and before a gated MLP; no biases."""

    def __init__(self, case: BlockCase) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(case.width), nn.RMSNorm(case.width)
        self.attention = Attention(case, bias=False)
        self.gate, self.up = (nn.Linear(case.width, case.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(case.hidden, case.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x_hat = self.norm2(x)
        return x + self.down(silu(self.gate(x_hat)) * self.up(x_hat))


SHAPES: dict[str, type[nn.Module]] = {"gpt": GPTBlock, "llama": LlamaBlock}


@dataclass(frozen=True)
class BlockInputs:
    """A block with its parameters, its input x, and the gradient of its output; both are (B, S, width)."""

    block: nn.Module
    x: Tensor
    dout: Tensor

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """Return the gradients of x and of the parameters that PyTorch computes in float32."""
        wide = copy.deepcopy(self.block).float()
        x = self.x.detach().float().requires_grad_()
        return torch.autograd.grad(wide(x), (x, *wide.parameters()), self.dout.float())


def make_inputs(case: BlockCase, device: torch.device, seed: int) -> BlockInputs:
    """Return a block with PyTorch's default initialisation, a random normal x and a random normal output gradient."""
    torch.manual_seed(seed)
    dtype = DTYPES[case.dtype]
    with device:
        block = SHAPES[case.shape](case).to(dtype)
        x, dout = (torch.randn(case.batch, case.seqlen, case.width, dtype=dtype) for _ in range(2))
    return BlockInputs(block, x.requires_grad_(), dout)


def _step(call: Callable[[Tensor], Tensor], x: BlockInputs) -> Callable[[], tuple[Tensor | None, ...]]:
    """Return a training step with AdamW. Its learning rate is 0, so every step computes the same gradients."""
    parameters = list(x.block.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=x.x.is_cuda)

    def step() -> tuple[Tensor | None, ...]:
        call(x.x).backward(x.dout)
        optimizer.step()
        grads = (x.x.grad, *(p.grad for p in parameters))
        x.x.grad = None
        optimizer.zero_grad()
        return grads

    return step


def eager(case: BlockCase, x: BlockInputs) -> Prepared:
    return Prepared(_step(x.block, x), capturable=False)


def compiled(case: BlockCase, x: BlockInputs, options: dict[str, Any] | None = None) -> Prepared:
    return Prepared(_step(torch.compile(x.block, dynamic=False, options=options), x), capturable=False)


def compiled_with_options(case: BlockCase, x: BlockInputs) -> Prepared:
    from flashbwd.integrations import inductor  # slow to import, and the other peers do not need it

    return compiled(case, x, inductor.options())


def overridden(prepare: Callable[[BlockCase, BlockInputs], Prepared], case: BlockCase, x: BlockInputs) -> Prepared:
    prepared = prepare(case, x)
    return Prepared(prepared.backward, scope=flashbwd.enable, capturable=False)


BLOCK_PEERS: tuple[Peer, ...] = (
    Peer(TORCH_BLOCK, eager),
    Peer(TORCH_BLOCK_COMPILED, compiled, compiled=True),
    Peer(BLOCK, functools.partial(overridden, eager)),
    Peer(BLOCK_COMPILED, functools.partial(overridden, compiled_with_options), compiled=True),
)
