"""Integrations that let existing code use this library: PyTorch's operators, Inductor, DTensor and Transformers."""

from __future__ import annotations
