"""Passes over Inductor's graphs that make compiled models use kernels of this library.

``NormsOfBranches`` replaces a norm at the start of a residual branch, ``x + f(norm(x))``. This library's backward adds
both parts of x's gradient and sums the gradients of the parameters in one pass over the rows. If the output of the norm
has several users, their gradients must be added first. Inductor does that in its own norm kernel, so the pass leaves
these norms alone.

``GradientsInOne`` handles attention whose q, k and v are parts of one projection. The kernels write dq, dk and dv
directly into the gradient of the projection's output.

``FlexGradients`` replaces the backward of FlexAttention (``flashbwd.integrations.flex_pass``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from flashbwd import _ops
from flashbwd.attention import attention_backward
from flashbwd.integrations.flex_pass import flex_pass_key, replace_flex_backwards
from flashbwd.layer_norm import default_eps
from flashbwd.norm_backward import layer_norm_backward, rms_norm_backward

__all__ = ["FlexGradients", "GradientsInOne", "NormsOfBranches", "options"]

Node = Any  # fx.Node, whose arguments are of every type


def options() -> dict[str, Any]:
    """All passes, for ``torch.compile(model, options=...)``."""
    return {
        "pre_grad_custom_pass": NormsOfBranches(),
        "post_grad_custom_pre_pass": FlexGradients(),
        "post_grad_custom_post_pass": GradientsInOne(),
    }


class _Pass(CustomGraphPass):
    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


# ---- norms ----


class _RMSNormOfBranch(torch.autograd.Function):
    """Returns RMSNorm of x, for the branch, and x itself, so that the backward gets both parts of x's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        z, rs = torch.ops.flashbwd.rms_norm(x, gamma, eps, False)
        ctx.save_for_backward(x, rs, gamma)
        return z, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
        x, rs, gamma = ctx.saved_tensors
        grads = rms_norm_backward(dz, x, rs, gamma, dresidual=dx, output_mask=ctx.needs_input_grad[:2])
        return grads.dx, grads.dgamma, None


class _LayerNormOfBranch(torch.autograd.Function):
    """Returns LayerNorm of x, for the branch, and x itself, so that the backward gets both parts of x's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        z, mu, rs = torch.ops.flashbwd.layer_norm(x, gamma, beta, eps, False)
        ctx.save_for_backward(x, mu, rs, gamma)
        return z, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
        x, mu, rs, gamma = ctx.saved_tensors
        grads = layer_norm_backward(dz, x, mu, rs, gamma, dresidual=dx, output_mask=ctx.needs_input_grad[:3])
        return grads.dx, grads.dgamma, grads.dbeta, None


def _rms_norm(x: Tensor, _: Any, weight: Tensor | None = None, eps: float | None = None) -> tuple[Tensor, Tensor]:
    return _RMSNormOfBranch.apply(x, weight, default_eps(x.dtype) if eps is None else eps)


def _layer_norm(
    x: Tensor, _: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return _LayerNormOfBranch.apply(x, weight, bias, eps)


_NORMS: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    torch.rms_norm: _rms_norm,
    torch.nn.functional.rms_norm: _rms_norm,
    torch.nn.functional.layer_norm: _layer_norm,
}


class NormsOfBranches(_Pass):
    """Replaces norms whose output has one user and whose input a later node reads again.

    Runs on the graph that Dynamo captures, before autograd.
    """

    def __call__(self, graph: fx.Graph) -> None:
        place = {node: at for at, node in enumerate(graph.nodes)}
        for norm, at in place.items():
            if norm.op != "call_function" or norm.target not in _NORMS or len(norm.users) != 1 or not _is_ours(norm):
                continue
            x: Node = norm.args[0]
            behind = [user for user in x.users if place.get(user, 0) > at]
            if not behind:
                continue
            with graph.inserting_before(norm):
                both = graph.call_function(_NORMS[norm.target], norm.args, norm.kwargs)
                z, passed_on = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
            z.meta, passed_on.meta = dict(norm.meta), dict(x.meta)
            both.meta = {**norm.meta, "example_value": (norm.meta["example_value"], x.meta["example_value"])}
            for user in behind:
                user.replace_input_with(x, passed_on)
            norm.replace_all_uses_with(z)
            graph.erase_node(norm)


def _is_ours(norm: Node) -> bool:
    """Whether the norm runs on CUDA over the last dimension, with all tensors in one dtype, and needs a gradient."""
    if len(norm.args) < 2 or not isinstance(norm.args[0], fx.Node) or "input" in norm.kwargs:
        return False
    nodes = [norm, *(a for a in (*norm.args, *norm.kwargs.values()) if isinstance(a, fx.Node))]
    z, x, *parameters = (node.meta.get("example_value") for node in nodes)
    if not isinstance(x, Tensor) or not isinstance(z, Tensor) or not z.requires_grad or not _runs_on(x.device):
        return False
    if any(not isinstance(value, Tensor) or value.dtype != x.dtype for value in (z, *parameters)):
        return False
    return tuple(norm.args[1]) == tuple(x.shape[-1:])


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda"


# ---- attention ----


class FlexGradients(_Pass):
    """Replaces PyTorch's backward of FlexAttention wherever a kernel of this library computes it.

    Runs on the graph after autograd. :func:`flashbwd.stats` counts the calls, and the reasons why others stay.
    """

    def __call__(self, graph: fx.Graph) -> None:
        replace_flex_backwards(graph)

    def uuid(self) -> Any:
        return flex_pass_key()


class GradientsInOne(_Pass):
    """Replaces an attention backward whose dq, dk and dv are concatenated to (B, S, columns).

    Runs on the graph after autograd. Attention with a bias or dropout is left alone.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for cat in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
            backward = _attention_joined_by(cat)
            if backward is None:
                continue
            with graph.inserting_before(cat):
                joined = graph.call_function(
                    torch.ops.flashbwd.attention_backward_in_one.default,
                    (*backward.args[:6], backward.kwargs.get("scale"), backward.args[14]),
                )
            joined.meta = dict(cat.meta)
            cat.replace_all_uses_with(joined)
            _erase(graph, cat, backward)


def _erase(graph: fx.Graph, node: Node, last: Node) -> None:
    """Erase a node without users, and then each of its inputs that has no users left, up to and including ``last``.

    PyTorch's own dead code elimination would keep ``last``, because it regards the operator as one that draws random
    numbers.
    """
    inputs = [] if node is last else node.all_input_nodes
    graph.erase_node(node)
    for read in inputs:
        if not read.users:
            _erase(graph, read, last)


def _attention_joined_by(cat: Node) -> Node | None:
    """The cuDNN attention backward whose dq, dk and dv ``cat`` concatenates, if they have no other users; else None."""
    parts, dim = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    if not isinstance(parts, (list, tuple)) or len(parts) != 3 or dim not in (2, -1):
        return None
    gradients = [gradient for gradient in map(_heads_side_by_side, parts) if gradient is not None]
    backward = gradients[0].args[0] if gradients else None
    if backward is None or backward.target is not _AFTER_CUDNN:
        return None
    if [gradient.args for gradient in gradients] != [(backward, i) for i in range(3)]:
        return None
    bias, cu_seqlens, dropout_p = (backward.args[i] for i in (8, 9, 13))
    return backward if bias is None and cu_seqlens is None and dropout_p == 0.0 else None


_AFTER_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def _heads_side_by_side(part: Node) -> Node | None:
    """The tuple element (B, H, S, D) that ``part`` views as (B, S, H * D), if it has no other users; else None."""
    if part.target not in _VIEWS or part.meta["val"].dim() != 3:
        return None
    permuted = part.args[0]
    if permuted.target is not torch.ops.aten.permute.default or list(permuted.args[1]) != [0, 2, 1, 3]:
        return None
    element = permuted.args[0]
    alone = all(len(node.users) == 1 for node in (part, permuted, element))
    by_rows = tuple(part.meta["val"].shape[:2]) == tuple(permuted.meta["val"].shape[:2])
    return element if alone and by_rows and element.target is operator.getitem else None


def _attention_backward_in_one(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None, causal: bool
) -> Tensor:
    """dq, dk and dv side by side in one tensor (B, S, columns); all arguments are (B, H, S, D)."""
    joined = _joined_like(q, k, v)
    parts = joined.split([t.shape[1] * t.shape[3] for t in (q, k, v)], dim=-1)
    dq, dk, dv = (part.unflatten(-1, (t.shape[1], t.shape[3])) for part, t in zip(parts, (q, k, v), strict=True))
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    mask = "top_left" if causal else False
    attention_backward(dout, q, k, v, out, lse, softmax_scale=scale, causal=mask, dq=dq, dk=dk, dv=dv)
    return joined


def _joined_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], sum(t.shape[1] * t.shape[3] for t in (q, k, v)))


torch.library.define(
    "flashbwd::attention_backward_in_one",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, float? scale, bool causal) -> Tensor",
    lib=_ops.library,
)
torch.library.impl("flashbwd::attention_backward_in_one", "CompositeExplicitAutograd", lib=_ops.library)(
    _attention_backward_in_one
)


@torch.library.register_fake("flashbwd::attention_backward_in_one")
def _attention_backward_in_one_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return _joined_like(q, k, v)


_ops.library.refuse_derivatives("attention_backward_in_one")
