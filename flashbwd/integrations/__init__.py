"""What makes other people's code use the gradients of this library: PyTorch's own operators, and Transformers."""

from __future__ import annotations
