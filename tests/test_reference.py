"""The reference backend, called directly: values, memory that must not be read, bounded memory, allowed operators."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import cases, inputs, oracle
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import flashbwd
from flashbwd import reference
from flashbwd.options import AttentionOptions
from flashbwd.reference import blocks

CAUSAL = {False: "none", True: "bottom_right", "top_left": "top_left"}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poisoned_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full_like(x, torch.nan, dtype=dtype or x.dtype)


def options_of(arguments: dict[str, Any], rng_state: Any) -> AttentionOptions:
    """The options of the reference, from the keywords of the public function."""
    left, right = arguments["window_size"]
    seed, offset, layout = rng_state or (None, None, "")
    same = {name: arguments[name] for name in AttentionOptions._fields if name in arguments}
    translated = {"causal": CAUSAL[arguments["causal"]], "window_left": left, "window_right": right}
    return AttentionOptions(**same | translated, rng_seed=seed, rng_offset=offset, rng_layout=layout)


def run_backward(arguments: dict[str, Any], rng_state: Any = None, **outputs: Tensor | None) -> dict[str, Any]:
    """Call with the keywords of the public function. Outputs contain NaN before the call."""
    a = arguments
    q, k, v, bias, sink = a["q"], a["k"], a["v"], a["attn_bias"], a["sink"]
    varlen = a["cu_seqlens_q"] is not None
    inputs_of = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsink": sink}
    grads: dict[str, Any] = {
        name: None if x is None else poisoned_like(x) for name, x in inputs_of.items() if name not in outputs
    }
    grads |= outputs
    lengths = (a["max_seqlen_q"], a["max_seqlen_k"]) if varlen else (q.shape[1], k.shape[1])
    scale = q.shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
    options = options_of(a, rng_state)._replace(max_seqlen_q=lengths[0], max_seqlen_k=lengths[1], softmax_scale=scale)
    main = (a["dout"], q, k, v, a["out"], a["softmax_lse"])
    reference.attention_backward(*main, options, *(grads[name] for name in inputs_of))
    return grads


def check(case: cases.Case, dtype: torch.dtype, seed: int = 0) -> None:
    x = inputs.build(case, dtype, seed=seed)
    x.check(**run_backward(x.arguments, x.rng_state()))


def set_tiles(monkeypatch: pytest.MonkeyPatch, tile: blocks.TileSize) -> None:
    monkeypatch.setattr(blocks, "_CPU_TILE", tile)
    monkeypatch.setattr(blocks, "_CPU_SHARED_TILE", tile)
    monkeypatch.setattr(blocks, "_LEAST_WORK", tile.rows * tile.keys)


@pytest.fixture
def tiny_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that small inputs have many of them, and several chunks of heads."""
    case = request.getfixturevalue("case") if "case" in request.fixturenames else None
    large = isinstance(case, cases.Case) and max((*case.physical_q, *case.physical_k), default=0) > 128
    rows, keys = (32, 64) if large else (8, 16)  # on large cases, smaller tiles take seconds and find nothing more
    set_tiles(monkeypatch, blocks.TileSize(rows, keys, 2 * rows * keys, 1000))


@pytest.fixture(scope="module", params=cases.CASES, ids=str)
def case(request: pytest.FixtureRequest) -> cases.Case:
    """Every named case. With module scope, all tests of a case run one after another and share its oracle."""
    found: cases.Case = request.param
    return found


# test_attention_features.py has the same cases in the other dtypes.
def test_gradients_match_the_oracle(case: cases.Case) -> None:
    check(case, torch.float64)


@pytest.mark.usefixtures("tiny_tiles")
def test_gradients_match_the_oracle_when_cut_into_many_tiles(case: cases.Case) -> None:
    check(case, torch.float64)


@pytest.mark.usefixtures("tiny_tiles")
def test_forward_matches_the_oracle(case: cases.Case) -> None:
    if case.bias_floor == cases.LEAST:
        pytest.skip("for a forward, the lowest finite numbers are no mask: such a row is the mean of the values")
    x = inputs.build(case, torch.float64)
    out, lse = forward_of(x)
    expected = x.reference.out.nan_to_num(0.0)  # the kit writes NaN outside the logical lengths
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, x.reference.lse, rtol=1e-9, atol=1e-9)


ONE_SIGN = cases.Case("one_sign", 1, 2, 1, 520, 520, 16, 16, softmax_scale=0.02, dlse=True, one_sign=True)
MANY_BLOCKS = [
    ONE_SIGN,
    replace(ONE_SIGN, name="one_sign_bias_of_keys", bias="1h1k"),
    replace(ONE_SIGN, name="one_sign_bias_of_queries", bias="1hq1"),
    replace(ONE_SIGN, name="one_sign_packed_bias", bias="1hqk", seqlens_q=(17,) * 128, seqlens_k=(19,) * 128),
]


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", MANY_BLOCKS, ids=str)
def test_sums_of_16_bit_gradients_are_not_rounded_between_blocks(case: cases.Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dq_is_not_rounded_to_16_bits_between_blocks_of_keys(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are so many blocks that a 16-bit sum would stop growing: each block adds less than half of its last bit."""
    set_tiles(monkeypatch, blocks.TileSize(8, 1, 2 * 8, 1000))
    check(replace(ONE_SIGN, name="one_sign_many_keys", seqlen_q=8, seqlen_k=6000), dtype)


def test_delta_keeps_small_terms_beside_large_products() -> None:
    """All probabilities are 1 / 64, v is the identity and dout is 0 for key 0, so dk of key 0 is -delta / 64."""
    n, pairs = 64, 31
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(2**22, 2**24 - 1, (pairs,), generator=generator)
    dout = torch.zeros(n)
    dout[n - 2 * pairs :] = torch.cat([large, -large])[torch.randperm(2 * pairs, generator=generator)].float()
    dout[-1] += 1.0
    assert float(dout.double().sum()) == 1.0
    case = cases.Case("cancels", batch=1, heads=1, heads_kv=1, seqlen_q=1, seqlen_k=n, head_dim=1, head_dim_v=n)
    changed = {
        "q": torch.ones(1, 1, 1, 1),
        "k": torch.zeros(1, n, 1, 1),
        "v": torch.eye(n).view(1, n, 1, n),
        "out": torch.full((1, 1, 1, n), 1.0 / n),
        "dout": dout.view(1, 1, 1, n),
        "softmax_lse": torch.full((1, 1, 1), math.log(n)),
        "softmax_scale": 1.0,
    }
    grads = run_backward(inputs.build(case, torch.float32).arguments | changed)
    assert float(grads["dk"][0, 0, 0, 0]) == pytest.approx(-1.0 / n**2, rel=1e-5)


TILES = [blocks._CPU_SHARED_TILE, blocks.TileSize(5, 7, 70, 1000), blocks.TileSize(16, 16, 256, 64)]


@given(cases.any_case(), st.integers(0, 1000), st.sampled_from(TILES), st.sampled_from([1, 3]))
def test_random_cases_match_the_oracle(case: cases.Case, seed: int, tile: blocks.TileSize, count: int) -> None:
    with threads(count), pytest.MonkeyPatch.context() as monkeypatch:
        set_tiles(monkeypatch, tile)
        check(case, torch.float64, seed)


@pytest.mark.parametrize("case", cases.with_prefix("varlen", "heads", "layout", "dense_seqused"), ids=str)
def test_gradients_of_16_bit_inputs_may_be_fp32_and_strided(case: cases.Case) -> None:
    x = inputs.build(case, torch.bfloat16)
    wide = {
        f"d{name}": inputs.lay_out("odd_strides", poisoned_like(x.arguments[name], torch.float32)) for name in "qkv"
    }
    x.check(**run_backward(x.arguments, x.rng_state(), **wide))
    assert all(gradient.isfinite().all() for gradient in wide.values())


def forward_of(x: inputs.Inputs) -> tuple[Tensor, Tensor]:
    a = x.arguments
    options = options_of(a, x.rng_state())
    return reference.attention_forward(a["q"], a["k"], a["v"], options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_rounds_only_its_output(dtype: torch.dtype) -> None:
    x = inputs.build(cases.BY_NAME["bias_softcap_alibi_sink"], dtype)
    out, lse = forward_of(x)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, x.reference.out.to(dtype))
    torch.testing.assert_close(lse, x.reference.lse.float())


@pytest.mark.parametrize("name", ["heads_6to2", "varlen_unequal", "bias_1hqk", "dropout_flash_small"])
def test_results_repeat_bit_for_bit(name: str) -> None:
    x = inputs.build(cases.BY_NAME[name], torch.float32)
    first, second = (run_backward(x.arguments, x.rng_state()) for _ in range(2))
    for key, value in first.items():
        assert value is None or torch.equal(value, second[key])


@pytest.mark.parametrize("name", ["bias_softcap", "varlen_bias", "dropout_flash_small"])
def test_inputs_are_not_written_to(name: str) -> None:
    x = inputs.build(cases.BY_NAME[name], torch.float32)
    before = {key: tensor.clone() for key, tensor in x.tensors().items()}
    run_backward(x.arguments, x.rng_state())
    for key, tensor in x.tensors().items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, equal_nan=True, msg=key)


def test_autocast_changes_nothing() -> None:
    x = inputs.build(cases.BY_NAME["softcap"], torch.float32)
    plain = run_backward(x.arguments)
    with torch.autocast("cpu", torch.bfloat16):
        within = run_backward(x.arguments)
    assert torch.equal(plain["dq"], within["dq"])


def test_rows_without_keys_have_zero_gradients_whatever_their_lse_is() -> None:
    case = cases.Case("empty", batch=1, seqlen_q=50, seqlen_k=11, causal=True, dlse=True)
    x = inputs.build(case, torch.float32)
    x.arguments["softmax_lse"] = x.arguments["softmax_lse"].clone()
    for value in (torch.inf, -torch.inf, torch.nan, 0.0, -1e30):
        x.arguments["softmax_lse"][:, :, : 50 - 11] = value
        x.arguments["dlse"][:, :, : 50 - 11] = torch.nan
        x.arguments["out"][:, : 50 - 11] = torch.nan
        grads = run_backward(x.arguments)
        assert not grads["dq"][:, : 50 - 11].any()
        x.check(**grads)


@pytest.mark.parametrize("name", ["heads_6to2", "varlen_many", "bias_bh1k", "sink", "dropout_efficient32_small"])
def test_the_number_of_threads_changes_only_rounding(name: str) -> None:
    x = inputs.build(replace(cases.BY_NAME[name], heads=6, heads_kv=3), torch.float32)
    results = []
    for count in (2, 3):
        with threads(count):
            results.append(run_backward(x.arguments, x.rng_state()) | {"out": forward_of(x)[0]})
    for key, value in results[0].items():
        if value is not None:  # rounding differs between the body and the end of a vectorised loop
            torch.testing.assert_close(value, results[1][key], rtol=1e-5, atol=1e-5, msg=key)


FEW_HEADS = [
    cases.Case(
        "few_heads", batch=1, heads=1, heads_kv=1, seqlen_q=70, seqlen_k=90, causal=True, sink="finite", dlse=True
    ),
    cases.Case("few_heads_grouped", batch=1, heads=6, heads_kv=2, seqlen_q=70, seqlen_k=50, window_size=(20, 9)),
    cases.Case("few_heads_bias_bhq1", batch=1, heads=2, heads_kv=1, seqlen_q=70, bias="bhq1"),
    cases.Case("few_heads_bias_bh1k", batch=1, heads=2, heads_kv=1, seqlen_q=70, bias="bh1k"),
    cases.Case("few_heads_varlen", heads=1, heads_kv=1, seqlens_q=(40, 3), seqlens_k=(33, 50), softcap=2.0),
    cases.Case("few_queries", batch=1, heads=1, heads_kv=1, seqlen_q=9, seqlen_k=90, alibi="heads"),
]


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("case", FEW_HEADS, ids=str)
def test_threads_share_the_queries_if_there_are_few_heads(case: cases.Case) -> None:
    with threads(5):
        check(case, torch.float64)
        x = inputs.build(case, torch.float64)
        first, second = (run_backward(x.arguments) for _ in range(2))
        assert all(value is None or torch.equal(value, second[key]) for key, value in first.items())
        if not case.varlen:
            torch.testing.assert_close(forward_of(x)[0], x.reference.out)


def test_the_threads_inherit_inference_mode() -> None:
    case = cases.BY_NAME["heads_4to2"]
    x = inputs.build(case, torch.float32)
    with torch.inference_mode(), threads(2):
        grads = run_backward(x.arguments)
    assert grads["dq"] is not None
    assert grads["dq"].is_inference()
    x.check(**grads)


def run_in_child(x: inputs.Inputs, pipe: Any) -> None:
    pipe.send(float(run_backward(x.arguments)["dq"].sum()))


@pytest.mark.parametrize("least_work", [1, 2**60], ids=["tasks_in_threads", "threads_in_operators"])
def test_a_forked_child_starts_threads_of_its_own(least_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of a child would wait forever for the threads of OpenMP, which only the parent has."""
    monkeypatch.setattr(blocks, "_LEAST_WORK", least_work)
    x = inputs.build(cases.BY_NAME["heads_4to2"], torch.float32)  # small: the test's own operators need one thread
    with threads(2):
        expected = float(run_backward(x.arguments)["dq"].sum())
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of a fork in a process with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = context.Process(target=run_in_child, args=(x, theirs), daemon=True)  # not waited for if it hangs
            child.start()
        assert ours.poll(60)
        assert ours.recv() == expected
        child.join()


class Operators(TorchDispatchMode):
    """Records every operator that is called, and the size of the largest tensor that an operator allocates.

    A dispatch mode sees only its own thread, so the work must stay on that thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0
        self._one_thread = threads(1)

    def __enter__(self) -> Operators:
        self._one_thread.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._one_thread.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        given_storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given_storages:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


LONG = cases.Case("long", batch=1, heads=2, heads_kv=2, seqlen_q=2048, seqlen_k=2048, head_dim=8, head_dim_v=8)
VARIETY = [
    LONG,
    replace(LONG, name="long_causal", causal=True),
    replace(LONG, name="long_softcap_alibi_sink", softcap=3.0, alibi="heads", sink="finite"),
    replace(LONG, name="long_dropout", dropout_p=0.2, window_size=(600, 0)),
    replace(LONG, name="long_key_bias", bias="111k"),
    replace(LONG, name="long_varlen", seqlens_q=(2048,), seqlens_k=(2048,), dlse=True),
]


def backward_without_oracle(case: cases.Case) -> Callable[[], None]:
    """A call with inputs of the right shapes and arbitrary values."""
    x = inputs.build(replace(case, seqlen_q=1, seqlen_k=1, seqlens_q=None, seqlens_k=None), torch.float32)
    q = torch.randn(case.batch, case.seqlen_q, case.heads, case.head_dim)
    lse = torch.full((case.batch, case.heads, case.seqlen_q), 9.0)
    arguments = x.arguments | {"q": q, "k": q, "v": q, "out": q, "dout": q, "softmax_lse": lse, "dlse": None}
    if case.bias is not None:
        arguments["attn_bias"] = torch.randn(1, 1, 1, case.seqlen_k)
    if case.varlen:
        cu_seqlens = torch.tensor([0, case.seqlen_q], dtype=torch.int32)
        arguments |= dict.fromkeys(("q", "k", "v", "out", "dout"), q[0])
        arguments |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "softmax_lse": lse[0]}
        arguments |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    return lambda: void(run_backward(arguments, x.rng_state()))


def void(_: Any) -> None:
    return None


@pytest.mark.parametrize("case", VARIETY, ids=str)
def test_no_tensor_is_as_large_as_the_score_matrix(case: cases.Case) -> None:
    backward = backward_without_oracle(case)
    with Operators() as seen:
        backward()
    assert 0 < seen.largest <= case.seqlen_q * case.seqlen_k // 2


def test_forward_has_no_tensor_as_large_as_the_score_matrix() -> None:
    q = torch.randn(1, 2048, 2, 8)
    with Operators() as seen:
        reference.attention_forward(q, q, q, AttentionOptions(causal="bottom_right", softcap=2.0))
    assert 0 < seen.largest <= 2048 * 2048 // 2


def norms() -> None:
    x, gamma = torch.randn(5, 16), torch.randn(16)
    z, mu, rs = reference.layer_norm_forward(x, gamma, gamma)
    reference.layer_norm_backward(z, x, mu, rs, gamma, dresidual=x)
    z, rs = reference.rms_norm_forward(x, gamma)
    reference.rms_norm_backward(z, x, rs, gamma)


def decoding() -> None:
    q, k = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 2, 40, 8)
    bias = torch.randn(4, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i + 30 >= j, None, None, 2, 40, device="cpu", BLOCK_SIZE=16)
    out = flashbwd.flex_decoding(q, k, k, lambda s, b, h, i, j: s + bias[h], mask, enable_gqa=True)
    out.sum().backward()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "call",
    [backward_without_oracle(case) for case in VARIETY] + [norms, decoding],
    ids=[case.name for case in VARIETY] + ["norms", "decoding"],
)
def test_only_matrix_products_elementwise_operators_and_reductions_are_called(call: Callable[[], None]) -> None:
    with Operators() as seen:
        call()
    forbidden = ("attention", "norm", "flash", "softmax", "flex", "mkldnn", "linear", "cudnn")
    assert not [name for name in seen.names if any(word in name for word in forbidden)]


def test_bias_gradient_of_a_dense_broadcast_needs_no_second_score_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, length = 3, 512
    q = torch.randn(2, length, heads, 8, dtype=torch.bfloat16)
    bias = torch.zeros(1, 1, length, length, dtype=torch.bfloat16)
    x = inputs.build(replace(LONG, seqlen_q=1, seqlen_k=1), torch.bfloat16)
    lse = torch.full((2, heads, length), 7.0)
    arguments = x.arguments | {"q": q, "k": q, "v": q, "out": q, "dout": q, "softmax_lse": lse, "attn_bias": bias}
    dbias = poisoned_like(bias)
    set_tiles(monkeypatch, blocks.TileSize(64, 64, 2 * 64 * 64, 4096))
    with Operators() as seen:
        run_backward(arguments, dbias=dbias)
    assert 0 < seen.largest < length * length // 2
    assert dbias.isfinite().all()


# LayerNorm and RMSNorm

SHAPES = [(0, 8), (1, 1), (7, 5), (3, 4, 33), (2, 1000), (300,), (2, 3, 0)]


def check_norm(got: Tensor, expected: Any, dtype: torch.dtype) -> None:
    tolerances = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerances[dtype] * largest)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("with_gamma", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_forward_and_gradients_match_the_oracle(
    shape: tuple[int, ...], dtype: torch.dtype, with_gamma: bool, zero_centered: bool, rms: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    x, dz, dresidual = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    gamma = torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype) if with_gamma else None
    zero_centered = zero_centered and with_gamma
    if shape[-1] == 1 and not rms:
        x, dz = x.double().to(dtype), torch.zeros_like(dz)  # a row of one element has no variance: rs is huge
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = oracle.layer_norm(
            x, dz, gamma, rms=rms, dresidual=dresidual, zero_centered_gamma=zero_centered, eps=1e-5
        )
    if rms:
        z, rs = reference.rms_norm_forward(x, gamma, 1e-5, zero_centered)
        gradients: Any = *reference.rms_norm_backward(dz, x, rs, gamma, dresidual, zero_centered), None
    else:
        z, mu, rs = reference.layer_norm_forward(x, gamma, None, 1e-5, zero_centered)
        gradients = reference.layer_norm_backward(dz, x, mu, rs, gamma, dresidual, zero_centered)
    dx, dgamma, dbeta = gradients
    if shape[-1] == 0:
        assert dx.shape == x.shape
        return
    check_norm(z, expected.z, dtype)
    check_norm(dx, expected.dx, dtype)
    assert (dgamma is None) == (gamma is None)
    if dgamma is not None:
        assert dgamma.dtype == dtype
        check_norm(dgamma, expected.dgamma, dtype)
    if dbeta is not None:
        check_norm(dbeta, expected.dbeta, dtype)


def test_norm_accepts_16_bit_column_shaped_mu_and_rs_and_strided_rows() -> None:
    wide = torch.randn(6, 9, 40)
    x, dz = wide[:, ::2, :20], wide.transpose(0, 1)[1:6, :, 20:].transpose(0, 1)
    z, mu, rs = reference.layer_norm_forward(x)
    mu16, rs16 = mu.bfloat16().view(6, 5, 1), rs.bfloat16().view(6, 5, 1)
    got = reference.layer_norm_backward(dz, x, mu16, rs16)
    expected = reference.layer_norm_backward(
        dz.contiguous(), x.contiguous(), mu16.float().flatten(), rs16.float().flatten()
    )
    torch.testing.assert_close(z, torch.nn.functional.layer_norm(x, (20,)))
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_norm_writes_permuted_outputs() -> None:
    x = torch.randn(4, 6, 5).permute(1, 0, 2)[:, :, :]
    dz = torch.randn(6, 4, 5)
    _, mu, rs = reference.layer_norm_forward(x)
    dx: Any = reference.layer_norm_backward(dz, x, mu, rs)[0]
    assert dx.stride() == torch.empty_like(x).stride()
    torch.testing.assert_close(dx, reference.layer_norm_backward(dz, x.contiguous(), mu, rs)[0])


def test_norm_output_mask_omits_gradients() -> None:
    x, gamma = torch.randn(4, 8), torch.randn(8)
    _, mu, rs = reference.layer_norm_forward(x, gamma)
    for mask in [(True, False, False), (False, True, False), (False, False, True), (False, False, False)]:
        got = reference.layer_norm_backward(x, x, mu, rs, gamma, output_mask=mask)
        assert tuple(value is not None for value in got) == mask


def test_norm_results_do_not_depend_on_the_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbwd.reference import norms as module

    x, dz, gamma = torch.randn(50, 16), torch.randn(50, 16), torch.randn(16)
    _, mu, rs = reference.layer_norm_forward(x, gamma)
    whole = reference.layer_norm_backward(dz, x, mu, rs, gamma)
    monkeypatch.setattr(module, "_CPU_CHUNK", 48)
    for a, b in zip(reference.layer_norm_backward(dz, x, mu, rs, gamma), whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["heads_4to2", "bias_softcap", "alibi_batch_causal", "sink", "dropout_efficient64_small"]
)
def test_dense_calls_can_be_captured_in_a_cuda_graph(name: str) -> None:
    x = inputs.build(cases.BY_NAME[name], torch.float32, "cuda")
    eager = run_backward(x.arguments, x.rng_state())  # also initialises the libraries
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_backward(x.arguments, x.rng_state())
    graph.replay()
    for key, value in eager.items():
        assert value is None or torch.equal(value, captured[key])


@pytest.mark.gpu
def test_packed_calls_raise_when_they_are_captured() -> None:
    x = inputs.build(cases.BY_NAME["varlen_one"], torch.float32, "cuda")
    with pytest.raises(RuntimeError, match="cu_seqlens_q is on the GPU"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run_backward(x.arguments)
