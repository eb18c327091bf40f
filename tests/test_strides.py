"""New tensors have the strides that torch.empty_like gives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.host import load_host

host = load_host()


@st.composite
def sizes_and_strides(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes and strides of permuted, sliced, expanded and other views."""
    sizes = draw(st.lists(st.integers(0, 5), max_size=5))
    order = draw(st.permutations(range(len(sizes))))
    strides = [0] * len(sizes)
    step = 1
    for dim in order:
        strides[dim] = draw(st.sampled_from([step, step, step, 0, step + 3]))
        step = max(step, strides[dim] * sizes[dim]) * draw(st.sampled_from([1, 1, 2]))
    return sizes, strides


@given(sizes_and_strides())
def test_new_strides_equal_those_of_empty_like(drawn: tuple[list[int], list[int]]) -> None:
    sizes, strides = drawn
    found = host.strides_without_gaps(sizes, strides)
    if found is not None:
        view = torch.empty(10**6, dtype=torch.uint8).as_strided(sizes, strides)
        assert found == list(torch.empty_like(view).stride())


def test_new_strides_of_common_layouts_are_right() -> None:
    packed = torch.empty(2, 7, 3, 4, 8).unbind(2)[1]
    for x in (torch.empty(2, 7, 4, 8), torch.empty(2, 7, 4, 8).transpose(1, 2), packed, packed.transpose(1, 2)):
        assert host.strides_without_gaps(x.shape, x.stride()) == list(torch.empty_like(x).stride())
