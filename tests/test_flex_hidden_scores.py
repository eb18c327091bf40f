"""Beyond the limit on memory, the lists show whole tiles, and the score_mod of the kernel hides what the mask hides."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.compiler import needs_nvrtc
from kit.emission import HostMods, compiler
from test_flex_captured_bias import ANY_LISTS, chosen
from test_flex_generated import host, sm90_kernel, source_of  # noqa: F401
from test_flex_lists import Sizes, dense, random_mask
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flashbwd.flex import backends, generated, graph_operator, lists
from flashbwd.flex.cache import kernel_lists_of
from flashbwd.flex.hidden_scores import hidden_scores
from flashbwd.flex.kernel_lists import UnsupportedError
from flashbwd.flex.lists import KeyBlockLists, key_block_lists
from flashbwd.flex.tile import Tile
from flashbwd.mods import nvrtc
from flashbwd.mods.captures import Captures
from flashbwd.mods.in_graph import text_of
from flashbwd.reference.decoding import DecodingCall

BLOCKS = [(64, 64), (128, 128), (192, 256), (16, 32), (20, 48), (1 << 30, 1 << 30)]
SMALL: Sizes = (2, 2, 40, 50)


def indices_of(sizes: Sizes) -> list[Tensor]:
    return [
        torch.arange(n, dtype=torch.int32).view([-1 if i == at else 1 for i in range(4)]) for at, n in enumerate(sizes)
    ]


def pairs_of(sizes: Sizes) -> list[list[Tensor]]:
    return [[torch.tensor(i, dtype=torch.int32) for i in pair] for pair in itertools.product(*map(range, sizes))]


def limited(mask: Any, sizes: Sizes, tile: Tile | None = None, limit: int = -1) -> KeyBlockLists:
    """The lists of a mask whose bits may take at most ``limit`` bytes."""
    with mock.patch.object(lists, "LIMIT", limit):
        return key_block_lists(mask, sizes, tile)


def shown(mask: Any, states: Tensor, sizes: Sizes) -> Tensor:
    scores = hidden_scores(None, mask, states)(torch.zeros(sizes), *indices_of(sizes))
    return (scores > -torch.inf).expand(sizes)


@settings(max_examples=25)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 300), st.integers(1, 300)),
    block=st.sampled_from(BLOCKS),
    shared=st.tuples(st.booleans(), st.booleans()),
    tile=st.sampled_from([Tile(), Tile(128, 128), Tile(32, 64)]),
    seed=st.integers(0, 2**31),
)
def test_the_lists_and_the_score_mod_together_show_the_dense_mask(
    sizes: Sizes, block: tuple[int, int], shared: tuple[bool, bool], tile: Tile, seed: int
) -> None:
    mask, expected = random_mask(sizes, block, shared, seed)
    found = limited(mask, sizes, tile)
    assert found.block_states is not None
    listed = dense(found, sizes)
    assert torch.equal(listed & shown(mask, found.block_states, sizes), expected)
    visible = torch.nn.functional.pad(expected, (0, -sizes[3] % tile.keys, 0, -sizes[2] % tile.queries))
    visible = visible.unflatten(3, (-1, tile.keys)).unflatten(2, (-1, tile.queries)).any(-1).any(3)
    tiles = listed[:, :, :: tile.queries, :: tile.keys]
    assert (tiles | ~visible).all()
    touched = in_tiles(found.block_states > 0, mask.BLOCK_SIZE, sizes, tile)
    assert not (tiles & ~touched).any()


def in_tiles(blocks: Tensor, block_size: tuple[int, int], sizes: Sizes, tile: Tile) -> Tensor:
    """Which tiles touch a block, by a loop over all tiles."""
    batch, heads, seqlen_q, seqlen_k = sizes
    rows, columns = -(-seqlen_q // tile.queries), -(-seqlen_k // tile.keys)
    found = torch.zeros(batch, heads, rows, columns, dtype=torch.bool)
    for m in range(rows):
        for n in range(columns):
            q, k = (
                torch.arange(i * t, min(i * t + t, s))
                for i, t, s in ((m, tile.queries, seqlen_q), (n, tile.keys, seqlen_k))
            )
            part = blocks[:, :, (q // block_size[0]).unique()][..., (k // block_size[1]).unique()]
            found[:, :, m, n] = part.flatten(2).any(2)
    return found


def test_bits_up_to_the_limit_are_kept() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    limits = {limit: limited(mask, (1, 1, 256, 256), limit=limit) for limit in (4 * 1024, 4 * 1024 - 1)}
    assert [found.block_states is None for found in limits.values()] == [True, False]


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_a_mask_mod_may_index_beyond_a_tensor_outside_of_partial_blocks(tmp_path: Path) -> None:
    band = torch.arange(40) < 30
    full = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    mask = BlockMask.from_kv_blocks(
        full.kv_num_blocks,
        full.kv_indices,
        full.full_kv_num_blocks,
        full.full_kv_indices,
        BLOCK_SIZE=32,
        mask_mod=lambda b, h, q, k: band[(q - k).abs()] & (q >= k),
    )
    sizes = (1, 1, 128, 128)
    found = limited(mask, sizes)
    assert found.block_states is not None
    mods = HostMods(tmp_path)
    mods.add_training("hidden", hidden_scores(None, mask, found.block_states))
    mods.compile()
    indices = torch.stack([i.expand(sizes).flatten() for i in indices_of(sizes)])
    scores = mods.run("hidden_score", torch.zeros(indices.shape[1]), indices).view(sizes)
    bits = dense(key_block_lists(mask, sizes), sizes)
    assert torch.equal((scores > -torch.inf) & dense(found, sizes), bits)


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("shared", [(False, False), (True, False), (False, True), (True, True)])
def test_the_emitted_function_hides_the_same_pairs_and_their_gradients(
    shared: tuple[bool, bool], tmp_path: Path
) -> None:
    mask, expected = random_mask(SMALL, (16, 32), shared, 5)
    states = limited(mask, SMALL).block_states
    assert states is not None
    table = torch.linspace(0.5, 2.0, 2)
    mods = HostMods(tmp_path)
    mods.add_training("hidden", hidden_scores(lambda s, b, h, q, k: s * table[h], mask, states), [table])
    mods.add_training("plain", hidden_scores(None, mask, states))
    mods.compile()
    indices = torch.stack([i.expand(SMALL).flatten() for i in indices_of(SMALL)])
    scores, visible = torch.linspace(-3, 3, indices.shape[1]), expected.flatten()
    factors = table[indices[1].long()]
    for name, factor in (("hidden", factors), ("plain", torch.ones_like(factors))):
        found = mods.run(f"{name}_score", scores, indices)
        assert torch.equal(found, (scores * factor).masked_fill(~visible, -torch.inf))
        assert torch.equal(mods.run(f"{name}_gradient", scores, indices), factor.masked_fill(~visible, 0.0))
    mods.run("hidden_gradient", scores, indices)
    assert table.grad is not None
    want = torch.zeros(2).index_add(0, indices[1].long(), scores.masked_fill(~visible, 0.0))
    torch.testing.assert_close(table.grad, want, rtol=1e-4, atol=1e-3)


@needs_nvrtc
def test_a_kernel_compiles_with_a_mask(host: Any) -> None:  # noqa: F811
    mask, _ = random_mask(SMALL, (16, 32), (False, False), 5)
    states = limited(mask, SMALL).block_states
    assert states is not None
    mod = hidden_scores(lambda s, b, h, q, k: s * 2, mask, states)
    assert Captures(mod).key is not None  # so it is traced once
    text = generated.kernel_source(source_of(mod, []), sm90_kernel(host, 64), torch.bfloat16)
    assert nvrtc.compile_source(text, nvrtc.compiler_options("sm_90a"))


def test_a_call_beyond_the_limit_gets_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, _ = random_mask(SMALL, (16, 32), (False, False), 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(lists, "LIMIT", -1)
    rows, keys = torch.zeros(2, 2, 40, 64), torch.zeros(2, 2, 50, 64)
    call = DecodingCall(None, mask, 1.0)
    found = kernel_lists_of(call, rows, keys, Tile())
    assert found.block_states is not None and kernel_lists_of(call, rows, keys, Tile()) is found
    mods: list[Any] = []
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())
    monkeypatch.setattr(backends, "generated", lambda mod, *_: mods.append(mod))
    for mod in (None, lambda s, b, h, q, k: 5 * torch.tanh(s / 5)):
        call = chosen(mod, [], mask, lists=found)
        assert call.operator is torch.ops.flashbwd.score_mod_attention_backward and "softcap" not in call.options
    assert len(mods) == 2 and all(mod.__name__ == "hidden" for mod in mods)


def test_a_mask_mod_that_does_not_run_on_scalars_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {torch.device("meta"): torch.zeros(50)}
    mask, _ = random_mask(SMALL, (16, 32), (True, True), 5)
    mask.mask_mod = lambda b, h, q, k: tables[q.device][q] == 1
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())
    found = ANY_LISTS._replace(
        block_states=limited(random_mask(SMALL, (16, 32), (True, True), 5)[0], SMALL).block_states
    )
    with pytest.raises(UnsupportedError, match="no kernel evaluates its mask_mod: "):
        chosen(None, [], mask, lists=found)


def test_a_compiled_graph_gets_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, expected = random_mask(SMALL, (16, 32), (True, True), 5)
    table = expected[0, 0].int()
    graph = make_fx(lambda b, h, q, k, t: torch.ops.aten.index.Tensor(t, [q, k]) > 0)
    text = text_of("mask_mod", graph(*[torch.zeros((), dtype=torch.int32) for _ in range(4)], torch.zeros(4, 4)))
    tensors = [getattr(mask, name) for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")]
    tensors += [getattr(mask, f"full_{name}") for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")]
    call = graph_operator.call_of(SMALL[2:], tensors, (16, 32), text, [table], [], [], "", [], [], [], 0.1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(lists, "LIMIT", -1)
    rows, keys = torch.zeros(2, 2, 40, 64), torch.zeros(2, 2, 50, 64)
    for lists_of in (graph_operator._lists_of, graph_operator._made_lists_of):
        found = lists_of(call, rows, keys, Tile())
        assert found.block_states is not None
        mod = hidden_scores(None, call.block_mask, found.block_states)
        scores = torch.stack([mod(torch.zeros(()), *pair) for pair in pairs_of(SMALL)]).view(SMALL)
        assert torch.equal(scores > -torch.inf, expected)
        assert Captures(mod).key is not None
