"""Beyond the limit on memory, the lists show whole tiles, and the score_mod of the kernel hides what the mask hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.compiler import needs_nvrtc
from kit.emission import HostMods, compiler
from test_flex_captured_bias import chosen
from test_flex_generated import host, sm90_kernel, source_of  # noqa: F401
from test_flex_lists import Sizes, dense, random_mask
from torch import Tensor

from flashbwd.flex import backends, generated, lists
from flashbwd.flex.cache import kernel_lists_of
from flashbwd.flex.hidden_scores import hidden_scores
from flashbwd.flex.lists import key_block_lists
from flashbwd.flex.tile import Tile
from flashbwd.mods import nvrtc
from flashbwd.mods.captures import Captures

BLOCKS = [(64, 64), (128, 128), (192, 256), (16, 32), (20, 48), (1 << 30, 1 << 30)]
SMALL: Sizes = (2, 2, 40, 50)


def indices_of(sizes: Sizes) -> list[Tensor]:
    return [
        torch.arange(n, dtype=torch.int32).view([-1 if i == at else 1 for i in range(4)]) for at, n in enumerate(sizes)
    ]


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
    found = key_block_lists(mask, sizes, tile, limit=-1)
    assert found.block_states is not None
    listed = dense(found, sizes)
    assert torch.equal(listed & shown(mask, found.block_states, sizes), expected)
    visible = torch.nn.functional.pad(expected, (0, -sizes[3] % tile.keys, 0, -sizes[2] % tile.queries))
    visible = visible.unflatten(3, (-1, tile.keys)).unflatten(2, (-1, tile.queries)).any(-1).any(3)
    tiles = listed[:, :, :: tile.queries, :: tile.keys]
    assert (tiles | ~visible).all()


def test_bits_up_to_the_limit_are_kept() -> None:
    mask, _ = random_mask((1, 1, 128, 128), (64, 128), (True, True), 3)
    tiles = key_block_lists(mask, (1, 1, 128, 128)).bits.shape[0]
    assert tiles > 0
    at = [key_block_lists(mask, (1, 1, 128, 128), limit=2 * 1024 - spare).block_states is None for spare in (0, 2048)]
    assert at == [True, False]


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("shared", [(False, False), (True, False), (False, True), (True, True)])
def test_the_emitted_function_hides_the_same_pairs_and_their_gradients(
    shared: tuple[bool, bool], tmp_path: Path
) -> None:
    mask, expected = random_mask(SMALL, (16, 32), shared, 5)
    states = key_block_lists(mask, SMALL, limit=-1).block_states
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
    states = key_block_lists(mask, SMALL, limit=-1).block_states
    assert states is not None
    mod = hidden_scores(lambda s, b, h, q, k: s * 2, mask, states)
    assert Captures(mod).key is not None  # so it is traced once
    text = generated.kernel_source(source_of(mod, []), sm90_kernel(host, 64), torch.bfloat16)
    assert nvrtc.compile_source(text, nvrtc.compiler_options("sm_90a"))


def test_a_call_beyond_the_limit_gets_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, _ = random_mask(SMALL, (16, 32), (False, False), 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(lists, "DEFAULT_LIMIT", -1)
    rows, keys = torch.zeros(2, 2, 40, 64), torch.zeros(2, 2, 50, 64)
    found = kernel_lists_of(mask, [], rows, keys, Tile())
    assert found.block_states is not None and kernel_lists_of(mask, [], rows, keys, Tile()) is found
    mods: list[Any] = []
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())
    monkeypatch.setattr(backends, "generated", lambda mod, *_: mods.append(mod))
    for mod in (None, lambda s, b, h, q, k: 5 * torch.tanh(s / 5)):
        call = chosen(mod, [], mask, lists=found)
        assert call.operator is torch.ops.flashbwd.score_mod_attention_backward and "softcap" not in call.options
    assert len(mods) == 2 and all(mod.__name__ == "hidden" for mod in mods)
