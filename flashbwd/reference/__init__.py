"""The reference backend: blockwise implementations with matrix products and elementwise operators of PyTorch.

It runs on CPUs, and on GPUs for cases without a kernel. No function calls an attention or normalisation kernel of
PyTorch or another library. No function allocates an (Sq, Sk) tensor: memory is O(S * block).
"""

from __future__ import annotations

from flashbwd.reference.backward import attention_backward
from flashbwd.reference.forward import attention_forward
from flashbwd.reference.norms import (
    dropout_add_norm_backward,
    dropout_add_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
    norm_backward_from_output,
    rms_norm_backward,
    rms_norm_forward,
)

__all__ = [
    "attention_backward",
    "attention_forward",
    "dropout_add_norm_backward",
    "dropout_add_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "norm_backward_from_output",
    "rms_norm_backward",
    "rms_norm_forward",
]
