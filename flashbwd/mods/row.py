"""Values that a modification computes once per query row instead of once per score."""

from __future__ import annotations

import torch

from flashbwd.mods.operators import ROUNDED, ROW_BYTES, c_type


class Row:
    """Collects the per-row values of all modifications of a kernel and writes them as a C++ struct."""

    def __init__(self) -> None:
        self._fields: dict[str, torch.dtype] = {}
        self._lines: list[str] = []

    def take(self, function: str, lines: list[str], values: dict[str, torch.dtype]) -> dict[str, str]:
        """Add ``values``, which ``lines`` compute, as fields until the struct has ``ROW_BYTES`` bytes.

        Returns the field name of each value that became a field.
        """
        taken = {}
        for name, dtype in values.items():
            if sum(map(_bytes_of, self._fields.values())) + _bytes_of(dtype) <= ROW_BYTES:
                taken[name] = f"{function}_{name}"
                self._fields[taken[name]] = dtype
        if taken:
            results = [f"{field} = {name};" for name, field in taken.items()]
            self._lines += ["{", *(f"  {line}" for line in lines + results), "}"]
        return taken

    def text(self) -> str:
        """Return the struct definition, or an empty string if there are no fields."""
        if not self._fields:
            return ""
        by_size = sorted(self._fields.items(), key=lambda field: -_bytes_of(field[1]))  # avoids padding
        fields = "\n    ".join(f"{c_type(dtype)} {name};" for name, dtype in by_size)
        lines = "\n      ".join(self._lines)
        return f"""  static constexpr bool kHasRow = true;
  struct Row {{
    {fields}
    Row() = default;
    __device__ Row(const DecodingParams& p, int b, int h, int q) {{
      {lines}
    }}
  }};
"""


def _bytes_of(dtype: torch.dtype) -> int:
    return 4 if dtype in ROUNDED else dtype.itemsize
