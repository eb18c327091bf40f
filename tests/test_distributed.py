"""Operators give DTensors the gradients of unsplit tensors, and communicate only if the sharding requires it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from kit.ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import flashbwd
from flashbwd.integrations import distributed

if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(
    function: Callable[..., Tensor],
    tensors: dict[str, Tensor],
    placements: dict[str, Placement],
    mesh: DeviceMesh,
    communicates: bool = False,
    leaves: Collection[str] | None = None,
) -> dict[str, DTensor]:
    """Compare the gradients of a function of DTensors with those of plain tensors; return the DTensors' gradients.

    `leaves` names the tensors that have gradients; by default all that hold floating-point numbers.
    """
    if leaves is None:
        leaves = [name for name, t in tensors.items() if t.is_floating_point()]
    plain = {name: t.clone().requires_grad_(name in leaves) for name, t in tensors.items()}
    out = function(**plain)
    dout = random(*out.shape, seed=9)
    out.backward(dout)

    def split(name: str, tensor: Tensor) -> DTensor:
        placed = distribute_tensor(tensor, mesh, [placements.get(name, Replicate())])
        return placed.detach().requires_grad_(name in leaves)

    distributed.register()
    parts = {name: split(name, t) for name, t in tensors.items()}
    split_dout = split("out", dout).detach()
    with CommDebugMode() as communication:
        split_out = function(**parts)
        split_out.backward(split_dout)
    if not communicates:
        assert communication.get_total_counts() == 0, communication.get_comm_counts()
    torch.testing.assert_close(split_out.full_tensor(), out)
    grads = {name: parts[name].grad for name in leaves}
    for name, grad in grads.items():
        torch.testing.assert_close(grad.full_tensor(), plain[name].grad, msg=lambda m, n=name: f"{n}: {m}")
    return grads


# ---- attention ----


def attention_tensors(heads_kv: int = 2, heads: int = 4) -> dict[str, Tensor]:
    shapes = {"q": (2, 10, heads, 8), "k": (2, 14, heads_kv, 8), "v": (2, 14, heads_kv, 8)}
    return {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    result = flashbwd.attention(q, k, v, causal=True, **options)
    assert isinstance(result, Tensor)
    return result


def _attention_by(dim: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    placements = dict.fromkeys(("q", "k", "v", "out"), Shard(dim))
    grads = compare(attend, attention_tensors(), placements, mesh)
    assert all(grad.placements == (Shard(dim),) for grad in grads.values())


@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "heads"])
def test_attention_split_by_batch_or_heads_needs_no_communication(two: Ranks, dim: int) -> None:
    two.run(_attention_by, dim)


def _attention_with_shared(dim: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    extras = {"attn_bias": random(1, 4, 10, 14, seed=5), "sink": random(4, seed=6)}
    placements: dict[str, Placement] = dict.fromkeys(("q", "k", "v", "out"), Shard(dim))
    if dim == 2:
        placements |= {"attn_bias": Shard(1), "sink": Shard(0)}
    grads = compare(attend, attention_tensors() | extras, placements, mesh)
    for name in extras:
        assert grads[name].placements[0].is_partial() == (dim == 0)


@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "heads"])
def test_gradients_of_a_bias_and_sinks_that_batches_share_are_partial_sums(two: Ranks, dim: int) -> None:
    two.run(_attention_with_shared, dim)


def _attention_with_slopes(dim: int, per_batch: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    slopes = random(2, 4, seed=5).abs().float()
    placements: dict[str, Placement] = dict.fromkeys(("q", "k", "v", "out"), Shard(dim))
    if dim == 2:
        placements["alibi_slopes"] = Shard(1 if per_batch else 0)
    elif per_batch:
        placements["alibi_slopes"] = Shard(0)
    tensors = attention_tensors() | {"alibi_slopes": slopes if per_batch else slopes[0]}

    def with_slopes(alibi_slopes: Tensor, **tensors: Tensor) -> Tensor:
        return attend(**tensors, alibi_slopes=alibi_slopes.detach())

    grads = compare(with_slopes, tensors, placements, mesh, leaves=("q", "k", "v"))
    assert all(grad.placements == (Shard(dim),) for grad in grads.values())


@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "heads"])
@pytest.mark.parametrize("per_batch", [False, True], ids=["per_head", "per_batch_and_head"])
def test_alibi_slopes_go_with_their_batches_and_heads(two: Ranks, dim: int, per_batch: bool) -> None:
    two.run(_attention_with_slopes, dim, per_batch)


def _attention_with_key_mask(dim: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    key_mask = random(2, 14, seed=5) < 0
    placements: dict[str, Placement] = dict.fromkeys(("q", "k", "v", "out"), Shard(dim))
    if dim == 0:
        placements["key_mask"] = Shard(0)
    grads = compare(attend, attention_tensors() | {"key_mask": key_mask}, placements, mesh)
    assert all(grad.placements == (Shard(dim),) for grad in grads.values())


@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "heads"])
def test_a_key_mask_goes_with_its_batches(two: Ranks, dim: int) -> None:
    two.run(_attention_with_key_mask, dim)


def _attention_by_rows() -> None:
    mesh = init_device_mesh("cpu", (2,))
    placements = dict.fromkeys(("q", "k", "v", "out"), Shard(1))
    compare(attend, attention_tensors(), placements, mesh, communicates=True)


def test_attention_split_along_the_sequence_is_gathered(two: Ranks) -> None:
    two.run(_attention_by_rows)


def _attention_with_kv_heads(heads: int, heads_kv: int, keys_too: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    names = ("q", "k", "v", "out") if keys_too else ("q", "out")
    placements: dict[str, Placement] = dict.fromkeys(names, Shard(2))
    compare(attend, attention_tensors(heads_kv, heads), placements, mesh, communicates=True)


@pytest.mark.parametrize("keys_too", [False, True], ids=["queries", "queries_and_keys"])
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 1), (6, 3), (3, 3)])
def test_heads_that_do_not_divide_are_gathered(two: Ranks, heads: int, heads_kv: int, keys_too: bool) -> None:
    two.run(_attention_with_kv_heads, heads, heads_kv, keys_too)


def _packed_attention() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {name: random(17, heads, 8, seed=i) for i, (name, heads) in enumerate({"q": 4, "k": 2, "v": 2}.items())}
    tensors["cu_seqlens"] = torch.tensor([0, 6, 6, 17], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 11, "max_seqlen_k": 11}
        return attend(q, k, v, **lengths)

    compare(packed, tensors, dict.fromkeys(("q", "k", "v", "out"), Shard(1)), mesh)


def test_packed_sequences_can_be_split_by_heads(two: Ranks) -> None:
    two.run(_packed_attention)


def _two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    distributed.register()
    tensors = attention_tensors()
    expected = attend(**tensors)
    parts = {name: distribute_tensor(t, mesh, [Shard(0), Shard(2)]) for name, t in tensors.items()}
    out = attend(**parts)
    assert isinstance(out, DTensor) and out.placements == (Shard(0), Shard(2))
    torch.testing.assert_close(out.full_tensor(), expected)


def test_a_mesh_of_two_dimensions_can_split_batch_and_heads(two: Ranks) -> None:
    two.run(_two_dimensional_mesh)


def _attention_dropped_out() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(mesh.get_local_rank())
    distributed.register()
    leaves = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in attention_tensors().values()]
    out = attend(*leaves, dropout_p=0.5)
    dout = random(*out.shape, seed=9)
    grads = [
        torch.autograd.grad(out, leaves, distribute_tensor(dout, mesh, [place]), retain_graph=True)
        for place in (Shard(0), Shard(2), Replicate())
    ]
    for other in grads[1:]:
        for got, want in zip(other, grads[0], strict=True):
            assert isinstance(got, DTensor) and isinstance(want, DTensor)
            torch.testing.assert_close(got.full_tensor(), want.full_tensor())


def test_the_dropout_mask_is_right_for_every_sharding_of_the_gradient(two: Ranks) -> None:
    two.run(_attention_dropped_out)


# ---- norms ----


def normalise(kind: str, *, memory_efficient: bool, **tensors: Tensor) -> Tensor:
    return getattr(flashbwd, kind)(**tensors, memory_efficient=memory_efficient)


def _norm_by(kind: str, dim: int, memory_efficient: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {"x": random(2, 6, 12, seed=1), "gamma": random(12, seed=2)}
    if kind == "layer_norm":
        tensors["beta"] = random(12, seed=3)
    placements = dict.fromkeys(("x", "out"), Shard(dim))
    grads = compare(lambda **t: normalise(kind, memory_efficient=memory_efficient, **t), tensors, placements, mesh)
    assert grads.pop("x").placements == (Shard(dim),)
    assert all(grad.placements[0].is_partial() for grad in grads.values())


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_norms_of_split_rows_have_partial_parameter_gradients(
    two: Ranks, kind: str, dim: int, memory_efficient: bool
) -> None:
    two.run(_norm_by, kind, dim, memory_efficient)


def _norm_by_columns() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {"x": random(2, 6, 12, seed=1), "gamma": random(12, seed=2)}
    compare(flashbwd.rms_norm, tensors, dict.fromkeys(("x", "out"), Shard(2)), mesh, communicates=True)


def test_a_norm_split_along_its_rows_is_gathered(two: Ranks) -> None:
    two.run(_norm_by_columns)


def _norm_wanting(kind: str, memory_efficient: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shapes = {"x": (2, 6, 12), "gamma": (12,)} | ({"beta": (12,)} if kind == "layer_norm" else {})
    tensors = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    distributed.register()
    for wanted in (["gamma"], ["x"], list(tensors), ["gamma"]):

        def gradients(place: Callable[[str, Tensor], Tensor], wanted: list[str] = wanted) -> tuple[Tensor, ...]:
            leaves = {name: place(name, t).requires_grad_(name in wanted) for name, t in tensors.items()}
            z = normalise(kind, memory_efficient=memory_efficient, **leaves)
            return torch.autograd.grad(z, [leaves[name] for name in wanted], place("x", random(2, 6, 12, seed=9)))

        def split(name: str, tensor: Tensor) -> Tensor:
            return distribute_tensor(tensor, mesh, [Shard(1) if name == "x" else Replicate()])

        for got, want in zip(gradients(split), gradients(lambda _, t: t.clone()), strict=True):
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_two_norms_of_one_shape_may_want_different_gradients(two: Ranks, kind: str, memory_efficient: bool) -> None:
    """DTensor caches the sharding of a call by its tensors, so the wanted gradients must be part of the cache key."""
    two.run(_norm_wanting, kind, memory_efficient)


# ---- dropout, residual addition and norm ----


def both(z: Tensor, h: Tensor) -> Tensor:
    return z * 2 + h


def _dropout_add_norm_by(kind: str, dim: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shapes = {"x": (2, 6, 12), "residual": (2, 6, 12), "gamma": (12,)}
    if kind == "dropout_add_layer_norm":
        shapes["beta"] = (12,)
    tensors = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    function = getattr(flashbwd, kind)
    kept = {"keep": random(2, 6, 12, seed=7) > 0}
    rows = dict.fromkeys(("x", "residual", "keep", "out"), Shard(dim))
    for more, dropout_p in (({}, 0.0), (kept, 0.25), ({}, 0.0)):

        def run(dropout_p: float = dropout_p, **tensors: Tensor) -> Tensor:
            return both(*function(**tensors, dropout_p=dropout_p))

        grads = compare(run, tensors | more, rows, mesh)
        assert [grads.pop(name).placements for name in ("x", "residual")] == [(Shard(dim),)] * 2
        assert all(grad.placements[0].is_partial() for grad in grads.values())


@pytest.mark.parametrize("kind", ["dropout_add_layer_norm", "dropout_add_rms_norm"])
@pytest.mark.parametrize("dim", [0, 1])
def test_dropout_addition_and_norm_of_split_rows_need_no_communication(two: Ranks, kind: str, dim: int) -> None:
    two.run(_dropout_add_norm_by, kind, dim)


def _dropout_drawn(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(mesh.get_local_rank())
    distributed.register()
    x, residual = (random(4, 6, 12, seed=seed) for seed in (1, 2))
    gamma, dout = random(12, seed=3), random(4, 6, 12, seed=4)
    leaves = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (x, residual)]
    split_gamma = distribute_tensor(gamma, mesh, [Replicate()]).requires_grad_()
    z, h = getattr(flashbwd, kind)(*leaves, split_gamma, dropout_p=0.5)
    split_dout = distribute_tensor(dout, mesh, [Shard(1)])
    grads = torch.autograd.grad([z, h], [*leaves, split_gamma], [split_dout, split_dout])
    keep = h.detach().full_tensor() != residual
    assert 0.3 < keep.double().mean() < 0.7
    plain = [t.clone().requires_grad_() for t in (x, residual, gamma)]
    z, h = getattr(flashbwd, kind)(*plain, dropout_p=0.5, keep=keep)
    for got, want in zip(grads, torch.autograd.grad([z, h], plain, [dout, dout]), strict=True):
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("kind", ["dropout_add_layer_norm", "dropout_add_rms_norm"])
def test_each_device_regenerates_its_mask_for_every_sharding_of_the_gradient(two: Ranks, kind: str) -> None:
    two.run(_dropout_drawn, kind)


# ---- flex decoding ----

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


def slanted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + SLOPES[h] * (kv_idx - q_idx) + b * 0.1


def windows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 3 * b + 2 * h


def _decoded_by(shape: tuple[int, ...], places: tuple[Placement, ...], key_batch: int, modified: bool) -> None:
    mesh = init_device_mesh("cpu", shape)
    shapes = {"query": (2, 4, 3, 8), "key": (key_batch, 2, 40, 8), "value": (key_batch, 2, 40, 8)}
    tensors = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    dout, dlse = random(2, 4, 3, 8, seed=8), random(2, 4, 3, seed=9)
    mods: dict[str, Any] = {}
    if modified:
        mask = create_block_mask(windows, 2, 4, 3, 40, device="cpu", BLOCK_SIZE=(16, 16))
        mods = {"score_mod": slanted, "block_mask": mask}

    def results(place: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = {name: place(t).requires_grad_() for name, t in tensors.items()}
        out, lse = flashbwd.flex_decoding(**leaves, **mods, enable_gqa=True, return_lse=True)  # type: ignore[misc]
        grads = torch.autograd.grad([out, lse], list(leaves.values()), [place(dout), place(dlse)])
        return out, lse, *grads

    def split(tensor: Tensor) -> Tensor:
        alone = [Replicate() if place == Shard(0) and tensor.shape[0] == 1 else place for place in places]
        return distribute_tensor(tensor, mesh, alone)

    got, want = results(split), results(torch.clone)
    assert isinstance(got[0], DTensor) and got[0].placements == places
    for actual, expected in zip(got, want, strict=True):
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(actual.full_tensor(), expected)


@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("key_batch", [1, 2])
@pytest.mark.parametrize("places", [(Shard(0),), (Shard(1),), (Replicate(),), (Shard(1), Shard(0))], ids=str)
def test_decoding_can_be_split_by_batch_and_heads(
    two: Ranks, places: tuple[Placement, ...], key_batch: int, modified: bool
) -> None:
    two.run(_decoded_by, (2, 1)[: len(places)], places, key_batch, modified)


def _decoded_from_a_split_sequence() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = [random(2, 3, n, 8, seed=n) for n in (2, 12, 12)]
    out, aux = flashbwd.flex_decoding(
        *(distribute_tensor(t, mesh, [Shard(2)]) for t in tensors), return_aux=AuxRequest(max_scores=True)
    )
    expected = flashbwd.flex_decoding(*tensors, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and out.placements == (Replicate(),)
    torch.testing.assert_close(out.full_tensor(), expected[0])
    torch.testing.assert_close(aux.max_scores.full_tensor(), expected[1].max_scores)
    with pytest.raises(ValueError, match="flashbwd: key is a Tensor, expected a DTensor on query's mesh"):
        flashbwd.flex_decoding(distribute_tensor(tensors[0], mesh, [Shard(0)]), *tensors[1:])


def test_decoding_gathers_sequences(two: Ranks) -> None:
    two.run(_decoded_from_a_split_sequence)
