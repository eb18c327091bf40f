"""DTensor sharding rules for the operators of this library, and attention over rows that are split over devices.

Attention is independent for each batch and head, and a norm is independent for each row. If tensors are sharded along
these dimensions, each device computes its shards without communication. Gradients of replicated arguments (gamma, beta,
a bias or sinks that broadcast) are partial sums. DTensor gathers tensors with any other sharding first.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

if TYPE_CHECKING:
    from flashbwd.integrations.context_flex import BlockMaskSplit, context_parallel_flex_attention, split_block_mask
    from flashbwd.integrations.context_parallel import context_parallel_attention
    from flashbwd.integrations.context_split import ContextSplit, split_context

# Name -> module. These import torch.distributed, which ``import flashbwd`` must not do.
_LAZY = {
    "BlockMaskSplit": "context_flex",
    "ContextSplit": "context_split",
    "context_parallel_attention": "context_parallel",
    "context_parallel_flex_attention": "context_flex",
    "split_block_mask": "context_flex",
    "split_context": "context_split",
}

__all__ = [
    "BlockMaskSplit",
    "ContextSplit",
    "context_parallel_attention",
    "context_parallel_flex_attention",
    "register",
    "split_block_mask",
    "split_context",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"flashbwd.integrations.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


Call = Mapping[str, Any]  # an operator's arguments by name; a tensor is a spec with shape and placements
Placements = Mapping[str, Any]  # placements of tensors by name; tensors without a name here are replicated
Sharding = tuple[Sequence[Any], Placements]  # placements of the results, and of the arguments

# Generator state -> tensor of the forward. Each device drew its own dropout mask, so the backward must keep the
# sharding of that tensor and ignore the sharding of the incoming gradient.
_MASKED = {"rng": "h", "rng_seed": "q"}


@functools.cache
def register() -> None:
    """Register the sharding rules of this library's operators with DTensor; a second call has no effect.

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
    """Return full replication and all shardings that a rule allows, in the form that ``register_sharding`` requires.

    A sharding has one placement per result, and one per argument in the order of the call. Arguments that are not
    tensors have None.
    """
    from torch.distributed.tensor import Replicate

    names = [argument.name for argument in operator._schema.arguments]
    call = dict(zip(names, args, strict=False)) | kwargs

    def of_arguments(placements: Placements) -> list[Any]:
        return [placements.get(name, Replicate()) if _is_tensor(value) else None for name, value in call.items()]

    shardings = [((Replicate(),) * len(operator._schema.returns), {}), *rule(call)]
    for state, tensor in _MASKED.items():
        if _is_tensor(call.get(state)):
            forward_placements = call[tensor].placements
            shardings = [s for s in shardings if s[1].get(tensor, Replicate()) in forward_placements]
    return [(list(results), of_arguments(placements)) for results, placements in shardings]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "placements")


# ---- attention ----


def _attention(call: Call) -> Iterator[Sharding]:
    """Yield shardings whose results are out, softmax_lse and rng. Each device draws its own dropout mask."""
    from torch.distributed.tensor import Replicate

    for placements in _attention_placements(call):
        yield (placements["q"], placements["softmax_lse"], Replicate()), placements


def _attention_backward(call: Call) -> Iterator[Sharding]:
    """Yield shardings whose results are dq, dk, dv, dbias and dsink; the last two may be empty."""
    from torch.distributed.tensor import Partial, Replicate

    asked = {"attn_bias": call.get("need_dbias", True), "sink": True}
    for placements in _attention_placements(call):
        gradients = [placements[name] for name in ("q", "k", "v")]
        for name, wanted in asked.items():
            placement = placements.get(name, Replicate())
            shared = wanted and _is_tensor(call.get(name)) and placement.is_replicate()
            gradients.append(Partial() if shared else placement if wanted else Replicate())
        yield gradients, placements


def _attention_placements(call: Call) -> Iterator[Placements]:
    """Yield placements of the arguments of a forward or backward: sharded over the batch, and over the heads."""
    from torch.distributed.tensor import Replicate, Shard

    q, k, bias, slopes, lse = (call.get(name) for name in ("q", "k", "attn_bias", "alibi_slopes", "softmax_lse"))
    assert q is not None and k is not None

    def bias_by(dim: int) -> Any:
        """Return the placement of the bias if ``dim`` is sharded: replicated if the bias broadcasts along it."""
        return Shard(dim) if bias is not None and bias.shape[dim] > 1 else Replicate()

    if q.ndim == 4:
        tensors = ("dout", "q", "k", "v", "out", "softmax_lse", "dlse", "seqused_q", "seqused_k", "key_mask")
        of_each = Shard(0) if slopes is not None and slopes.ndim == 2 else Replicate()
        yield dict.fromkeys(tensors, Shard(0)) | {"attn_bias": bias_by(0), "alibi_slopes": of_each}

    heads_dim = q.ndim - 2
    heads = Shard(heads_dim)
    sizes = [size for size, placement in zip(q.mesh.shape, q.placements, strict=True) if placement.is_shard(heads_dim)]
    if sizes and k.shape[heads_dim] % math.prod(sizes) == 0:  # every device has the KV heads of its query heads
        first = q.ndim == 3 and (lse is None or lse.ndim == 2)  # (H, total_q)
        yield (
            dict.fromkeys(("dout", "q", "k", "v", "out"), heads)
            | dict.fromkeys(("softmax_lse", "dlse"), Shard(0 if first else 1))
            | {"attn_bias": bias_by(1), "alibi_slopes": Shard(0 if slopes is None else slopes.ndim - 1)}
            | {"sink": Shard(0)}
        )


# ---- norms ----


def _norm(call: Call, results: str) -> Iterator[Sharding]:
    """Yield the shardings over every dimension except the last.

    ``results`` has one letter per result: z has the shape of x, s is a row statistic, p is the gradient of a parameter,
    and - is a value that each device computes for itself.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    x = next(call[name] for name in ("x", "h", "z") if name in call)
    statistics = call.get("rs")
    tensors = ("x", "z", "h", "dz", "residual", "dresidual", "keep", "mu", "rs")
    # Statistics of shape (rows,) can be sharded only together with the first dimension of x.
    dims = range(x.ndim - 1 if statistics is None or statistics.ndim == x.ndim else 1)
    for rows in map(Shard, dims):
        placed = {"z": rows, "s": rows, "p": Partial(), "-": Replicate()}
        yield [placed[kind] for kind in results], dict.fromkeys(tensors, rows)


def _dropout_add_norm(call: Call) -> Iterator[Sharding]:
    """Yield shardings whose results are z, h, mu, rs and rng; mu is empty for RMSNorm."""
    return _norm(call, results="zz-s-" if call["rms"] else "zzss-")


# ---- flex decoding ----

Mod = Callable[..., Any]


def decode_shards(
    function: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
) -> Any:
    """Call ``function`` on each device's shard of the DTensors, the modification and the mask; return DTensors.

    The work is sharded as query is. Batch and heads each stay sharded over at most one mesh dimension, and only into
    equal shards. Any other sharding is gathered.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = query.device_mesh
    for name, tensor in (("key", key), ("value", value)):
        if not isinstance(tensor, DTensor) or tensor.device_mesh != mesh:
            raise ValueError(f"flashbwd: {name} is a {type(tensor).__name__}, expected a DTensor on query's mesh")
    keys_of_all = key.shape[0] == 1 and query.shape[0] != 1
    whole = {0: query.shape[0], 1: math.gcd(query.shape[1], key.shape[1])}
    shards: dict[int, slice] = {}  # this device's batches and query heads
    placements: list[Any] = [Replicate()] * mesh.ndim
    of_keys, gradients_of_keys = list(placements), list(placements)
    for i, placement in enumerate(query.placements):
        dim = placement.dim if placement.is_shard() else None
        if dim in shards or dim not in whole or whole[dim] % mesh.size(i) != 0:
            continue
        placements[i] = of_keys[i] = gradients_of_keys[i] = Shard(dim)
        if dim == 0 and keys_of_all:
            of_keys[i], gradients_of_keys[i] = Replicate(), Partial()
        size = query.shape[dim] // mesh.size(i)
        first = mesh.get_local_rank(i) * size
        shards[dim] = slice(first, first + size)

    def shard(tensor: Any, tensor_placements: list[Any], gradient_placements: list[Any]) -> Tensor:
        return tensor.redistribute(mesh, tensor_placements).to_local(grad_placements=gradient_placements)

    results = function(
        shard(query, placements, placements),
        shard(key, of_keys, gradients_of_keys),
        shard(value, of_keys, gradients_of_keys),
        _shard_of_mod(score_mod, shards),
        _shard_of_mask(block_mask, shards),
    )

    def whole_of(result: Any) -> Any:
        return None if result is None else DTensor.from_local(result, mesh, placements, run_check=False)

    if isinstance(results, Tensor):
        return whole_of(results)
    out, statistics = results
    if isinstance(statistics, Tensor):
        return whole_of(out), whole_of(statistics)
    return whole_of(out), type(statistics)(*map(whole_of, statistics))


def _shard_of_mod(mod: Mod | None, shards: Mapping[int, slice], of_mask: bool = False) -> Mod | None:
    """Return a modification that adds the offsets of this shard to its batch and head indices."""
    batch, head = (shards[dim].start if dim in shards else 0 for dim in range(2))
    if mod is None or (batch == 0 and head == 0):
        return mod
    if of_mask:
        return lambda b, h, q_idx, kv_idx: mod(b + batch, h + head, q_idx, kv_idx)
    return lambda score, b, h, q_idx, kv_idx: mod(score, b + batch, h + head, q_idx, kv_idx)


def _shard_of_mask(mask: BlockMask | None, shards: Mapping[int, slice]) -> BlockMask | None:
    if mask is None or not shards:
        return mask
    sizes = mask.kv_num_blocks.shape
    shard = mask[tuple(shards[dim] if dim in shards and sizes[dim] > 1 else slice(None) for dim in range(2))]
    mask_mod = _shard_of_mod(mask.mask_mod, shards, of_mask=True)
    assert mask_mod is not None
    shard.mask_mod = mask_mod
    return shard
