"""Attention problems as data: named cases for every feature and edge, and hypothesis strategies over the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

Lengths = tuple[int, ...]

LAYOUTS = (
    "contiguous",
    "packed_qkv",  # q, k, v are views of one buffer (only k and v if the shape of q does not fit)
    "bhsd",  # stored as (B, H, S, D), viewed as (B, S, H, D)
    "odd_strides",  # an odd number of unused elements follows every row
    "offset",  # contiguous, one element past an aligned address
    "every_other_row",  # x[:, ::2] of a buffer twice as long
)
DOUT_LAYOUTS = ("same", "expanded_scalar", "expanded_row")
LSE_FORMS = ("rows", "rows1", "padded")  # (B, H, Sq) | (B, H, Sq, 1) | (B, H, roundup(Sq, 32))
BIAS_LAYOUTS = ("contiguous", "padded", "expanded")  # padded: rows start at 16 bytes; expanded: batches share memory
RNG_LAYOUTS = ("flash", "efficient32", "efficient64")
# None: no mask. "random": about half of the keys; "padding": the first keys, another number in each sequence; "empty":
# random, and no key of the first sequence.
KEY_MASKS = (None, "random", "padding", "empty")
LEAST = -(2.0 - 2.0**-7) * 2.0**127  # the lowest finite bfloat16 number; -inf in float16


@dataclass(frozen=True)
class Case:
    """One call of attention_backward. It is packed if ``seqlens_q`` is set, else dense.

    ``seqlens_*`` are physical lengths, ``seqused_*`` logical ones. ``bias`` gives the shape of attn_bias in (B, H, Sq,
    Sk), with "1" for a broadcast dimension: "bhqk", "1h1k". ``bias_floor`` replaces -inf in the bias. ``empty_lse`` is
    the LSE of rows that see no key. max_seqlen_* exceed the longest sequence by ``slack``. ``trailing`` rows follow the
    last sequence. ``key_mask`` is one of KEY_MASKS; dense cases only.
    """

    name: str
    batch: int = 2
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 33
    seqlen_k: int = 33
    head_dim: int = 16
    head_dim_v: int = 16
    seqlens_q: Lengths | None = None
    seqlens_k: Lengths | None = None
    seqused_q: Lengths | None = None
    seqused_k: Lengths | None = None
    slack: int = 0
    trailing: int = 0
    softmax_scale: float | None = None
    causal: bool | str = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: str | None = None
    bias_float32: bool = False
    bias_layout: str = "contiguous"
    bias_hides_rows: bool = False  # -inf in some rows of the bias, and in some single entries
    bias_floor: float = float("-inf")
    key_mask: str | None = None
    key_mask_layout: str = "contiguous"  # "strided": no stride is 1; "expanded": sequences share the memory
    alibi: str | None = None  # "heads": (H,), "batch": (B, H)
    sink: str | None = None  # "finite", or "minus_inf" with -inf for head 0
    dlse: bool = False
    one_sign: bool = False  # all terms of dq, dk, dv and dbias have one sign (by a large dlse), so sums only grow
    dropout_p: float = 0.0
    rng_layout: str = "flash"
    rng_seed: int = 0x1234_5678_9ABC_DEF
    rng_offset: int = 4
    lse_form: str = "rows"
    empty_lse: float = float("inf")
    layout: str = "contiguous"
    dout_layout: str = "same"
    deterministic: bool = False

    @property
    def varlen(self) -> bool:
        return self.seqlens_q is not None

    @property
    def batch_size(self) -> int:
        return len(self.seqlens_q) if self.seqlens_q is not None else self.batch

    @property
    def physical_q(self) -> Lengths:
        return self.seqlens_q if self.seqlens_q is not None else (self.seqlen_q,) * self.batch

    @property
    def physical_k(self) -> Lengths:
        return self.seqlens_k if self.seqlens_k is not None else (self.seqlen_k,) * self.batch

    @property
    def logical_q(self) -> Lengths:
        return self.seqused_q if self.seqused_q is not None else self.physical_q

    @property
    def logical_k(self) -> Lengths:
        return self.seqused_k if self.seqused_k is not None else self.physical_k

    @property
    def max_seqlen_q(self) -> int:
        return max(self.physical_q, default=0) + self.slack if self.varlen else self.seqlen_q

    @property
    def max_seqlen_k(self) -> int:
        return max(self.physical_k, default=0) + self.slack if self.varlen else self.seqlen_k

    def __str__(self) -> str:
        return self.name


def _varlen(name: str, seqlens_q: Lengths, seqlens_k: Lengths | None = None, **changes: object) -> Case:
    case = Case(name, seqlens_q=seqlens_q, seqlens_k=seqlens_q if seqlens_k is None else seqlens_k)
    return replace(case, **changes)  # type: ignore[arg-type]


def _sizes() -> list[Case]:
    """Lengths around the tile sizes (64, 128), primes, 1 and 0; head dimensions that are multiples of 8 or not."""
    lengths = [(1, 1), (1, 67), (67, 1), (63, 64), (64, 65), (65, 63), (127, 128), (128, 129), (129, 127), (97, 131)]
    lengths += [(0, 5), (5, 0), (0, 0)]
    cases = [Case(f"seqlen_{q}x{k}", batch=1, seqlen_q=q, seqlen_k=k) for q, k in lengths]
    cases += [Case(f"seqlen_{q}x{k}_causal", batch=1, seqlen_q=q, seqlen_k=k, causal=True) for q, k in lengths]
    cases += [Case(f"seqlen_{q}x{k}_bias", batch=1, seqlen_q=q, seqlen_k=k, bias="bhqk") for q, k in lengths[-3:]]
    dims = [(1, 1), (8, 8), (24, 40), (33, 31), (64, 64), (65, 64), (80, 80), (96, 128), (128, 128), (192, 128)]
    dims += [(256, 256), (257, 3), (512, 16)]
    cases += [Case(f"head_dim_{d}x{dv}", batch=1, head_dim=d, head_dim_v=dv) for d, dv in dims]
    cases.append(Case("batch_0", batch=0))
    return cases


def _wide() -> list[Case]:
    """Head dimensions larger than any tile, with every feature and lengths that do not fill a tile."""
    base = Case("base", batch=1, heads=2, heads_kv=1, seqlen_q=270, seqlen_k=140, head_dim=320, head_dim_v=320)
    dims = [(264, 264), (320, 320), (384, 384), (512, 512), (1024, 1024), (512, 64), (40, 520), (576, 512), (263, 257)]
    cases = [replace(base, name=f"wide_{d}x{dv}", head_dim=d, head_dim_v=dv) for d, dv in dims]
    return [
        *cases,
        replace(base, name="wide_causal", causal=True, batch=2, seqlen_k=300),
        replace(base, name="wide_top_left", causal="top_left", head_dim=512, head_dim_v=512),
        replace(base, name="wide_window", window_size=(30, 20), seqlen_k=290, head_dim=512),
        replace(base, name="wide_deterministic", deterministic=True, causal=True, seqlen_k=290),
        replace(base, name="wide_bias", bias="bhqk", softcap=2.0, alibi="heads", sink="finite", causal=True),
        replace(base, name="wide_bias_heads", bias="b1qk", dlse=True, head_dim_v=300, bias_hides_rows=True),
        replace(base, name="wide_bias_row", bias="1h1k", deterministic=True),
        replace(base, name="wide_bias_column", bias="1hq1"),
        replace(base, name="wide_dropout_flash", dropout_p=0.2, head_dim=512, head_dim_v=512),
        replace(base, name="wide_dropout_efficient64", dropout_p=0.3, rng_layout="efficient64", causal=True),
        replace(base, name="wide_odd_strides", layout="odd_strides", head_dim=262),
        replace(base, name="wide_packed_qkv", layout="packed_qkv", seqlen_k=270, heads_kv=2),
        replace(base, name="wide_empty_rows", causal=True, seqlen_k=70, empty_lse=float("-inf")),
        replace(base, name="wide_seqused", batch=2, seqused_q=(100, 269), seqused_k=(140, 0), dlse=True),
        _varlen(
            "wide_varlen", (300, 1, 0, 65), (270, 130, 5, 0), head_dim=320, head_dim_v=512, causal=True, trailing=3
        ),
        _varlen("wide_varlen_bias", (20, 33), (40, 10), head_dim=512, head_dim_v=320, bias="bhqk", slack=40),
    ]


def _few_key_blocks() -> list[Case]:
    """Many queries and few keys, so that several thread blocks share the work on a block of keys."""
    base = Case("base", batch=1, heads=2, heads_kv=1, seqlen_q=700, seqlen_k=60, head_dim=64, head_dim_v=64)
    return [
        replace(base, name="few_keys"),
        replace(base, name="few_keys_group", heads=6, seqlen_q=260, seqlen_k=200, causal=True, head_dim_v=40),
        replace(base, name="few_keys_deterministic", deterministic=True, seqlen_k=200, head_dim=128, head_dim_v=128),
        replace(base, name="few_keys_bias_row", bias="1h1k", deterministic=True, dropout_p=0.1),
        replace(base, name="few_keys_bias", bias="11qk", causal="top_left", seqlen_k=300),
        replace(base, name="few_keys_wide", head_dim=320, head_dim_v=260, seqlen_k=100, deterministic=True),
        _varlen("few_keys_varlen", (700, 30, 0, 300), (70, 90, 20, 0), heads=4, head_dim=64, head_dim_v=64, trailing=3),
    ]


def _many_key_blocks() -> list[Case]:
    """More key blocks than a GPU has SMs, with full and partial tiles."""
    base = Case("base", batch=6, heads=12, heads_kv=12, seqlen_q=128, seqlen_k=256, head_dim=64, head_dim_v=64)
    return [
        replace(base, name="many_blocks"),
        replace(base, name="many_blocks_causal", seqlen_q=136, seqlen_k=270, causal=True),
        replace(base, name="many_blocks_rows_left", seqlen_q=130, head_dim=60, causal="top_left"),
        replace(base, name="many_blocks_128", head_dim=128, head_dim_v=128, seqlen_q=192, deterministic=True),
        replace(base, name="many_blocks_96", head_dim=96, head_dim_v=96, window_size=(70, 30)),
        replace(base, name="many_blocks_160", head_dim=160, head_dim_v=160, heads=6, heads_kv=6),
        replace(base, name="many_blocks_192", head_dim=192, head_dim_v=128, heads=12, heads_kv=6, causal=True),
        replace(base, name="many_blocks_256", head_dim=256, head_dim_v=256, heads=6, heads_kv=6, causal=True),
        replace(base, name="many_blocks_bias", bias="1hqk", dropout_p=0.1, causal=True),
        replace(base, name="many_blocks_bias_192", bias="b1qk", head_dim=192, head_dim_v=192, heads=6, heads_kv=6),
        replace(
            base, name="many_blocks_seqused", seqused_q=(128, 0, 100, 1, 64, 127), seqused_k=(0, 256, 129, 9, 1, 250)
        ),
        _varlen("many_blocks_varlen", (128, 0, 300, 65), (256, 130, 0, 513), heads=24, head_dim=64, head_dim_v=64),
    ]


def _heads() -> list[Case]:
    """Grouped heads, and more heads than a GPU processes at a time, whose order a schedule may vary."""
    pairs = [(4, 2), (6, 2), (3, 1), (8, 1), (5, 5)]
    many = Case("many_heads", heads=40, heads_kv=40, seqlen_q=200, seqlen_k=300, head_dim=64, head_dim_v=64)
    return [
        *(Case(f"heads_{h}to{kv}", heads=h, heads_kv=kv, causal=True) for h, kv in pairs),
        replace(many, name="many_heads_causal", causal=True),
        replace(many, name="many_heads_deterministic", causal=True, deterministic=True),
        replace(many, name="many_heads_top_left", causal="top_left", deterministic=True, head_dim=128, head_dim_v=128),
    ]


def _masks() -> list[Case]:
    cases: list[Case] = []
    for q, k in [(40, 40), (40, 70), (70, 40)]:
        for causal in (False, True, "top_left"):
            for window in [(-1, -1), (7, -1), (-1, 5), (7, 5), (0, 0), (200, 200)]:
                name = f"mask_{q}x{k}_{causal}_{window[0]}_{window[1]}"
                cases.append(
                    Case(name, batch=1, heads=1, heads_kv=1, seqlen_q=q, seqlen_k=k, causal=causal, window_size=window)
                )
    for value in (float("inf"), float("-inf"), 0.0):
        cases.append(Case(f"empty_rows_lse_{value}", seqlen_q=70, seqlen_k=20, causal=True, empty_lse=value))
    cases.append(Case("empty_rows_dlse", seqlen_q=70, seqlen_k=20, causal=True, dlse=True))
    cases.append(Case("empty_rows_sink", seqlen_q=70, seqlen_k=20, causal=True, sink="minus_inf", dlse=True))
    cases.append(Case("empty_rows_finite_sink", seqlen_q=70, seqlen_k=20, causal=True, sink="finite", dlse=True))
    return cases


def _score_features() -> list[Case]:
    base = Case("base", heads=4, heads_kv=2, seqlen_q=37, seqlen_k=70)
    cases = [
        replace(base, name="softmax_scale", softmax_scale=0.3),
        replace(base, name="softmax_scale_0", softmax_scale=0.0),
        replace(base, name="softmax_scale_negative", softmax_scale=-0.5),
        replace(base, name="softcap", softcap=1.5, head_dim=40),
        replace(base, name="softcap_large", softcap=30.0, causal=True),
        replace(base, name="alibi_heads", alibi="heads"),
        replace(base, name="alibi_batch_causal", alibi="batch", causal=True, head_dim=40),
        replace(base, name="alibi_top_left", alibi="heads", causal="top_left"),
        replace(base, name="sink", sink="finite"),
        replace(base, name="sink_minus_inf", sink="minus_inf", causal=True, head_dim=40),
        replace(base, name="dlse", dlse=True),
        replace(base, name="dlse_sink_causal", dlse=True, sink="finite", causal=True),
        replace(base, name="bias_softcap_alibi_sink", bias="bhqk", softcap=2.0, alibi="heads", sink="finite"),
    ]
    base = replace(base, head_dim=40)
    for bias in ("bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "11qk", "1h11", "b111", "111k", "1111"):
        cases.append(replace(base, name=f"bias_{bias}", bias=bias))
    cases.append(replace(base, name="bias_float32", bias="1hqk", bias_float32=True))
    cases.append(replace(base, name="bias_causal_skipped_tiles", bias="bhqk", seqlen_q=140, seqlen_k=150, causal=True))
    # Several tiles, the last ones partial. If only a few heads share a bias, they add to its gradient in a fixed order.
    shared = replace(base, heads=2, heads_kv=1, seqlen_q=520, seqlen_k=136, bias_hides_rows=True)
    cases += [
        replace(shared, name="bias_shared_by_batches", bias="1hqk"),
        replace(shared, name="bias_shared_by_heads", bias="b1qk", heads_kv=2, causal="top_left"),
        replace(shared, name="bias_shared_by_group", bias="b1qk", head_dim=128),
        replace(shared, name="bias_shared_by_all", bias="11qk", head_dim=96, causal=True),
        replace(shared, name="bias_shared_by_many", bias="11qk", batch=5),
        replace(shared, name="bias_shared_deterministic", bias="1hqk", head_dim=128, deterministic=True),
        replace(shared, name="bias_shared_odd", bias="1hqk", seqlen_k=135),
        replace(shared, name="bias_shared_float32", bias="1hqk", bias_float32=True, head_dim=128),
        replace(shared, name="bias_shared_unseen", bias="11qk", head_dim=128, window_size=(30, 20), seqlen_k=648),
    ]
    # Bias tiles that TMA loads and stores: the gradient itself, or one partial gradient per head that shares it.
    tiles = replace(base, seqlen_q=200, seqlen_k=328, bias="bhqk", bias_hides_rows=True)
    cases += [
        replace(tiles, name="bias_tiles", head_dim=64, causal=True),
        replace(tiles, name="bias_tiles_128", head_dim=128, head_dim_v=96),
        replace(tiles, name="bias_tiles_group", head_dim=128, heads=4, heads_kv=2, causal="top_left"),
        replace(tiles, name="bias_tiles_deterministic", head_dim=64, seqlen_q=520, deterministic=True),
        replace(tiles, name="bias_tiles_window", head_dim=96, heads=4, window_size=(30, 20), deterministic=True),
        replace(tiles, name="bias_tiles_padded", head_dim=64, seqlen_k=327, bias_layout="padded", causal=True),
        replace(tiles, name="bias_tiles_padded_shared", head_dim=128, seqlen_k=135, bias="1hqk", bias_layout="padded"),
        replace(tiles, name="bias_tiles_expanded", head_dim=128, bias_layout="expanded", window_size=(30, 20)),
        replace(base, name="bias_tiles_shared_by_many", head_dim=16, batch=33, bias="11qk", seqlen_q=40, seqlen_k=40),
    ]
    # Many heads, sequences, queries or keys add to each element, so rounding of partial sums becomes visible.
    many = Case("many", 1, 128, 128, 72, 136, 64, 64, softmax_scale=0.02, dlse=True, one_sign=True)
    cases += [
        replace(many, name="bias_one_sign_heads", bias="11qk"),
        replace(many, name="bias_one_sign_heads_deterministic", bias="11qk", deterministic=True),
        replace(many, name="bias_one_sign_group", bias="11qk", heads_kv=1, head_dim=128),
        replace(many, name="bias_one_sign_batches", bias="1hqk", batch=128, heads=1, heads_kv=1),
        replace(many, name="bias_one_sign_float32", bias="11qk", bias_float32=True, head_dim=128),
        replace(many, name="bias_one_sign_rows", bias="1h1k", batch=2, heads=2, heads_kv=2, seqlen_q=2000),
        replace(many, name="bias_one_sign_columns", bias="1hq1", batch=2, heads=2, heads_kv=2, seqlen_k=2000),
    ]
    cases.append(replace(base, name="bias_hides_rows", bias="bhqk", bias_hides_rows=True, dlse=True))
    cases.append(replace(cases[-1], name="bias_hides_rows_sink", sink="finite"))
    # Masks with finite numbers: the forward writes the lowest number as the LSE of a row that the mask hides.
    least = replace(base, bias_hides_rows=True, bias_floor=LEAST, empty_lse=LEAST)
    cases += [
        replace(least, name="bias_least", bias="bhqk", head_dim=64, dlse=True),
        replace(least, name="bias_least_sink", bias="bhqk", head_dim=64, dlse=True, sink="finite"),
        replace(least, name="bias_least_shared", bias="1hqk", head_dim=128, seqlen_q=200, seqlen_k=136),
        replace(least, name="bias_least_of_keys", bias="b11k", head_dim=64, seqlen_q=200, seqlen_k=136),
        replace(least, name="bias_least_softcap", bias="bhqk", softcap=2.0, causal=True),
        replace(least, name="bias_least_wide", bias="1hqk", head_dim=192, head_dim_v=128),
        replace(least, name="bias_least_float32", bias="bhqk", bias_float32=True),
        replace(least, name="bias_least_long", bias="b11k", head_dim=128, seqlen_q=2048, seqlen_k=600, causal=True),
    ]
    cases.append(replace(base, name="bias_softcap", bias="1hqk", softcap=1.0, dlse=True))
    return cases


def _shared_rows() -> list[Case]:
    """Batch entries that share a bias, as in triangle attention: sm90 takes two of them per work tile up to D 32."""
    base = Case("base", 3, 2, 2, 136, 136, 32, 32, bias="1hqk", bias_hides_rows=True, key_mask="empty")
    lengths = [(1, 8), (63, 64), (64, 72), (65, 64), (127, 128), (128, 136), (129, 256), (257, 264), (0, 8), (8, 0)]
    cases = [replace(base, name=f"rows_{q}x{k}", seqlen_q=q, seqlen_k=k) for q, k in lengths]
    cases += [replace(base, name=f"rows_batch_{b}", batch=b, key_mask=None) for b in (2, 3, 5, 66)]
    cases += [replace(base, name=f"rows_head_dim_{d}", head_dim=d, head_dim_v=d) for d in (8, 16, 24, 64, 96, 128)]
    return [
        *cases,
        replace(base, name="rows_unequal_head_dims", head_dim=16, head_dim_v=24, heads=3, heads_kv=3),
        replace(base, name="rows_all_shared", bias="11qk", batch=4),
        replace(base, name="rows_heads_shared", bias="b1qk", key_mask="padding"),
        replace(base, name="rows_group", heads=4, heads_kv=2),
        replace(base, name="rows_causal", causal=True, seqlen_q=200, seqlen_k=264),
        replace(base, name="rows_top_left", causal="top_left", seqlen_k=72, key_mask="padding"),
        replace(base, name="rows_window", window_size=(30, 20), seqlen_q=300, seqlen_k=304),
        replace(base, name="rows_sink_dlse", sink="finite", dlse=True, empty_lse=float("-inf")),
        replace(base, name="rows_packed_qkv", layout="packed_qkv", key_mask_layout="strided"),
        replace(base, name="rows_heads_first", layout="bhsd", key_mask_layout="expanded"),
        replace(base, name="rows_deterministic", deterministic=True),
        replace(base, name="rows_deterministic_many", batch=66, deterministic=True, key_mask=None),
        replace(base, name="rows_one_sign", batch=128, heads=1, heads_kv=1, softmax_scale=0.02, dlse=True,
                one_sign=True, bias_hides_rows=False, key_mask=None),
        replace(base, name="rows_efficient_dropout", dropout_p=0.2, rng_layout="efficient64", head_dim=64),
    ]  # fmt: skip


def _dropout() -> list[Case]:
    cases = []
    for layout in RNG_LAYOUTS:
        base = Case(f"dropout_{layout}", heads=4, heads_kv=2, seqlen_q=37, seqlen_k=70, rng_layout=layout)
        cases += [
            replace(base, name=f"{base.name}_small", dropout_p=0.1),
            replace(base, name=f"{base.name}_half_causal", dropout_p=0.5, causal=True),
            replace(base, name=f"{base.name}_large", dropout_p=0.97, rng_offset=2**40 + 3, rng_seed=2**63 - 1),
            replace(base, name=f"{base.name}_bias_softcap", dropout_p=0.2, bias="b1qk", softcap=2.0, dlse=True),
            _varlen(
                f"{base.name}_varlen",
                (17, 0, 40),
                (33, 5, 20),
                dropout_p=0.3,
                rng_layout=layout,
                slack=3,
                seqused_k=(30, 5, 11),
            ),
        ]
        # Several tiles; offsets and row lengths that are multiples of four or not.
        tiles = replace(base, seqlen_q=200, seqlen_k=328, dropout_p=0.2, rng_offset=2**34 - 4)
        cases += [
            replace(tiles, name=f"{base.name}_tiles", head_dim=128, head_dim_v=96),
            replace(tiles, name=f"{base.name}_tiles_odd", head_dim=64, seqlen_k=327, causal=True),
            replace(tiles, name=f"{base.name}_tiles_offset", head_dim=128, rng_offset=3, deterministic=True),
            replace(tiles, name=f"{base.name}_tiles_192", head_dim=192, head_dim_v=192, seqlen_k=326),
            replace(tiles, name=f"{base.name}_alibi", head_dim=64, alibi="batch", causal="top_left"),
            replace(tiles, name=f"{base.name}_bias_of_keys", head_dim=128, bias="b11k", bias_hides_rows=True),
            replace(tiles, name=f"{base.name}_bias_tiles", head_dim=64, bias="bhqk", causal=True, bias_hides_rows=True),
            replace(tiles, name=f"{base.name}_bias_tiles_shared", head_dim=128, bias="1hqk", deterministic=True),
            replace(tiles, name=f"{base.name}_bias_of_keys_alibi", head_dim=40, bias="1h1k", alibi="heads"),
        ]
    return cases


def _key_masks() -> list[Case]:
    base = Case("base", heads=4, heads_kv=2, seqlen_q=37, seqlen_k=70, key_mask="random")
    lengths = [(5, 1), (63, 63), (64, 64), (65, 65), (127, 127), (128, 128), (131, 129), (97, 257), (5, 0), (0, 5)]
    cases = [replace(base, name=f"key_mask_{q}x{k}", seqlen_q=q, seqlen_k=k) for q, k in lengths]
    cases += [replace(base, name=f"key_mask_{kind}", key_mask=kind, dlse=True) for kind in KEY_MASKS if kind]
    cases += [replace(base, name=f"key_mask_{layout}", key_mask_layout=layout) for layout in ("strided", "expanded")]
    cases += [replace(base, name=f"key_mask_head_dim_{d}", head_dim=d, head_dim_v=d) for d in (33, 64, 96, 128, 160)]
    cases += [
        replace(base, name=f"key_mask_empty_lse_{value}", key_mask="empty", empty_lse=value, head_dim=64, dlse=True)
        for value in (float("-inf"), 0.0)
    ]
    tiles = replace(base, seqlen_q=200, seqlen_k=328, key_mask="empty", head_dim=64, head_dim_v=64)
    return [
        *cases,
        replace(base, name="key_mask_causal", causal=True),
        replace(base, name="key_mask_top_left_window", causal="top_left", window_size=(9, -1)),
        replace(base, name="key_mask_window", seqlen_q=300, seqlen_k=290, window_size=(30, 20)),
        replace(base, name="key_mask_softcap", softcap=1.5, causal=True),
        replace(base, name="key_mask_alibi", alibi="batch"),
        replace(base, name="key_mask_sink", key_mask="empty", sink="finite", dlse=True),
        replace(base, name="key_mask_sink_lse_0", key_mask="empty", sink="finite", dlse=True, empty_lse=0.0),
        replace(base, name="key_mask_sink_minus_inf", key_mask="empty", sink="minus_inf", dlse=True, causal=True),
        replace(base, name="key_mask_seqused", seqused_q=(37, 20), seqused_k=(70, 41), bias="bhqk"),
        replace(base, name="key_mask_odd_strides", layout="odd_strides", head_dim=24),
        replace(base, name="key_mask_batch_0", batch=0),
        replace(tiles, name="key_mask_tiles"),
        replace(tiles, name="key_mask_deterministic", deterministic=True, causal=True),
        replace(tiles, name="key_mask_group", heads=6, heads_kv=2, head_dim=128, key_mask="padding"),
        replace(tiles, name="key_mask_bias", bias="bhqk", bias_hides_rows=True, sink="finite", dlse=True),
        replace(tiles, name="key_mask_bias_shared", bias="1hqk", batch=3, head_dim=32, head_dim_v=32),
        replace(tiles, name="key_mask_bias_shared_odd", bias="1hqk", seqlen_k=327, head_dim=32, head_dim_v=32),
        replace(tiles, name="key_mask_bias_shared_deterministic", bias="1hqk", deterministic=True),
        replace(tiles, name="key_mask_bias_shared_long", bias="1hqk", seqlen_q=700, heads=2, head_dim=128),
        replace(tiles, name="key_mask_bias_of_keys", bias="b11k", causal=True),
        replace(tiles, name="key_mask_bias_columns", bias="1hq1"),
        replace(tiles, name="key_mask_bias_float32", bias="1hqk", bias_float32=True, softcap=2.0),
        replace(tiles, name="key_mask_dropout_flash", dropout_p=0.3, causal=True),
        replace(tiles, name="key_mask_dropout_efficient64", dropout_p=0.2, rng_layout="efficient64", bias="1hqk"),
        replace(tiles, name="key_mask_192", head_dim=192, head_dim_v=128, bias="b1qk"),
        replace(tiles, name="key_mask_256", head_dim=256, head_dim_v=256, causal=True),
        replace(tiles, name="key_mask_wide", head_dim=320, head_dim_v=320, heads=2, causal=True),
        replace(tiles, name="key_mask_wide_all", head_dim=512, head_dim_v=264, heads=2, bias="1hqk", softcap=2.0,
                dropout_p=0.1, alibi="heads", sink="finite", layout="odd_strides"),
    ]  # fmt: skip


def _varlens() -> list[Case]:
    return [
        _varlen("varlen_one", (65,)),
        _varlen("varlen_many", (1, 17, 64, 65, 2), causal=True),
        _varlen("varlen_unequal", (10, 40, 7), (33, 12, 7), causal=True, heads=4, heads_kv=2),
        _varlen("varlen_top_left", (10, 40, 7), (33, 12, 7), causal="top_left"),
        _varlen("varlen_window", (50, 20), (70, 45), window_size=(9, 3)),
        _varlen("varlen_zero_lengths", (0, 5, 0, 9, 0), (3, 0, 0, 7, 0)),
        _varlen("varlen_all_zero", (0, 0), (0, 0)),
        _varlen("varlen_slack", (12, 31), (20, 9), slack=29),
        _varlen("varlen_seqused", (20, 33, 8), (40, 10, 9), seqused_q=(13, 33, 0), seqused_k=(40, 3, 5), causal=True),
        _varlen("varlen_trailing_rows", (20, 33), (40, 10), trailing=5, dlse=True),
        _varlen("varlen_trailing_rows_padded", (20, 3), (40, 10), trailing=9, lse_form="padded", layout="odd_strides"),
        Case("dense_seqused", seqused_q=(33, 7), seqused_k=(0, 30), dlse=True, bias="bhqk", causal=True),
        Case("dense_seqused_sink", seqused_q=(33, 7), seqused_k=(0, 30), dlse=True, sink="finite", causal=True),
        Case("dense_seqused_k", seqused_k=(20, 33), lse_form="padded", alibi="heads", dropout_p=0.4),
        _varlen("varlen_seqused_k_only", (20, 33), (40, 10), seqused_k=(0, 6), lse_form="padded"),
        _varlen("varlen_bias", (20, 33), (40, 10), bias="bhqk", seqused_k=(31, 10), dlse=True),
        _varlen("varlen_bias_broadcast", (20, 0, 33), (40, 7, 10), bias="1hq1", slack=2),
        _varlen("varlen_bias_octets", (20, 0, 32), (40, 7, 10), bias="1hqk", seqused_k=(31, 7, 10)),
        _varlen("varlen_bias_row", (20, 33), (40, 10), bias="b11k", causal=True),
        _varlen("varlen_alibi_batch", (20, 33), (40, 10), alibi="batch", seqused_q=(11, 30)),
        _varlen("varlen_sink_dlse", (20, 33), (40, 10), sink="finite", dlse=True, causal=True),
        _varlen("varlen_lse_padded", (20, 33), (40, 10), lse_form="padded", dlse=True),
        _varlen("varlen_packed_qkv", (20, 33), layout="packed_qkv", causal=True),
        _varlen("varlen_odd_strides", (20, 33), (21, 30), layout="odd_strides"),
    ]


def _memory() -> list[Case]:
    cases = [Case(f"lse_{form}", lse_form=form, dlse=True, causal=True) for form in LSE_FORMS]
    cases += [Case(f"layout_{layout}", layout=layout, heads=4, heads_kv=2) for layout in LAYOUTS]
    cases += [Case(f"dout_{layout}", dout_layout=layout, causal=True) for layout in DOUT_LAYOUTS[1:]]
    cases.append(Case("dout_expanded_row_offset", dout_layout="expanded_row", layout="offset"))
    cases.append(Case("packed_kv_only", layout="packed_qkv", seqlen_q=20, seqlen_k=45, heads=4, heads_kv=2))
    return cases


CASES: tuple[Case, ...] = tuple(
    _sizes()
    + _wide()
    + _few_key_blocks()
    + _many_key_blocks()
    + _heads()
    + _masks()
    + _score_features()
    + _shared_rows()
    + _dropout()
    + _key_masks()
    + _varlens()
    + _memory()
)
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases share a name"


def named(*names: str) -> list[Case]:
    """Cases by name, in the order given."""
    return [BY_NAME[name] for name in names]


def with_prefix(*prefixes: str) -> list[Case]:
    """All cases whose names start with one of the prefixes."""
    found = [case for case in CASES if case.name.startswith(prefixes)]
    assert found, f"no case begins with {prefixes}"
    return found


@st.composite
def any_case(draw: st.DrawFn, max_seqlen: int = 80, max_head_dim: int = 40) -> Case:
    """A random case over the whole contract, small enough for a CPU."""
    varlen = draw(st.booleans())
    length = st.integers(0, max_seqlen)
    heads_kv = draw(st.integers(1, 3))
    heads = heads_kv * draw(st.integers(1, 3))
    batch = draw(st.integers(1, 4 if varlen else 2))
    same = draw(st.booleans())
    seqlens_q = tuple(draw(length) for _ in range(batch))
    seqlens_k = seqlens_q if same else tuple(draw(length) for _ in range(batch))
    head_dim = draw(st.integers(1, max_head_dim))
    layout = draw(st.sampled_from(LAYOUTS))
    dropout = draw(st.booleans())
    bias = draw(st.booleans())
    floor = draw(st.sampled_from([float("-inf"), LEAST]))

    def used(physical: Lengths) -> Lengths | None:
        return tuple(draw(st.integers(0, n)) for n in physical) if draw(st.booleans()) else None

    full = [draw(st.booleans()) for _ in range(4)]
    causal: st.SearchStrategy[bool | str] = st.sampled_from([False, True, "top_left"])
    window = st.one_of(st.just(-1), st.integers(0, max_seqlen))
    forms = [form for form in LSE_FORMS if not (varlen and form == "rows1")]
    return Case(
        name="random",
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=seqlens_q[0],
        seqlen_k=seqlens_k[0],
        head_dim=head_dim,
        head_dim_v=head_dim if draw(st.booleans()) else draw(st.integers(1, max_head_dim)),
        seqlens_q=seqlens_q if varlen else None,
        seqlens_k=seqlens_k if varlen else None,
        seqused_q=used(seqlens_q if varlen else (seqlens_q[0],) * batch),
        seqused_k=used(seqlens_k if varlen else (seqlens_k[0],) * batch),
        trailing=draw(st.integers(0, 3)) if varlen else 0,
        slack=draw(st.integers(0, 40)) if varlen else 0,
        softmax_scale=draw(st.sampled_from([None, None, 0.25, 0.0, -0.3])),
        causal=draw(causal),
        window_size=(draw(window), draw(window)) if draw(st.booleans()) else (-1, -1),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 20.0])),
        bias="".join(letter if wide else "1" for letter, wide in zip("bhqk", full, strict=True)) if bias else None,
        bias_float32=draw(st.booleans()),
        bias_layout=draw(st.sampled_from(BIAS_LAYOUTS)),
        bias_hides_rows=draw(st.booleans()),
        bias_floor=floor,
        key_mask=None if varlen else draw(st.sampled_from((None, None, *KEY_MASKS))),
        key_mask_layout=draw(st.sampled_from(["contiguous", "strided", "expanded"])),
        alibi=draw(st.sampled_from([None, None, "heads", "batch"])),
        sink=draw(st.sampled_from([None, None, "finite", "minus_inf"])),
        dlse=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.1, 0.5, 0.9])) if dropout else 0.0,
        rng_layout=draw(st.sampled_from(RNG_LAYOUTS)),
        rng_seed=draw(st.integers(0, 2**63 - 1)),
        rng_offset=draw(st.integers(0, 2**40)),
        lse_form=draw(st.sampled_from(forms)),
        empty_lse=LEAST if floor == LEAST else draw(st.sampled_from([float("inf"), float("-inf"), 0.0])),
        layout=layout,
        dout_layout=draw(st.sampled_from(DOUT_LAYOUTS)),
        deterministic=draw(st.booleans()),
    )
