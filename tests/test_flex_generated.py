"""A score_mod that NVRTC compiles into a kernel: which calls get it, its source, its lists, and the operator."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.compiler import needs_nvrtc
from kit.emission import with_numbers
from kit.host import dense_problem, device_info, load_host
from test_attention_sm80_plan import A100
from test_attention_sm90_plan import plan_of
from test_flex_lists import dense
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashbwd
from flashbwd import _ops
from flashbwd.flex import backends, generated
from flashbwd.flex.cache import kernel_lists_of, visible_everywhere
from flashbwd.flex.generated import Kernel
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError
from flashbwd.flex.lists import key_block_lists
from flashbwd.flex.tile import Tile
from flashbwd.mods import nvrtc
from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.derivative import Gradient, emit_gradient, emit_score_gradient
from flashbwd.mods.operators import literal
from flashbwd.mods.trace import trace
from flashbwd.reference.decoding import DecodingCall

Mod = Callable[..., Tensor]
TABLE = torch.linspace(-1, 1, 4 * 255).view(4, 255)
RATES = torch.linspace(0.1, 1, 4, dtype=torch.bfloat16)
SLOPES = torch.linspace(0.1, 1, 4)

MODS: dict[str, tuple[Mod, list[Tensor]]] = {  # and the captured tensors that get a gradient
    "relative_bias": (lambda s, b, h, q, k: s + TABLE[h, q - k + 127], []),
    "trained_relative_bias": (lambda s, b, h, q, k: s + TABLE[h, q - k + 127], [TABLE]),
    "cap_and_slope": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20) - SLOPES[h] * (q - k).abs(), []),
    "trained_scale": (lambda s, b, h, q, k: torch.where(q > k, s * RATES[h], torch.sin(s)), [RATES]),
}


def source_of(mod: Mod, differentiable: list[Tensor]) -> str:
    return gradient_of(mod, differentiable).source


def gradient_of(mod: Mod, differentiable: list[Tensor]) -> Gradient:
    return emit_score_gradient(trace("score_mod", mod, True), None, Slots(Captures(mod), "cpu"), differentiable)


def emitted(name: str) -> str:
    return source_of(*MODS[name])


# ---- which calls ----


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tensor]]:
    """Makes tensors that pretend to be on a GPU."""
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())
    with FakeTensorMode():
        yield lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def any_lists(*_: Any) -> KernelLists:
    empty = torch.empty(0)
    return KernelLists(empty, empty, empty, True, Tile())


def choose(tensor: Callable[..., Tensor], mod: Mod, captured: list[Tensor], **options: Any) -> backends.KernelCall:
    q, k, v = (tensor(2, 4, 300, 64) for _ in range(3))
    call = DecodingCall(mod, None, 0.125)
    return backends.choose(call, q, k, v, captured, options.get("deterministic", False), any_lists)


def doubled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * 2


def test_any_score_mod_is_compiled(on_a_gpu: Callable[..., Tensor]) -> None:
    call = choose(on_a_gpu, doubled, [])
    assert call.operator is torch.ops.flashbwd.score_mod_attention_backward
    assert call.score_mod is not None
    assert "times(static_cast<float>(score), static_cast<float>(2.0))" in with_numbers(call.score_mod.gradient)


@pytest.mark.parametrize(
    "mod_of",
    [
        lambda n: lambda s, b, h, q, k: s + TABLE[h, q - k + n - 1],
        lambda n: lambda s, b, h, q, k: s * (1 + n / 100) + (q - k) / (n / 7.3),
        lambda n: lambda s, b, h, q, k: torch.where((q < n) & (k < n), s, -torch.inf),
    ],
    ids=["offset", "temperature", "prefix"],
)
def test_functions_that_differ_in_numbers_have_one_source(mod_of: Callable[[int], Mod]) -> None:
    found = [gradient_of(mod, []) for mod in map(mod_of, range(2, 52))]
    assert len({gradient.source for gradient in found}) == 1
    assert len({tuple(gradient.numbers) for gradient in found}) == 50


def test_a_divisor_stays_in_the_source() -> None:
    """The compiler replaces the division by a known integer."""
    mods = [lambda s, b, h, q, k, n=n: s + (q // n - k // n) for n in (64, 65)]
    assert len({source_of(mod, []) for mod in mods}) == 2


def test_numbers_beyond_the_slots_and_32_bits_stay_in_the_source() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for i in range(20):
            s = s * (2.5 + i)
        return s + (q.long() + (1 << 40)).float() * 1e300

    gradient = gradient_of(mod, [])
    assert len(gradient.numbers) == 16
    assert all(text in gradient.source for text in (literal(21.5), literal(1 << 40), literal(1e300)))


def test_a_softcap_keeps_the_kernel_of_the_build(on_a_gpu: Callable[..., Tensor]) -> None:
    call = choose(on_a_gpu, lambda s, b, h, q, k: 5 * torch.tanh(s / 5), [])
    assert (call.operator, call.score_mod) == (torch.ops.flashbwd.attention_backward, None)


def test_a_forced_backend_applies_to_every_kind_of_call(on_a_gpu: Callable[..., Tensor]) -> None:
    for mod in (doubled, lambda s, b, h, q, k: 5 * torch.tanh(s / 5)):
        with flashbwd.use_backend("sm80"):
            assert choose(on_a_gpu, mod, []).options["backend"] == "sm80"
        assert "backend" not in choose(on_a_gpu, mod, []).options
        with flashbwd.use_backend("reference"), pytest.raises(UnsupportedError, match="is in effect"):
            choose(on_a_gpu, mod, [])


@pytest.mark.parametrize("where", [None, "disk", "memory"])
def test_a_plan_says_what_is_compiled_and_where_it_is(
    where: str | None, on_a_gpu: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"backend": "sm90", "config": 0, "refusals": {}, "workspace_bytes": 4, "deterministic": False}
    monkeypatch.setattr(backends.KernelCall, "_plan", lambda *_: plan)
    monkeypatch.setattr(backends, "choose", functools.partial(backends.choose, lists_of=any_lists))
    monkeypatch.setattr(nvrtc, "cache_of", lambda *_: where)
    q, lse = on_a_gpu(2, 4, 300, 64), torch.empty(2, 4, 300, device="cuda")

    def planned(mod: Mod) -> flashbwd.FlexPlan:
        return flashbwd.plan_flex_attention_backward(q, q, q, q, q, lse, score_mod=mod)

    assert planned(doubled) == flashbwd.FlexPlan("sm90", {}, 4, compiled=True, cache=where, deterministic=False)
    softcap = planned(lambda s, b, h, q, k: 5 * torch.tanh(s / 5))
    assert not softcap.compiled and softcap.cache is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors_are_not_deterministic(
    on_a_gpu: Callable[..., Tensor], deterministic: bool
) -> None:
    bias = on_a_gpu(4)
    mod = lambda s, b, h, q, k: s + bias[h]  # noqa: E731
    if deterministic:
        with pytest.raises(UnsupportedError, match="added atomically, but determinism was requested"):
            choose(on_a_gpu, mod, [bias], deterministic=True)
    else:
        call = choose(on_a_gpu, mod, [bias])
        assert call.score_mod is not None
        assert call.score_mod.gradient.slots == {0: 0}
    assert choose(on_a_gpu, mod, [], deterministic=deterministic).score_mod is not None


def test_a_score_mod_that_cannot_be_written_as_cuda_is_refused_with_the_reason(
    on_a_gpu: Callable[..., Tensor],
) -> None:
    with pytest.raises(UnsupportedError, match="captures a tensor on cpu"):
        choose(on_a_gpu, MODS["relative_bias"][0], [])


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return load_host()


MASKED = {"has_block_mask": True, "has_score_mod": True}


@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(40, (128, 128)), (64, (128, 128)), (72, (64, 128)), (128, (64, 128)), (136, (64, 128)), (256, (64, 128))],
)
def test_a_plan_has_the_tile_of_block_masks(host: ModuleType, head_dim: int, tile: tuple[int, int]) -> None:
    lists = {"list_block_m": tile[0], "list_block_n": tile[1]}
    plan = plan_of(host, **MASKED, head_dim=head_dim, head_dim_v=head_dim, backend="sm90", **lists)
    assert (plan.backend, plan.block_m, plan.block_n) == ("sm90", *tile)


def sm90_kernel(host: ModuleType, head_dim: int) -> Kernel:
    plan = plan_of(host, **MASKED, head_dim=head_dim, head_dim_v=head_dim, backend="sm90")
    return generated.kernel_of_plan({"backend": "sm90", "config": plan.config})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"softcap": 30.0}, "it has no tile with these features"),
        ({"has_alibi": True}, "it has no tile with these features"),
        ({"head_dim": 192, "softcap": 30.0}, "it has no tile with these features for head dimensions 192 and 128"),
        ({"head_dim": 264}, "it takes no block mask at head dimensions above 256"),
    ],
)
def test_a_plan_refuses_what_no_generated_kernel_computes(
    host: ModuleType, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        plan_of(host, **MASKED, **changes, backend="sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("scores", [{}, {"softcap": 30.0}, {"has_alibi": True}, {"has_score_mod": True}], ids=str)
def test_sm90_computes_block_masks_of_16_bit_and_sm80_those_of_float32(
    host: ModuleType, scores: dict[str, Any], head_dim: int
) -> None:
    build = {"has_attention_sm80": True}
    call = {"has_block_mask": True, "head_dim": head_dim, "head_dim_v": head_dim, **scores}
    assert plan_of(host, build, **call).backend == "sm90"
    assert plan_of(host, build, **call, dtype=host.DType.kFloat32).backend == "sm80"


# ---- the source ----


@pytest.mark.parametrize("name", MODS)
def test_the_function_and_its_derivative_are_those_that_flex_decoding_runs(name: str) -> None:
    """Other tests compare that source with autograd. Only here, gradients of captured tensors go through sums."""
    mod, differentiable = MODS[name]
    slots = Slots(Captures(mod), "cpu")
    of_decoding = emit_gradient(trace("score_mod", mod, True), None, slots, differentiable).source
    source = with_numbers(gradient_of(mod, differentiable))
    to_memory = re.sub(r"sums\.sum\d+\.add\(adds, ", "if (adds) atomicAdd(", source)
    bodies = [body.rpartition("\n  }")[0] for body in to_memory.split(") {\n")[1:]]
    assert len(bodies) == 2
    assert all(body in of_decoding for body in bodies)
    assert ("kCapturedGradients = true" in source) == bool(differentiable)


def test_each_access_to_a_captured_tensor_has_a_sum_that_is_finished() -> None:
    double = torch.ones(4, dtype=torch.float64)
    source = source_of(lambda s, b, h, q, k: s * RATES[h] + TABLE[h, k] + double[q % 4] * RATES[k % 4], [RATES, double])
    assert sorted(re.findall(r"GradientSum<(\w+)> (sum\d);", source)) == sorted(
        [("float", name) for name in re.findall(r"(sum\d)\.add\(adds, static_cast<float\*>", source)]
        + [("double", name) for name in re.findall(r"(sum\d)\.add\(adds, static_cast<double\*>", source)]
    )
    assert sorted(re.findall(r"(sum\d)\.finish\(\);", source)) == ["sum0", "sum1", "sum2"]


@needs_nvrtc
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((head_dim, dtype) for head_dim in (64, 128) for dtype in (torch.float16, torch.bfloat16)),
        (192, torch.float16),
        (256, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", MODS)
def test_a_kernel_compiles_without_the_toolkit_or_a_gpu(
    host: ModuleType, name: str, head_dim: int, dtype: torch.dtype
) -> None:
    source = generated.kernel_source(emitted(name), sm90_kernel(host, head_dim), dtype)
    assert nvrtc.compile_source(source, nvrtc.compiler_options("sm_90a"))


@needs_nvrtc
@pytest.mark.parametrize("head_dim", [64, 192])
def test_a_constant_infinity_compiles(host: ModuleType, head_dim: int) -> None:
    mod = source_of(lambda s, b, h, q, k: torch.where(q > k, s, -float("inf")), [])
    assert "FLASHBWD_INFINITY" in mod
    source = generated.kernel_source(mod, sm90_kernel(host, head_dim), torch.bfloat16)
    assert nvrtc.compile_source(source, nvrtc.compiler_options("sm_90a"))


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "dims", "smem", "architecture"),
    [
        (torch.bfloat16, 64, 163, "sm_80"),
        (torch.float16, 128, 99, "sm_89"),
        (torch.bfloat16, 256, 227, "sm_90"),
        (torch.float32, 64, 99, "sm_86"),
        (torch.float32, 256, 163, "sm_80"),
    ],
)
def test_an_sm80_kernel_compiles_for_the_tile_of_its_plan(
    host: ModuleType, dtype: torch.dtype, dims: int, smem: int, architecture: str
) -> None:
    capability = {"cc_major": int(architecture[3]), "cc_minor": int(architecture[4]), "smem_per_block": smem << 10}
    gpu = device_info(host, **{**A100, **capability, "has_attention_sm80": True})
    kinds = {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16", torch.float32: "kFloat32"}
    shape = {"head_dim": dims, "head_dim_v": dims, "dtype": getattr(host.DType, kinds[dtype]), "backend": "sm80"}
    plan = host.plan_attention(dense_problem(host, **MASKED, **shape), gpu)
    assert plan.backend == "sm80"
    kernel = generated.kernel_of_plan({"backend": "sm80", "config": plan.config}, tf32=dtype == torch.float32)
    source = generated.kernel_source(emitted("trained_scale"), kernel, dtype)
    assert nvrtc.compile_source(source, nvrtc.compiler_options(architecture))


def test_a_change_of_a_header_changes_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = generated.kernel_source("", Kernel("sm90", 0), torch.float16)
    folder = tmp_path / "csrc"
    shutil.copytree(nvrtc.header_folder(), folder, ignore=shutil.ignore_patterns("*.cu", "*.cpp"))
    with (folder / "common" / "hopper.cuh").open("a") as file:
        file.write("\n")
    monkeypatch.setattr(nvrtc, "header_folder", lambda: folder)
    nvrtc.header_digest.cache_clear()
    try:
        assert generated.kernel_source("", Kernel("sm90", 0), torch.float16) != before
    finally:
        nvrtc.header_digest.cache_clear()


def test_an_installation_without_headers_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "__file__", str(tmp_path / "flashbwd" / "mods" / "nvrtc.py"))
    with pytest.raises(nvrtc.CompilationError, match=r"flashbwd has no folder csrc .*; install flashbwd again"):
        nvrtc.header_folder.__wrapped__()


# ---- the lists of a call without a block mask ----


@pytest.mark.parametrize("lengths", [(1, 1), (64, 128), (130, 257), (300, 128)])
@pytest.mark.parametrize("queries", [64, 128])
def test_without_a_block_mask_every_pair_is_visible(lengths: tuple[int, int], queries: int) -> None:
    sizes = (1, 1, *lengths)
    mask = visible_everywhere(*lengths, torch.device("cpu"))
    lists = key_block_lists(mask, sizes, Tile(queries=queries))
    assert dense(lists, sizes).all()
    whole = (lengths[0] // queries) * (lengths[1] // 128)
    assert (lists.bit_tiles < 0).sum() == whole  # only tiles that reach beyond a sequence read bits


def test_lists_without_a_block_mask_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q, k = (torch.zeros(1, 2, 100, 64) for _ in range(2))
    lists = kernel_lists_of(DecodingCall(None, None, 1.0), q, k, Tile())
    assert lists is not None
    assert lists.covers
    assert kernel_lists_of(DecodingCall(None, None, 1.0), q, k, Tile()) is lists


# ---- the operator ----


def run_operator(**changes: Any) -> None:
    q, k, v, out, dout = (torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16) for _ in range(5))
    lists = torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    entries, bits = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 512, dtype=torch.int32)
    options: dict[str, Any] = {"captured": [], "gradients": [], "gradient_slots": []} | changes
    options = {"numbers": [], "kernel": 1} | options
    operands = (dout, q, k, v, out, torch.zeros(1, 2, 8), lists, entries, bits, True, [128, 128])
    _ops.call(torch.ops.flashbwd.score_mod_attention_backward, *operands, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": 0}, "kernel is 0, expected the handle of a compiled kernel"),
        ({"numbers": [3] * 17}, "numbers has 17 elements, expected at most 16"),
        ({"numbers": [1 << 31]}, "numbers holds 2147483648, expected 32-bit integers"),
        ({"captured": [TABLE] * 17}, "captured has 17 tensors, expected at most 16"),
        (
            {"captured": [torch.zeros(1, 1, 1, 1, 1, 1)]},
            "captured tensor 0 has 6 dimensions on cpu, expected at most 5",
        ),
        ({"captured": [TABLE], "gradients": [TABLE]}, "gradient_slots has 0 elements, expected one for each of the 1"),
        (
            {"captured": [TABLE], "gradients": [TABLE], "gradient_slots": [1]},
            "gradient_slots holds 1, expected the number of one of the 1 captured tensors",
        ),
        (
            {"captured": [TABLE], "gradients": [TABLE[:2]], "gradient_slots": [0]},
            r"gradient 0 has shape \(2, 255\) on cpu, expected a contiguous tensor with the elements of its captured",
        ),
        ({}, "no kernel takes this call with a block mask; short: q is on the CPU"),
    ],
)
def test_the_operator_names_the_argument_that_it_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_operator(**changes)
