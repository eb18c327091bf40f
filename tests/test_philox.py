"""Dropout masks: Philox gives the known answers, and each layout agrees with a scalar implementation."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from flashbwd import philox

MASK32 = 2**32 - 1


@pytest.mark.parametrize(
    ("rounds", "words"),
    [(10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (7, "5f6fb709 0d893f64 4f121f81 4f730a48")],
)
def test_zero_counter_and_key_give_the_published_words(rounds: int, words: str) -> None:
    expected = [int(word, 16) for word in words.split()]
    zero = torch.zeros((), dtype=torch.int64)
    assert [int(word) for word in philox.philox4x32((zero, zero, zero, zero), (0, 0), rounds)] == expected
    assert philox.philox4x32((0, 0, 0, 0), (0, 0), rounds) == expected


def test_ten_rounds_match_the_published_vectors_of_other_counters() -> None:
    ones = MASK32
    assert philox.philox4x32((ones, ones, ones, ones), (ones, ones), 10) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    tensors: Any = tuple(torch.tensor([word]) for word in pi)
    words = philox.philox4x32(tensors, (0xA4093822, 0x299F31D0), 10)
    assert [int(word) for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def scalar_philox(counter: list[int], seed: int, rounds: int) -> list[int]:
    c, key = list(counter), [seed & MASK32, seed >> 32 & MASK32]
    for _ in range(rounds):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ key[0], b & MASK32, (a >> 32) ^ c[3] ^ key[1], a & MASK32]
        key = [(key[0] + 0x9E3779B9) & MASK32, (key[1] + 0xBB67AE85) & MASK32]
    return c


def scalar_keep(
    layout: str, seed: int, offset: int, p: float, bh: int, i: int, j: int, sk: int, mq: int, mk: int
) -> bool:
    p32 = np.float32(p)
    if layout == "flash":
        r, c = i % 16, j % 32
        low = (offset + bh * 32 + r % 8 * 4 + c % 8 // 2) % 2**64
        words = scalar_philox([low & MASK32, low >> 32, i // 16, j // 32], seed, 7)
        byte = c // 16 * 8 + c % 16 // 8 * 4 + r // 8 * 2 + c % 2
        value = words[byte // 4] >> 8 * (byte % 4) & 255
        return value <= int(np.floor(float(np.float32(1) - p32) * 255.0))
    plane, within = bh * mq * mk, i * sk + j
    if layout == "efficient32":
        plane, within = plane & MASK32, within & MASK32
    n = (offset + plane + within) % 2**64
    word = scalar_philox([n // 4 & MASK32, n // 4 >> 32, 0, 0], seed, 10)[n % 4]
    return bool(np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33) > p32)


@pytest.mark.parametrize("layout", philox.LAYOUTS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.83])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (0x0123456789ABCDEF, 7), (2**64 - 3, 2**33 + 1), (5, 2**64 - 30)])
def test_a_tile_agrees_with_a_scalar_implementation(layout: str, p: float, seed: int, offset: int) -> None:
    rows, cols, bhs = (13, 35), (27, 71), (0, 3, 10)
    sizes = {"seqlen_k": 75, "max_seqlen_q": 40, "max_seqlen_k": 80}
    device = torch.device("cpu")
    mask = philox.keep_mask(
        layout,
        philox.as_word64(seed, device),
        philox.as_word64(offset, device),
        p,
        torch.tensor(bhs),
        rows,
        cols,
        **sizes,
    )
    expected = [
        [[scalar_keep(layout, seed, offset, p, bh, i, j, 75, 40, 80) for j in range(*cols)] for i in range(*rows)]
        for bh in bhs
    ]
    assert mask.tolist() == expected


@pytest.mark.parametrize("first", [0, 6, 2**34 - 9])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (0x0123456789ABCDEF, 7), (5, 2**33 + 1)])
def test_elements_agree_with_a_scalar_implementation(seed: int, offset: int, first: int) -> None:
    kept = philox.keep_elements(seed, offset, 0.4, first, 50, torch.device("cpu"))
    expected = [scalar_keep("efficient64", seed, offset, 0.4, 0, 0, n, 0, 0, 0) for n in range(first, first + 50)]
    assert kept.tolist() == expected


@pytest.mark.parametrize("layout", ["efficient32", "efficient64"])
def test_numbers_beyond_32_bits_wrap_only_in_the_32_bit_numbering(layout: str) -> None:
    sk = 70001
    row = 2**32 // sk
    sizes = {"seqlen_k": sk, "max_seqlen_q": 70003, "max_seqlen_k": sk}
    border = 2**32 - row * sk  # the column at which i * Sk + j reaches 2**32
    rows, cols = (row - 1, row + 2), (border - 6, border + 7)
    mask = philox.keep_mask(layout, 9, 3, 0.4, torch.tensor([0, 5]), rows, cols, **sizes)
    expected = [
        [[scalar_keep(layout, 9, 3, 0.4, bh, i, j, sk, 70003, sk) for j in range(*cols)] for i in range(*rows)]
        for bh in (0, 5)
    ]
    assert mask.tolist() == expected


@pytest.mark.parametrize("layout", philox.LAYOUTS)
def test_tiles_together_form_the_whole_mask(layout: str) -> None:
    sizes: Any = {"seqlen_k": 90, "max_seqlen_q": 50, "max_seqlen_k": 90}
    mask: Any = functools.partial(philox.keep_mask, layout, 77, 12, 0.3, torch.arange(3), **sizes)
    whole = mask((0, 50), (0, 90))
    for rows in ((0, 17), (17, 50)):
        for cols in ((0, 33), (33, 34), (34, 90)):
            part = mask(rows, cols)
            assert torch.equal(part, whole[:, rows[0] : rows[1], cols[0] : cols[1]])


@pytest.mark.parametrize("layout", philox.LAYOUTS)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_share_of_kept_elements_is_one_minus_p(layout: str, p: float) -> None:
    sizes = {"seqlen_k": 512, "max_seqlen_q": 512, "max_seqlen_k": 512}
    mask = philox.keep_mask(layout, 1234, 0, p, torch.arange(4), (0, 512), (0, 512), **sizes)
    assert mask.float().mean().item() == pytest.approx(1.0 - p, abs=0.005)


def test_a_seed_may_be_an_integer_or_a_tensor() -> None:
    device = torch.device("cpu")
    top = 2**64 - 5
    assert philox.as_word64(top, device) == -5
    assert philox.as_word64(torch.tensor(-5), device) == -5
    assert philox.as_word64(torch.tensor([top], dtype=torch.uint64), device) == -5


def test_scale_is_rounded_to_the_inputs_dtype_by_the_memory_efficient_forward_only() -> None:
    assert philox.keep_scale("flash", 0.1, torch.bfloat16) == 1.0 / 0.9
    assert philox.keep_scale("efficient64", 0.1, torch.float64) == 1.0 / 0.9
    assert philox.keep_scale("efficient64", 0.1, torch.bfloat16) == float(torch.tensor(1.0 / 0.9).bfloat16())


def test_the_error_names_an_unknown_layout() -> None:
    with pytest.raises(ValueError, match="'cudnn'"):
        philox.keep_mask(
            "cudnn", 0, 0, 0.1, torch.arange(1), (0, 1), (0, 1), seqlen_k=1, max_seqlen_q=1, max_seqlen_k=1
        )
