"""Writes traced modifications as the struct that is a parameter of the decoding kernels."""

from __future__ import annotations

import torch

from flashbwd.mods.captures import Slots
from flashbwd.mods.emitter import MASK_PARAMETERS, SCORE_PARAMETERS, Emitter
from flashbwd.mods.row import Row
from flashbwd.mods.trace import Trace

__all__ = ["emit", "struct_of"]


def emit(score: Trace | None, mask: Trace | None, slots: Slots) -> str:
    """Return the source of ``struct Mod`` for the forward kernel, and add its captured tensors to ``slots``.

    Raises
    ------
    CannotEmitError
        If an operator or a capture has no CUDA implementation. The message names it.
    """
    score_body, mask_body = "return score;", "return true;"
    row = Row()
    if score is not None:
        score_body = Emitter("score_mod", score, slots).run(SCORE_PARAMETERS, torch.float32, row)
    if mask is not None:
        mask_body = Emitter("mask_mod", mask, slots).run(MASK_PARAMETERS, torch.bool, row)
    return struct_of(score is not None, mask is not None, "DecodingParams", score_body, mask_body, row.text())


def struct_of(has_score: bool, has_mask: bool, params: str, score: str, mask: str, more: str) -> str:
    """Return ``struct Mod`` with the given function bodies, and with ``more`` before these functions."""
    return f"""namespace flashbwd {{
struct Mod : AnyMod {{
  static constexpr bool kHasScoreMod = {str(has_score).lower()};
  static constexpr bool kHasMask = {str(has_mask).lower()};
{more}  __device__ static float score_mod(
      const {params}& p, const Row& row, float score, int b, int h, int q, int k, bool* near = nullptr) {{
    {score}
  }}
  __device__ static bool mask_mod(const {params}& p, const Row& row, int b, int h, int q, int k) {{
    {mask}
  }}
}};
}}  // namespace flashbwd
"""
