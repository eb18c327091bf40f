"""FlexAttention over rows that are split over devices gives the output and the gradients of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from kit import tolerance
from kit.ranks import Ranks, gpu_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashbwd
from flashbwd.integrations import distributed

if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

BATCH, HEADS, HEADS_KV, DIM, DIM_V = 2, 4, 2, 8, 6
DOCUMENTS = (0, 70, 75, 300, 620)

MaskMod = Callable[[Any, Any, Any, Any], Any]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(request.param, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


def mesh_of_all(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (torch.distributed.get_world_size(),))


# ---- masks and modifications, of which the oracle evaluates the same functions on whole grids ----


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def documents(device: str = "cpu") -> MaskMod:
    lengths = torch.tensor(DOCUMENTS).diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
    return lambda b, h, q, k: (document[q] == document[k]) & (q >= k)


def window_of_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k <= 20 + 50 * h) & (k - q <= 10 + b)


def no_key_for_some(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k >= 300) & (q >= 300) & (q % 7 != 3)


# mask_mod, rows, block size, and whether lists differ between batches and heads
MASKS: dict[str, tuple[Callable[[], MaskMod], int, int | tuple[int, int], bool]] = {
    "causal": (lambda: causal, 512, 128, False),
    "a short last block": (lambda: causal, 450, 64, False),
    "documents": (documents, 620, 32, False),
    "other blocks of keys than of queries": (documents, 620, (64, 32), False),
    "lists of batches and heads": (lambda: window_of_heads, 390, 64, True),
    "rows without keys": (lambda: no_key_for_some, 512, 64, False),
}


def block_mask(case: str) -> BlockMask:
    make, rows, size, of_each = MASKS[case]
    batch, heads = (BATCH, HEADS) if of_each else (None, None)
    return create_block_mask(make(), batch, heads, rows, rows, device="cpu", BLOCK_SIZE=cast(Any, size))


def inputs(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value, the gradient of the output and the gradient of the LSE."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, rows, DIM), (HEADS_KV, rows, DIM), (HEADS_KV, rows, DIM_V), (HEADS, rows, DIM_V), (HEADS, rows)]
    return [torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def oracle(
    mask_mod: MaskMod, tensors: list[Tensor], change: Callable[..., Tensor] | None = None, *captured: Tensor
) -> list[Tensor]:
    """Output, LSE, dq, dk, dv and gradients of ``captured`` of attention over whole grids of scores.

    ``change(scores, h, q, k)`` modifies the scores.
    """
    *leaves, dout, dlse = tensors
    query, key, value = leaves = [x.detach().requires_grad_() for x in leaves]
    rows = query.shape[2]
    b, h, q, k = torch.meshgrid(*map(torch.arange, (BATCH, HEADS, rows, rows)), indexing="ij")
    key, value = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * DIM**-0.5
    scores = scores if change is None else change(scores, h, q, k)
    scores = scores.masked_fill(~mask_mod(b, h, q, k), -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1)).exp()
    out = p @ value
    loss = (out * dout).sum() + (lse * dlse).masked_fill(lse.isinf(), 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, [*leaves, *captured])]


def results(tensors: list[Tensor], split: Any, **options: Any) -> list[Tensor]:
    """The same of the split attention, gathered from every process."""
    *leaves, dout, dlse = (split.take(x, 2) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in leaves]
    attention = distributed.context_parallel_flex_attention
    out, lse = attention(*leaves, split, enable_gqa=True, return_lse=True, **options)
    torch.autograd.backward([out, lse], [dout, dlse.masked_fill(lse.isinf(), 0.0)])
    return [split.gather(x, 2) for x in (out.detach(), lse.detach(), *(cast(Tensor, leaf.grad) for leaf in leaves))]


def _agrees(case: str) -> None:
    mask = block_mask(case)
    tensors = inputs(mask.seq_lengths[0], torch.float64)
    split = distributed.split_block_mask(mesh_of_all(), mask)
    for found, want in zip(results(tensors, split), oracle(mask.mask_mod, tensors), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", MASKS)
def test_split_rows_have_the_gradients_of_one_device(ranks: Ranks, case: str) -> None:
    ranks.run(_agrees, case)


def _captured() -> None:
    mask = block_mask("documents")
    tensors = inputs(620, torch.float64)
    split = distributed.split_block_mask(mesh_of_all(), mask)
    bias = torch.linspace(-1, 1, HEADS * 620, dtype=torch.float64).view(HEADS, 620).requires_grad_()
    found = results(tensors, split, score_mod=lambda s, b, h, q, k: s + bias[h, q - k])
    assert bias.grad is not None
    torch.distributed.all_reduce(bias.grad)
    whole = bias.detach().clone().requires_grad_()
    want = oracle(mask.mask_mod, tensors, lambda s, h, q, k: s + whole[h, (q - k).abs()], whole)
    for one, other in zip([*found, bias.grad], want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_captured_tensor_gets_the_sum_of_the_gradients_of_all_devices(ranks: Ranks) -> None:
    ranks.run(_captured)


def _bfloat16() -> None:
    mask = block_mask("documents")
    tensors = inputs(620, torch.bfloat16)
    split = distributed.split_block_mask(mesh_of_all(), mask)
    found = results(tensors, split)
    want = oracle(mask.mask_mod, [x.double() for x in tensors])
    rounded = oracle(mask.mask_mod, tensors)
    for name, *triple in zip(("out", "lse", "dq", "dk", "dv"), found, want, rounded, strict=True):
        if name != "lse":
            got, exact, plain = (x.transpose(1, 2) for x in triple)
            tolerance.assert_close(got, exact, [plain.double()], name)


def test_16_bit_gradients_of_split_rows_are_within_tolerance(two: Ranks) -> None:
    two.run(_bfloat16)


def _one_mod_per_split() -> None:
    split = distributed.split_block_mask(mesh_of_all(), block_mask("causal"))

    def shifted(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + q

    assert split.score_mod(shifted) is split.score_mod(shifted)
    assert split.score_mod(lambda s, b, h, q, k: s) is not split.score_mod(shifted)
    assert split.score_mod(None) is None


def test_layers_share_the_modification_of_a_split(two: Ranks) -> None:
    two.run(_one_mod_per_split)


def _few_keys() -> None:
    mask = create_block_mask(lambda b, h, q, k: (q - k).abs() < 32, None, None, 2048, 2048, device="cpu", BLOCK_SIZE=32)
    split = distributed.split_block_mask(mesh_of_all(), mask)
    rows = 2048 // mesh_of_all().size()
    assert split.length() == rows
    assert len(split.key_rows) <= rows + 2 * 32 * len(split.chunks[split.rank])


def test_a_device_receives_only_the_blocks_that_its_queries_see(two: Ranks) -> None:
    two.run(_few_keys)


def _work() -> None:
    mask = create_block_mask(causal, None, None, 4096, 4096, device="cpu", BLOCK_SIZE=64)
    split = distributed.split_block_mask(mesh_of_all(), mask)
    mine = int(split.block_mask.kv_num_blocks.sum() + split.block_mask.full_kv_num_blocks.sum())
    whole = 64 * 65 // 2
    assert mine == pytest.approx(whole / mesh_of_all().size(), rel=0.02)


def test_devices_get_equal_work_of_a_causal_mask(two: Ranks) -> None:
    two.run(_work)


# ---- errors ----

Attend = Callable[[list[Tensor], Any], Any]


def attend(tensors: list[Tensor], split: Any, **options: Any) -> Any:
    return distributed.context_parallel_flex_attention(*tensors, split, enable_gqa=True, **options)


def wrong_lists(split: Any) -> BlockMask:
    mask = block_mask("causal")
    mask.kv_indices[0, 0, 0, 0] = 17
    return mask


MISFITS: dict[str, tuple[Attend, str]] = {
    "dimensions": (lambda x, s: attend([x[0][0], *x[1:]], s), "query has 3 dimensions, expected 4"),
    "rows": (lambda x, s: attend([x[0], x[1][:, :, 1:], x[2]], s), "key has 255 rows in dimension 2, expected 256"),
    "dtype": (lambda x, s: attend([*x[:2], x[2].float()], s), "value is float32"),
    "another split": (
        lambda x, s: attend(x, distributed.split_context(s.mesh, seqlen=512)),
        "split is .*, expected a BlockMaskSplit",
    ),
    "score_mod": (lambda x, s: attend(x, s, score_mod=3), "score_mod is 3, expected a function"),
    "flag": (lambda x, s: attend(x, s, deterministic=1), "deterministic is 1, expected a bool"),
    "not a mask": (lambda x, s: distributed.split_block_mask(s.mesh, cast(Any, 4)), "block_mask is 4, expected"),
    "few blocks": (
        lambda x, s: distributed.split_block_mask(s.mesh, create_block_mask(causal, None, None, 128, 128, "cpu")),
        "block_mask has 1 blocks of 128 queries, expected at least one for each of the 2 devices",
    ),
    "lengths": (
        lambda x, s: distributed.split_block_mask(s.mesh, create_block_mask(causal, None, None, 128, 256, "cpu")),
        r"block_mask was made for lengths \(128, 256\), expected as many queries as keys",
    ),
    "lists": (
        lambda x, s: distributed.split_block_mask(s.mesh, wrong_lists(s)),
        "block_mask.kv_indices names block 17, expected 0 to 3",
    ),
    "rows of a dense call": (
        lambda x, s: distributed.context_parallel_attention(*x, s),
        "split is .*, expected a ContextSplit",
    ),
}


def _misfit(name: str) -> None:
    split = distributed.split_block_mask(mesh_of_all(), block_mask("causal"))
    call, message = MISFITS[name]
    tensors = [split.take(x, 2) for x in inputs(512, torch.float64)[:3]]
    with pytest.raises(ValueError, match=f"^flashbwd: {message}"):
        call(tensors, split)


@pytest.mark.parametrize("name", MISFITS)
def test_each_error_names_the_argument(two: Ranks, name: str) -> None:
    two.run(_misfit, name)


# ---- on GPUs, one per process ----


@pytest.fixture(scope="module", params=[2, 4])
def gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from gpu_ranks(request, tmp_path_factory)


def _on_gpus() -> None:
    mask = create_block_mask(documents("cuda"), None, None, 620, 620, device="cuda", BLOCK_SIZE=128)
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, 620, 64), (HEADS_KV, 620, 64), (HEADS_KV, 620, 64), (HEADS, 620, 64)]
    q, k, v, dout = (torch.randn(1, *s, generator=generator).to("cuda", torch.bfloat16) for s in shapes)
    split = distributed.split_block_mask(mesh_of_all("cuda"), mask)
    leaves = [split.take(x, 2).requires_grad_() for x in (q, k, v)]
    out = cast(Tensor, distributed.context_parallel_flex_attention(*leaves, split, enable_gqa=True))
    out.backward(split.take(dout, 2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    cast(Tensor, flashbwd.flex_attention(*whole, block_mask=mask, enable_gqa=True)).backward(dout)
    for name, leaf, one in zip(("dq", "dk", "dv"), leaves, whole, strict=True):
        found, want = split.gather(cast(Tensor, leaf.grad), 2).float(), cast(Tensor, one.grad).float()
        assert float((found - want).norm() / want.norm()) < 0.01, name


@pytest.mark.gpu
@pytest.mark.alone
def test_split_rows_on_gpus_have_the_gradients_of_one_gpu(gpus: Ranks) -> None:
    gpus.run(_on_gpus)
