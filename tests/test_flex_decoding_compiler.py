"""Modifications become CUDA source, which is compiled and called."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.compiler import needs_nvrtc
from kit.decoding import Shape
from kit.repeats import differing_elements
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flashbwd
from flashbwd.mods import backward, kernels, nvrtc, run
from flashbwd.mods.captures import CannotEmitError, Captures, Recent, Slots
from flashbwd.mods.derivative import emit_gradient
from flashbwd.mods.emit import emit
from flashbwd.mods.trace import trace

TILE = kernels.Tile(64, 16, 4, torch.bfloat16, True, 0)


def scaled(factor: Any) -> Any:
    return lambda s, b, h, q, k: s * factor


def scaled_by_head(weight: Tensor) -> Any:
    return lambda s, b, h, q, k: s * weight[h]


# ---- emission ----


def source_of(mod: Any, mask: Any = None) -> str:
    score = None if mod is None else trace("score_mod", mod, True)
    return emit(score, None if mask is None else trace("mask_mod", mask, False), Slots(Captures(mod, mask)))


TABLE = torch.ones(8)
READS_BACK = "_local_scalar_dense.default, which reads a value back"
UNSUPPORTED = {
    "operator": (lambda s, b, h, q, k: torch.special.bessel_j0(s), "score_mod calls aten.special_bessel_j0"),
    "shape": (lambda s, b, h, q, k: s.unsqueeze(0).sum(), r"with a result of shape \(1,\)"),
    "cpu_tensor": (scaled(torch.ones(())), "score_mod captures a tensor on cpu"),
    "branch": (lambda s, b, h, q, k: s if k > 3 else -s, READS_BACK),
    "item": (lambda s, b, h, q, k: s + TABLE[h].item(), READS_BACK),
    "int": (lambda s, b, h, q, k: s + range(8)[int(h)], READS_BACK),
    "numpy": (lambda s, b, h, q, k: s * float(s.numpy()), r"score_mod calls Tensor\.numpy, which reads a value back"),
    "tolist": (lambda s, b, h, q, k: s * s.tolist(), r"Tensor\.tolist, which reads a value back"),
    "whole_tensor": (
        lambda s, b, h, q, k: s + TABLE.sum(),
        r"calls aten\.sum\.default on a captured tensor of shape \(8,\)",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_the_emitter_names_the_unsupported_operation(name: str) -> None:
    mod, message = UNSUPPORTED[name]
    with pytest.raises(CannotEmitError, match=message):
        source_of(mod)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_operation_raises_a_runtime_error(name: str) -> None:
    mod, message = UNSUPPORTED[name]
    with pytest.raises(RuntimeError, match=f"flashbwd: .*{message}"):
        kernels.compiled_modification(mod, None, TILE)


@needs_nvrtc
@pytest.mark.parametrize("name", ["identity", "relative_bias", "softcap", "trig", "silu", "integers"])
def test_emitted_source_compiles_without_the_toolkit_or_a_gpu(name: str) -> None:
    shape = Shape()
    source = source_of(kit.score_mods(shape)[name], kit.mask_mods(shape)["per_head"])
    assert nvrtc.compile_source(kernels.kernel_source(source, TILE), nvrtc.compiler_options("sm_90"))


@needs_nvrtc
@pytest.mark.parametrize("name", ["relative_bias", "trig"])
def test_the_emitted_source_of_a_backward_compiles_without_the_toolkit_or_a_gpu(name: str) -> None:
    mod = kit.score_mods(Shape())[name]
    source = emit_gradient(trace("score_mod", mod, True), None, Slots(Captures(mod), "cpu"), []).source
    source = backward.backward_source(source, 64, torch.bfloat16, True)
    assert nvrtc.compile_source(source, nvrtc.compiler_options("sm_90"))


@needs_nvrtc
def test_the_error_of_a_failed_compilation_contains_the_log() -> None:
    with pytest.raises(nvrtc.CompilationError, match="expected a"):
        nvrtc.compile_source("int f( {", nvrtc.compiler_options("sm_90"))


def test_a_kernel_is_compiled_once_per_tile_and_never_for_a_built_in_modification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Any] = []

    def build(modification: kernels.Modification, source: str, tile: kernels.Tile) -> None:
        assert source == modification.source
        built.append(tile)
        modification.tiles.add(tile)

    monkeypatch.setattr(kernels, "_known", Recent(16))
    monkeypatch.setattr(kernels, "_modifications", Recent(16))
    monkeypatch.setattr(kernels, "_build", build)
    kernels.compiled_modification(None, lambda b, h, q, k: q >= k, TILE)
    assert built == []
    other = dataclasses.replace(TILE, rows=32)
    for tile in (TILE, TILE, other, other, TILE):
        kernels.compiled_modification(lambda s, b, h, q, k: torch.sin(s), None, tile)
    assert built == [TILE, other]


@pytest.mark.parametrize("warps", [1, 4, 8])
def test_a_kernel_is_launched_with_32_threads_per_warp(warps: int) -> None:
    source = kernels.kernel_source("struct Mod {};", dataclasses.replace(TILE, warps=warps))
    kernel = source[source.rindex('extern "C"') :]
    assert f"__launch_bounds__({32 * warps}, 1)" in kernel
    assert f"split_kv<64, 16, {warps}, flashbwd::BFloat16, true, flashbwd::Mod>" in kernel
    assert "struct Mod {};" in source


def test_freeing_a_modification_frees_its_record_except_at_process_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the process exits, the library may be unloaded before Python frees its objects."""
    registered: list[Any] = []
    finalize = kernels.weakref.finalize
    monkeypatch.setattr(
        kernels.weakref, "finalize", lambda *arguments: registered.append(finalize(*arguments)) or registered[-1]
    )
    monkeypatch.setattr(kernels, "_known", Recent(16))
    monkeypatch.setattr(kernels, "_modifications", Recent(16))
    found, _ = kernels.modification_of(None, lambda b, h, q, k: q >= k + 3)
    (record,) = registered
    assert record.alive and not record.atexit
    kernels._known.clear()
    kernels._modifications.clear()
    del found
    assert not record.alive


class Driver:
    """Replaces libcuda: call number ``fails`` returns error 100, and the other calls succeed."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.called: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.called.append(name)
            self.arguments.append(arguments)
            if name == "cuLibraryGetKernel":
                arguments[0]._obj.value = 7
            return 100 if len(self.called) == self.fails else 0

        return function


LOADS = ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute"]


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_loading_a_kernel_stops_at_the_first_error_of_the_driver(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if fails == 0:
        assert nvrtc.load_kernel(b"cubin", "name", 1024) == 7
    else:
        with pytest.raises(nvrtc.CompilationError, match=r"could not load the compiled kernel \(CUDA error 100\)"):
            nvrtc.load_kernel(b"cubin", "name", 1024)
    assert driver.called == LOADS[: fails or 3]


def test_a_kernel_is_loaded_without_options_and_may_use_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's parameters and the number of the attribute are those of cuda.h."""
    driver = Driver(0)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    nvrtc.load_kernel(b"cubin", "name", 100 * 1024)
    (_, cubin, *options), (_, _, name), (attribute, size, kernel, device) = driver.arguments
    assert (cubin, name) == (b"cubin", b"name")
    assert options == [None, None, 0, None, None, 0]  # no options for the JIT compiler or the library
    assert (attribute, size, kernel.value, device.value) == (8, 100 * 1024, 7, 3)


@pytest.mark.parametrize(
    ("mods", "message"),
    [
        ((lambda s, b, h, q, k: s.undefined(), None), "score_mod failed: .*undefined"),
        ((lambda s, b, h, q, k: 1.0, None), "score_mod returned a float, expected a tensor"),
        ((lambda s, b, h, q, k: k, None), "score_mod returned int32, expected a floating-point score"),
        ((None, lambda b, h, q, k: q - k), "mask_mod returned int32, expected bool"),
    ],
    ids=["fails", "no_tensor", "no_score", "no_bool"],
)
def test_the_error_names_the_wrong_function(mods: tuple[Any, Any], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=f"flashbwd: {message}"):
        source_of(*mods)


def test_tracing_does_not_import_the_compiler_of_pytorch() -> None:
    code = (
        "import sys, torch; from flashbwd.mods.trace import trace; before = set(sys.modules); "
        "trace('score_mod', lambda s, b, h, q, k: torch.where(q >= k, torch.tanh(s / 30) * 30, -1.0), True); "
        "sys.exit('torch._dynamo' in set(sys.modules) - before)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- on a GPU ----


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_known", Recent(16))
    monkeypatch.setattr(kernels, "_modifications", Recent(16))
    monkeypatch.setattr(nvrtc, "_loaded", {})


@pytest.mark.gpu
def test_changed_values_compile_nothing_and_changed_constants_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    shape = Shape()
    tensors = shape.tensors(torch.bfloat16, "cuda")
    calls = []
    real = nvrtc.compile_source
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: calls.append(1) or real(*a))

    def mod_of(weight: Tensor, number: float) -> Any:
        return lambda s, b, h, q, k: s * weight[h] + number * (k % 11)

    for step, (value, number) in enumerate([(1.0, 0.5), (2.0, 0.5), (3.0, 0.5), (1.0, 0.25)]):
        weight = torch.full((4,), value, device="cuda")
        mod = mod_of(weight, number)
        with torch.no_grad():
            out = flashbwd.flex_decoding(*tensors, mod, enable_gqa=True)
        expected, _ = kit.oracle(shape, *tensors, mod)
        torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)
        assert len(calls) == (1 if step < 3 else 2)


@pytest.mark.gpu
def test_a_warm_call_calls_the_operator_once_and_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape()
    tensors = shape.tensors(torch.bfloat16, "cuda")
    mask_mod = kit.mask_mods(shape, "cuda")["window"]
    block_mask = create_block_mask(mask_mod, None, None, 3, 203, device="cuda", BLOCK_SIZE=(3, 64))
    weight = torch.ones(4, device="cuda")
    calls: list[int] = []
    real = run._decoding_forward
    for step in range(3):
        if step == 1:  # from now on, calls are warm
            monkeypatch.setattr(run, "_decoding_forward", lambda *a: calls.append(1) or real(*a))
            monkeypatch.setattr(kernels, "trace", lambda *a: pytest.fail("traced"))
        with torch.no_grad():
            mod = scaled_by_head(weight + step)  # another function and another tensor each time
            out = flashbwd.flex_decoding(*tensors, mod, block_mask, enable_gqa=True)
        expected, _ = kit.oracle(shape, *tensors, mod, kit.dense_mask(mask_mod, shape, "cuda"))
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_of_a_call_names_the_unsupported_operation(dtype: torch.dtype) -> None:
    tensors = Shape().tensors(dtype, "cuda")

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.special.bessel_j0(s)

    with pytest.raises(RuntimeError, match=r"flashbwd: score_mod calls aten\.special_bessel_j0"):
        flashbwd.flex_decoding(*tensors, mod, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["branch", "item", "int", "numpy", "tolist"])
def test_a_score_mod_that_reads_a_value_back_is_refused_by_name(name: str) -> None:
    mod, message = UNSUPPORTED[name]
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"flashbwd: .*{message}"):
        flashbwd.flex_decoding(*Shape().tensors(torch.bfloat16, "cuda"), mod, enable_gqa=True)


@pytest.mark.gpu
def test_a_mask_mod_that_branches_is_refused_by_name() -> None:
    block_mask = kit.block_mask(lambda b, h, q, k: q >= k, Shape(), "cuda")
    block_mask.mask_mod = lambda b, h, q, k: q >= k if k > 3 else q < k
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"flashbwd: mask_mod calls .*{READS_BACK}"):
        flashbwd.flex_decoding(*Shape().tensors(torch.bfloat16, "cuda"), None, block_mask, enable_gqa=True)


@pytest.mark.gpu
def test_calls_of_several_threads_and_streams_do_not_disturb_each_other() -> None:
    shape = Shape(batch=1, heads=8, heads_kv=2, seqlen_q=1, seqlen_k=4096, head_dim=128, head_dim_v=128)
    inputs = [shape.tensors(torch.bfloat16, "cuda", seed) for seed in range(6)]
    expected = [flashbwd.flex_decoding(*tensors, enable_gqa=True) for tensors in inputs]
    shared = torch.cuda.Stream()
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(worker: int) -> None:  # every second worker uses the same stream
        with torch.no_grad(), torch.cuda.stream(shared if worker % 2 else torch.cuda.Stream()):
            outs = [flashbwd.flex_decoding(*inputs[worker], enable_gqa=True) for _ in range(200)]
            wrong.append(sum(not torch.equal(out, expected[worker]) for out in outs))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["prebuilt", "compiled"])
def test_the_first_call_of_a_thread_gives_equal_bits(compiled: bool) -> None:
    """A new thread has no CUDA context before it calls the runtime."""
    q, k, v = Shape(heads=4, heads_kv=2).tensors(torch.bfloat16, "cuda")
    mod = (lambda s, b, h, q, k: s + torch.sin(s)) if compiled else None

    def call() -> Tensor:
        with torch.no_grad():
            return flashbwd.flex_decoding(q, k, v, mod, enable_gqa=True)  # type: ignore[return-value]

    expected = call()
    call()  # its result is freed at once, so the thread's call reuses that memory, not that of `expected`
    with ThreadPoolExecutor(max_workers=1) as thread:
        assert torch.equal(thread.submit(call).result(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["prebuilt", "compiled"])
@pytest.mark.parametrize(("heads", "seqlen_q"), [(8, 1), (32, 4)])
def test_a_kernel_waits_for_the_kernels_that_write_its_inputs(heads: int, seqlen_q: int, compiled: bool) -> None:
    """Launches overlap, so each kernel must wait for the kernels that write its inputs. The output of each call is the
    query of the next, and every fifth output also becomes a key. Scores are so large that an old value would show."""
    shape = Shape(1, heads, 2, seqlen_q, 4096, 128, 128)
    first, keys, v = shape.tensors(torch.bfloat16, "cuda")
    k, q = keys.clone(), first.clone()
    mod = (lambda s, b, h, q, k: s + torch.sin(s)) if compiled else None

    def attend(q: Tensor) -> Tensor:
        return flashbwd.flex_decoding(q, k, v, mod, scale=1.0, enable_gqa=True)  # type: ignore[return-value]

    def chain(attend: Callable[[Tensor], Tensor], q: Tensor, wait: Callable[[], None]) -> Tensor:
        for step in range(60):
            q = attend(q)
            wait()
            if step % 5 == 4:
                k[:, :, step] = q[:, :2, 0]
                wait()
        return q

    def one(given: Tensor) -> Tensor:
        q.copy_(given)
        graph_of_one.replay()
        return out.clone()

    with torch.no_grad():
        expected = chain(attend, first, torch.cuda.synchronize)
        k.copy_(keys)
        assert torch.equal(chain(attend, first, lambda: None), expected)
        graph, graph_of_one = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph_of_one):
            out = attend(q)
        with torch.cuda.graph(graph):
            captured = chain(attend, first, lambda: None)
        k.copy_(keys)
        expected = chain(one, first, torch.cuda.synchronize)
        k.copy_(keys)
        graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "per_head"])
def test_repeated_calls_give_equal_bits(mask: str) -> None:
    shape = Shape(heads=8, seqlen_k=4097)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    block_mask = kit.block_mask(kit.mask_mods(shape, "cuda")[mask], shape, "cuda")
    mod = kit.score_mods(shape, "cuda")["alibi"]
    with torch.no_grad():
        assert differing_elements(lambda: [flashbwd.flex_decoding(*tensors, mod, block_mask, enable_gqa=True)]) == 0


@pytest.mark.gpu
def test_a_process_loads_kernels_that_another_process_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test empties the records of modifications, as in a new process."""
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    calls = []
    real = nvrtc.compile_source
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: calls.append(1) or real(*a))
    tensors = Shape().tensors(torch.bfloat16, "cuda")
    results = []
    for _ in range(2):
        forget_all(monkeypatch)
        with torch.no_grad():
            out = flashbwd.flex_decoding(*tensors, lambda s, b, h, q, k: s * 0.75 + (k % 13), enable_gqa=True)
        results.append(out)
        assert len(calls) == 1
    assert torch.equal(*results)


@pytest.mark.gpu
def test_the_first_call_of_a_built_in_mod_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(nvrtc, "cubin_of", lambda *_: pytest.fail("looked for a compiled kernel"))
    forget_all(monkeypatch)
    shape = Shape(seqlen_q=1)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    block_mask = kit.block_mask(lambda b, h, q, k: k < 150, shape, "cuda")
    softcap = lambda s, b, h, q, k: 7.5 * torch.tanh(s / 7.5)  # noqa: E731
    for mods in ((softcap, None), (None, block_mask), (softcap, block_mask)):
        flashbwd.flex_decoding(*tensors, *mods, enable_gqa=True)
