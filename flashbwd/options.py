"""The options of attention, as the operators and the reference take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionOptions(NamedTuple):
    """All options of ``flashbwd::attention_backward``, in the order of its schema and with its defaults.

    :func:`flashbwd.attention_backward` documents them under the same names. Three public arguments have another form
    here: ``causal`` is the name of an alignment, ``window_size`` is two numbers, and ``rng_state`` is three values. The
    last four options have no public argument of their own.

    A test compares this class with the operators' schemas, which C++ derives from ``AttentionArguments``
    (``csrc/attention/problem.h``), and with the signatures of the public functions.
    """

    attn_bias: Tensor | None = None
    key_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dlse: Tensor | None = None
    rng_seed: Tensor | None = None
    rng_offset: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    softmax_scale: float | None = None
    causal: str = "none"  # "none", "bottom_right", "top_left"
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng_layout: str = ""  # "", "flash", "efficient32", "efficient64"
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    need_dbias: bool = True  # whether attn_bias gets a gradient
    deterministic: bool = False
    backend: str = "auto"  # set by flashbwd.use_backend
    allow_tf32: bool = False  # matrix products of float32 inputs may round their operands to TF32

    @property
    def window(self) -> tuple[int, int]:
        """Number of visible keys to the left and right of the diagonal; -1 is unbounded."""
        return self.window_left, self.window_right
