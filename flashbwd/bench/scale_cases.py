"""The cases of the suite ``scale``: causal attention, forward and backward, split over all devices of the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashbwd.bench.cases import DTYPES, Bar, long_tailed_lengths

ONE_TORCH = "torch, one device"
ONE_FLASHBWD = "flashbwd, one device"
RINGS = ("ring", "all-gather")  # PyTorch's ways to exchange keys: "alltoall" and "allgather" of its set_rotate_method
OURS = "flashbwd context_parallel_attention"
WITHOUT_EXCHANGE = ", without exchange"  # suffix of a peer's name

EFFICIENT_FROM = 65536  # tokens per device from which the bar on efficiency applies
EFFICIENCY, SPEEDUP = 0.9, 1.10


@dataclass(frozen=True)
class ScaleCase:
    """Causal self-attention of ``seqlen`` rows over ``devices`` devices: the forward and the backward.

    With ``lengths`` the rows are packed documents. ``rounds`` is the number of timed rounds.
    """

    table: str
    devices: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: str = "bf16"
    rounds: int = 5
    lengths: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        rows = f"T{self.seqlen} in {len(self.lengths)} documents" if self.lengths else f"S{self.seqlen}"
        heads = f"H{self.heads}:{self.heads_kv} D{self.head_dim}"
        return f"{self.dtype} {rows} {heads} causal, {self.devices} devices"

    @property
    def work(self) -> float:
        """Floating-point operations: two products in the forward, five in the backward, each over half the pairs."""
        pairs = sum(length * length / 2 for length in self.lengths or (self.seqlen,))
        return self.heads * pairs * 14 * self.head_dim

    @property
    def bytes_per_element(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Bars for the efficiency over one device, and for the speed over the same exchange with PyTorch's backward."""
        if self.lengths or self.dtype != "bf16" or self.seqlen < EFFICIENT_FROM * self.devices:
            return ()
        found = []
        for ring in RINGS:
            found.append(Bar(f"flashbwd {ring}", ONE_FLASHBWD, EFFICIENCY * self.devices))
            found.append(Bar(f"flashbwd {ring}", f"torch {ring}", SPEEDUP))
        return (*found, Bar(OURS, ONE_FLASHBWD, EFFICIENCY * self.devices))


def scale_cases(devices: int, device_type: str, quick: bool) -> tuple[ScaleCase, ...]:
    """Return the cases on a machine, shortest first. They are small on the CPU and with ``quick``."""
    if device_type == "cpu":
        dense = ScaleCase("scale", devices, 256, 4, 2, 16, "fp32", 2)
        return (
            dense,
            replace(dense, seqlen=512),
            replace(dense, table="scale_packed", lengths=long_tailed_lengths(256, typical=32, longest=128)),
        )
    dense = ScaleCase("scale", devices, 32768, 32, 8, 128)
    # A round of the longest case takes half a minute on two H100s.
    cases = tuple(replace(dense, seqlen=s * 1024, rounds=r) for s, r in ((32, 5), (64, 5), (128, 3), (256, 2)))
    lengths = long_tailed_lengths(131072, typical=4096, longest=65536)
    packed = replace(dense, table="scale_packed", seqlen=131072, rounds=5, lengths=lengths)
    return (*cases[:1], packed) if quick else (*cases, packed)
