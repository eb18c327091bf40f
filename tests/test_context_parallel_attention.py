"""Attention over rows that are split over devices gives the output and the gradients of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from kit import oracle, tolerance
from kit.ranks import Ranks, gpu_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashbwd
from flashbwd.integrations import distributed

if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

# Lengths, (left, right) of the window, whether it is causal, and the number of KV heads for 4 query heads.
PACKED: dict[str, tuple[tuple[int, ...], tuple[int, int], bool, int]] = {
    "a document on all devices": ((150,), (-1, -1), True, 4),
    "documents on several devices": ((5, 0, 33, 1, 90, 0), (-1, -1), True, 2),
    "no mask": ((40, 0, 57), (-1, -1), False, 2),
    "sliding window": ((5, 0, 33, 1, 90, 0), (7, -1), True, 1),
    "window on both sides": ((70, 33), (5, 3), False, 2),
    "fewer rows than devices": ((2, 1), (-1, -1), True, 2),
    "no rows": ((0, 0), (-1, -1), True, 2),
}


@pytest.fixture(scope="module", params=[2, 5])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(request.param, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


def mesh_of_all(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (torch.distributed.get_world_size(),))


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    rows: tuple[int, ...], heads_kv: int, dtype: torch.dtype, head_dim: int = 8, head_dim_v: int = 6
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    shapes = [(4, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v), (4, head_dim_v)]
    return [random(*rows, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def results(
    tensors: Sequence[Tensor], split: distributed.ContextSplit, dlse: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """Output, LSE and gradients of the split attention, gathered from every process."""
    rows = 0 if split.packed else 1
    *leaves, dout = (split.take(x, rows) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = distributed.context_parallel_attention(*leaves, split, return_lse=True, **options)
    of_lse = [] if dlse is None else [split.take(dlse, dlse.dim() - 1)]
    torch.autograd.backward([out, lse][: 1 + len(of_lse)], [dout, *of_lse])
    found = {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True)} | {"out": out.detach()}
    gathered = {name: split.gather(x, rows) for name, x in found.items()}
    return gathered | {"lse": split.gather(lse.detach(), lse.dim() - 1)}


def assert_equal_to_the_oracle(found: dict[str, Tensor], tensors: Sequence[Tensor], **options: Any) -> None:
    """Apply the tolerance rule: compare with unfused attention of the whole sequence, in float64 and rounded."""
    want = oracle.attention(*tensors, **options)
    rounded = oracle.attention(*tensors, **options, dtype=tensors[0].dtype)
    for name, got in found.items():
        tolerance.assert_close(got, getattr(want, name), [getattr(rounded, name).double()], name)


def _packed(case: str, dtype: torch.dtype) -> None:
    lengths, window, causal, heads_kv = PACKED[case]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    tensors = inputs((total,), heads_kv, dtype)
    dlse = random(4, total, seed=9, dtype=dtype)
    split = distributed.split_context(mesh_of_all(), cu_seqlens=cu_seqlens, causal=causal, window_size=window)
    found = results(tensors, split, dlse)
    if total > 0:
        lengths_of_both = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens.int())
        assert_equal_to_the_oracle(found, tensors, dlse=dlse, causal=causal, window_size=window, **lengths_of_both)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", PACKED)
def test_packed_documents_have_the_gradients_of_one_device(ranks: Ranks, case: str, dtype: torch.dtype) -> None:
    ranks.run(_packed, case, dtype)


def test_16_bit_gradients_of_split_documents_are_within_tolerance(two: Ranks) -> None:
    two.run(_packed, "documents on several devices", torch.bfloat16)


def _dense(causal: bool, softcap: float, softmax_scale: float | None) -> None:
    tensors = inputs((2, 51), 2, torch.float64)
    split = distributed.split_context(mesh_of_all(), seqlen=51, causal=causal)
    options: dict[str, Any] = {"softcap": softcap, "softmax_scale": softmax_scale}
    found = results(tensors, split, **options)
    assert_equal_to_the_oracle(found, tensors, causal=causal, **options)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_sequences_of_a_batch_have_the_gradients_of_one_device(ranks: Ranks, causal: bool) -> None:
    ranks.run(_dense, causal, 0.0, None)


def test_softcap_and_scale_apply_to_all_keys(two: Ranks) -> None:
    two.run(_dense, True, 2.0, 0.7)


def _equal_to_one_device() -> None:
    cu_seqlens = torch.tensor([0, 30, 30, 101], dtype=torch.int32)
    tensors = inputs((101,), 2, torch.float64)
    split = distributed.split_context(mesh_of_all(), cu_seqlens=cu_seqlens)
    found = results(tensors, split)
    *leaves, dout = (x.clone().requires_grad_() for x in tensors)
    lengths: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens)
    lengths |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 71)
    out = flashbwd.attention(*leaves, causal=True, **lengths)
    assert isinstance(out, Tensor)
    out.backward(dout)
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        torch.testing.assert_close(found[name], leaf.grad, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_flashbwd_attention_on_the_whole_sequence(two: Ranks) -> None:
    two.run(_equal_to_one_device)


def _repeated() -> None:
    tensors = inputs((173,), 2, torch.float32)
    split = distributed.split_context(mesh_of_all(), cu_seqlens=[0, 60, 173])
    runs = [results(tensors, split, deterministic=True) for _ in range(2)]
    for name, first in runs[0].items():
        assert torch.equal(first, runs[1][name]), name


def test_deterministic_gradients_are_equal_bit_for_bit(two: Ranks) -> None:
    two.run(_repeated)


def _without_a_loss() -> None:
    """The loss does not contain the output of one device, but it depends on the keys of that device."""
    q, k, v, dout = inputs((64,), 2, torch.float64)
    split = distributed.split_context(mesh_of_all(), cu_seqlens=[0, 64])
    leaves = [split.take(x).requires_grad_() for x in (q, k, v)]
    out = distributed.context_parallel_attention(*leaves, split)
    keep = float(split.rank == 0)
    (out * split.take(dout) * keep).sum().backward()
    seen = torch.zeros(64)
    for start, stop in split.chunks[0]:
        seen[start:stop] = 1.0
    want = oracle.attention(q, k, v, dout * seen[:, None, None], causal=True, **_one_document(64))
    dk = leaves[1].grad
    assert dk is not None
    torch.testing.assert_close(split.gather(dk), want.dk)


def _one_document(length: int) -> dict[str, Any]:
    return dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, length], dtype=torch.int32))


def test_keys_get_gradients_from_other_devices_if_their_own_has_no_loss(two: Ranks) -> None:
    two.run(_without_a_loss)


def _rows() -> None:
    lengths = [3, 0, 40, 21]
    split = distributed.split_context(mesh_of_all(), cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(split.positions(), positions[split.rows()])
    whole = random(5, 64, 2, seed=0)
    assert torch.equal(split.gather(split.take(whole, 1), 1), whole)
    assert len(split.rows()) == split.length()


def test_gather_restores_the_tensor_that_take_split(ranks: Ranks) -> None:
    ranks.run(_rows)


# ---- errors ----

MISFITS: dict[str, tuple[Callable[[list[Tensor], Any], Any], str]] = {
    "dimensions": (lambda x, s: attend([x[0][None], *x[1:]], s), r"q has 4 dimensions, expected 3"),
    "rows": (lambda x, s: attend([x[0], x[1][1:], x[2]], s), r"k has \d+ rows in dimension 0, expected \d+"),
    "heads": (lambda x, s: attend([x[0], x[1][:, :1].expand(-1, 3, -1), x[2]], s), r"k has 3 heads"),
    "dtype": (lambda x, s: attend([*x[:2], x[2].float()], s), r"v is float32"),
    "not a split": (lambda x, s: attend(x, 3), r"split is 3, expected a ContextSplit"),
    "softcap": (lambda x, s: attend(x, s, softcap=-1.0), r"softcap is -1"),
    "flag": (lambda x, s: attend(x, s, deterministic=1), r"deterministic is 1, expected a bool"),
    "not a mesh": (lambda x, s: distributed.split_context(cast(Any, 2), seqlen=4), r"mesh is 2, expected a DeviceMesh"),
    "no length": (lambda x, s: distributed.split_context(s.mesh), r"seqlen and cu_seqlens: neither is given"),
    "both": (lambda x, s: distributed.split_context(s.mesh, seqlen=4, cu_seqlens=[0, 4]), r"both are given"),
    "length": (lambda x, s: distributed.split_context(s.mesh, seqlen=-4), r"seqlen is -4, expected an integer of at"),
    "start": (lambda x, s: distributed.split_context(s.mesh, cu_seqlens=[1, 4]), r"cu_seqlens starts with 1"),
    "decreasing": (
        lambda x, s: distributed.split_context(s.mesh, cu_seqlens=[0, 4, 3]),
        r"cu_seqlens\[2\] is 3, expected at least cu_seqlens\[1\], 4",
    ),
    "window": (
        lambda x, s: distributed.split_context(s.mesh, seqlen=4, window_size=(-2, 0)),
        r"window_size is \(-2, 0\), expected 2 integers of at least -1",
    ),
}


def attend(tensors: Sequence[Tensor], split: Any, **options: Any) -> Any:
    return distributed.context_parallel_attention(*tensors, split, **options)


def _misfit(name: str) -> None:
    split = distributed.split_context(mesh_of_all(), cu_seqlens=[0, 64])
    call, message = MISFITS[name]
    tensors = [split.take(x) for x in inputs((64,), 2, torch.float64)[:3]]
    with pytest.raises(ValueError, match=f"^flashbwd: .*{message}"):
        call(tensors, split)


@pytest.mark.parametrize("name", MISFITS)
def test_each_error_names_the_argument(two: Ranks, name: str) -> None:
    two.run(_misfit, name)


# ---- on GPUs, one per process ----


@pytest.fixture(scope="module", params=[2, 4])
def gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from gpu_ranks(request, tmp_path_factory)


def _on_gpus(lengths: tuple[int, ...], window: tuple[int, int], deterministic: bool) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [x.cuda() for x in inputs((sum(lengths),), 2, torch.bfloat16, head_dim=64, head_dim_v=64)]
    split = distributed.split_context(mesh_of_all("cuda"), cu_seqlens=cu_seqlens, window_size=window)
    found = results(tensors, split, deterministic=deterministic)
    lengths_of_both = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens.int().cuda())
    assert_equal_to_the_oracle(found, tensors, causal=True, window_size=window, **lengths_of_both)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("window", [(-1, -1), (200, -1)], ids=["causal", "sliding"])
@pytest.mark.parametrize("lengths", [(2048,), (100, 0, 1500, 7, 900)], ids=["one", "packed"])
def test_packed_documents_on_gpus_have_the_gradients_of_one_device(
    gpus: Ranks, lengths: tuple[int, ...], window: tuple[int, int], deterministic: bool
) -> None:
    gpus.run(_on_gpus, lengths, window, deterministic)
