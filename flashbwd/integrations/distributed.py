"""Sharding rules: how DTensors that are split over devices go through the operators of this library.

Attention is computed for each batch and head by itself, a norm for each row: tensors split there are computed where
they lie, without communication. Gradients of what all parts share (gamma, beta, a bias or sinks that broadcast) are
partial sums. Whatever is split otherwise is gathered first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["register"]

Call = Mapping[str, Any]  # an operator's arguments by name; tensors as their shapes and shardings
Placements = Mapping[str, Any]  # of tensors by name; the others are replicated
Sharding = tuple[Sequence[Any], Placements]  # placements of the results, and of the arguments

# A state of the generator, and a tensor of the forward: each part drew its own mask, which its backward draws again
# where the part lies, wherever the gradient comes from.
_MASKED = {"rng": "h", "rng_seed": "q"}


@functools.cache
def register() -> None:
    """Tell DTensor how the operators of this library shard; a second call changes nothing.

    Needs a PyTorch with ``torch.distributed``.
    """
    from torch.distributed.tensor.experimental import register_sharding

    operators = torch.ops.flashbwd
    rules: dict[Any, Callable[[Call], Iterator[Sharding]]] = {
        operators.attention.default: _attention,
        operators.attention_backward.default: _attention_backward,
        operators.layer_norm.default: functools.partial(_norm, results="zss"),
        operators.rms_norm.default: functools.partial(_norm, results="zs"),
        operators.layer_norm_backward.default: functools.partial(_norm, results="zpp"),
        operators.rms_norm_backward.default: functools.partial(_norm, results="zp"),
        operators.norm_backward_from_output.default: functools.partial(_norm, results="zpp"),
        operators.dropout_add_norm.default: _dropout_add_norm,
        operators.dropout_add_norm_backward.default: functools.partial(_norm, results="zzpp"),
    }
    for operator, rule in rules.items():
        register_sharding(operator)(functools.partial(_acceptable, operator, rule))


def _acceptable(
    operator: torch._ops.OpOverload, rule: Callable[[Call], Iterator[Sharding]], *args: Any, **kwargs: Any
) -> list[tuple[list[Any], list[Any]]]:
    """A rule's shardings, and everything replicated, as ``register_sharding`` wants them: a placement for each result
    and for each argument in the order of the call, None for what is no tensor."""
    from torch.distributed.tensor import Replicate

    names = [argument.name for argument in operator._schema.arguments]
    call = dict(zip(names, args, strict=False)) | kwargs

    def of_arguments(placements: Placements) -> list[Any]:
        return [placements.get(name, Replicate()) if _is_tensor(value) else None for name, value in call.items()]

    shardings = [((Replicate(),) * len(operator._schema.returns), {}), *rule(call)]
    for state, tensor in _MASKED.items():
        if _is_tensor(call.get(state)):
            lies = call[tensor].placements
            shardings = [s for s in shardings if s[1].get(tensor, Replicate()) in lies]
    return [(list(results), of_arguments(placements)) for results, placements in shardings]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "placements")


# ---- attention ----


def _attention(call: Call) -> Iterator[Sharding]:
    """Results: out, softmax_lse, rng. Each part draws its own dropout mask."""
    from torch.distributed.tensor import Replicate

    for placements in _attention_parts(call):
        yield (placements["q"], placements["softmax_lse"], Replicate()), placements


def _attention_backward(call: Call) -> Iterator[Sharding]:
    """Results: dq, dk, dv, dbias, dsink; the last two are empty where not asked for."""
    from torch.distributed.tensor import Partial, Replicate

    asked = {"attn_bias": call.get("need_dbias", True), "sink": True}
    for placements in _attention_parts(call):
        gradients = [placements[name] for name in ("q", "k", "v")]
        for name, wanted in asked.items():
            placement = placements.get(name, Replicate())
            shared = wanted and _is_tensor(call.get(name)) and placement.is_replicate()
            gradients.append(Partial() if shared else placement if wanted else Replicate())
        yield gradients, placements


def _attention_parts(call: Call) -> Iterator[Placements]:
    """Where the arguments of a forward or backward lie for parts of the batch, and for parts of the heads."""
    from torch.distributed.tensor import Replicate, Shard

    q, k, bias, slopes, lse = (call.get(name) for name in ("q", "k", "attn_bias", "alibi_slopes", "softmax_lse"))
    assert q is not None and k is not None

    def bias_by(dim: int) -> Any:
        """A bias that broadcasts along a dimension is whole in each part of it."""
        return Shard(dim) if bias is not None and bias.shape[dim] > 1 else Replicate()

    if q.ndim == 4:
        tensors = ("dout", "q", "k", "v", "out", "softmax_lse", "dlse", "seqused_q", "seqused_k")
        of_each = Shard(0) if slopes is not None and slopes.ndim == 2 else Replicate()
        yield dict.fromkeys(tensors, Shard(0)) | {"attn_bias": bias_by(0), "alibi_slopes": of_each}

    heads_dim = q.ndim - 2
    heads = Shard(heads_dim)
    parts = [size for size, place in zip(q.mesh.shape, q.placements, strict=True) if place.is_shard(heads_dim)]
    if parts and k.shape[heads_dim] % math.prod(parts) == 0:  # every part has its query heads' own KV heads
        first = q.ndim == 3 and (lse is None or lse.ndim == 2)  # (H, total_q)
        yield (
            dict.fromkeys(("dout", "q", "k", "v", "out"), heads)
            | dict.fromkeys(("softmax_lse", "dlse"), Shard(0 if first else 1))
            | {"attn_bias": bias_by(1), "alibi_slopes": Shard(0 if slopes is None else slopes.ndim - 1)}
            | {"sink": Shard(0)}
        )


# ---- norms ----


def _norm(call: Call, results: str) -> Iterator[Sharding]:
    """For any dimension but the last. Results: z like x, s statistics of the rows, p a parameter's gradient, and - what
    each part has for itself."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    x = next(call[name] for name in ("x", "h", "z") if name in call)
    statistics = call.get("rs")
    tensors = ("x", "z", "h", "dz", "residual", "dresidual", "keep", "mu", "rs")
    # Parts of statistics of all rows in one dimension are parts of x's first.
    dims = range(x.ndim - 1 if statistics is None or statistics.ndim == x.ndim else 1)
    for rows in map(Shard, dims):
        placed = {"z": rows, "s": rows, "p": Partial(), "-": Replicate()}
        yield [placed[kind] for kind in results], dict.fromkeys(tensors, rows)


def _dropout_add_norm(call: Call) -> Iterator[Sharding]:
    """Results: z, h, mu, rs, rng; RMSNorm has no mu."""
    return _norm(call, results="zz-s-" if call["rms"] else "zzss-")
