"""CUDA kernels for PyTorch: attention backward, LayerNorm and RMSNorm, and flex decoding."""

from __future__ import annotations

from flashbwd import _dropout_add_norm_operators, _environment, _norm_operators  # noqa: F401 (they register operators)
from flashbwd.attention import (
    AttentionGrads,
    Plan,
    RngState,
    attention,
    attention_backward,
    plan_attention_backward,
    use_backend,
)
from flashbwd.decoding import flex_decoding
from flashbwd.dropout_add_norm import (
    DropoutAddNormGrads,
    dropout_add_layer_norm,
    dropout_add_layer_norm_backward,
    dropout_add_rms_norm,
    dropout_add_rms_norm_backward,
)
from flashbwd.flex.attention import (
    FlexAttentionGrads,
    FlexPlan,
    flex_attention,
    flex_attention_backward,
    plan_flex_attention_backward,
)
from flashbwd.integrations.overrides import OperatorStats, Overrides, disable, enable, stats
from flashbwd.layer_norm import LayerNorm, RMSNorm, layer_norm, rms_norm
from flashbwd.mods.handle import compile_mods
from flashbwd.norm_backward import (
    LayerNormGrads,
    RMSNormGrads,
    layer_norm_backward,
    layer_norm_backward_from_output,
    rms_norm_backward,
    rms_norm_backward_from_output,
)
from flashbwd.pair_bias import evoformer_attention, triangle_attention
from flashbwd.self_attention import SelfAttention

__version__ = "0.1.0"

__all__ = [
    "AttentionGrads",
    "DropoutAddNormGrads",
    "FlexAttentionGrads",
    "FlexPlan",
    "LayerNorm",
    "LayerNormGrads",
    "OperatorStats",
    "Overrides",
    "Plan",
    "RMSNorm",
    "RMSNormGrads",
    "RngState",
    "SelfAttention",
    "__version__",
    "attention",
    "attention_backward",
    "compile_mods",
    "disable",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_backward",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_backward",
    "enable",
    "evoformer_attention",
    "flex_attention",
    "flex_attention_backward",
    "flex_decoding",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_backward_from_output",
    "plan_attention_backward",
    "plan_flex_attention_backward",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_from_output",
    "stats",
    "triangle_attention",
    "use_backend",
]

_environment.warn_about_unknown_variables()
