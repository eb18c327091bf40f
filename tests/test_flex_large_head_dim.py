"""A score_mod above head dimension 128: csrc/attention/sm90/large_head_dim/score_mod.cuh on simulated threads.

Each thread of a warpgroup computes P of its scores, and then dS from what it sent. The oracle computes whole tiles.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

SM90 = Path(__file__).parent.parent / "csrc" / "attention" / "sm90"
QUERIES, KEYS, THREADS, VALUES = 64, 64, 128, 32
FIRST_QUERY, FIRST_KEY, HEAD, SCALE = 2 * QUERIES, 192, 3, 0.125
SEQLEN_Q, SEQLEN_K = 190, 240  # the tile reaches beyond both
PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
namespace flashbwd {
constexpr int kWarpgroupThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;
inline float exp2_approximate(float x) { return std::exp2(x); }
inline float tanh_complement(float x) { return 2.f / (1.f + std::exp2(x)); }
inline int32_t at_most(int32_t a, int32_t b) { return std::min(a, b); }
inline uint32_t bits_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
template <typename T> uint32_t pack2(float low, float high) { return bits_of(low) >> 16 | (bits_of(high) & ~0xffffu); }
"""
CALLER = r"""
struct Attention { float softmax_scale; int32_t seqlen_q, seqlen_k; };
struct KernelParams { Attention attention; };
struct GeneratedParams : KernelParams {};
template <typename Traits, bool kMasked, typename Consumer>
ScoreFunction<kMasked> score_function(const Consumer& c, VisibleBits<1> visible) {
  const float biases[2] = {}, distance = c.it.query_block() * 64 + c.pair - c.work.first_key - c.first_own_key();
  return {c.params.attention.softmax_scale, c.softcap, biases, 0.03f, distance, visible};
}
"""
WARPGROUP = r"""
using namespace large_head_dim;
static double captured[512];
template <bool kAdds>
struct Mod {
  static constexpr bool kCapturedGradients = kAdds;
  struct Sums { void finish() {} };
  static float score_mod(const GeneratedParams&, float s, int, int h, int q, int k) {
    return s * (1 + .01f * h) + .003f * q - .002f * k + 1e-4f * s * s;
  }
  static float score_gradient(const GeneratedParams&, float s, int, int h, int q, int k, float ds, bool adds, Sums&) {
    if (adds) captured[q + k] += ds * s;
    return ds * (1 + .01f * h + 2e-4f * s);
  }
};
template <int kHeadDim_, bool kGenerated_, bool kAdds>
struct Traits {
  using T = int;
  using Mod = sm90::Mod<kAdds>;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = 64;
  static constexpr bool kGenerated = kGenerated_, kSendsScores = kAdds;
};
struct Consumer {
  GeneratedParams params{};
  struct { int batch = 1, first_key = 192; } work;
  struct { int head() const { return 3; } int query_block() const { return 2; } } it;
  int pair, key;
  uint32_t visible;
  float softcap;
  int first_own_key() const { return key; }
  uint32_t load_visible() const { return visible; }
};
template <typename Traits>
void run(float softcap, float* s, const uint32_t* visible, const float* lse, const float* delta, uint32_t* p,
         float* dp) {
  alignas(16) static float4 exchange[8 * 128];
  std::fill(captured, captured + 512, 0.0);
  for (int t = 0; t < 128; ++t) {
    Consumer c{{}, {}, {}, t % 4 * 2, t / 32 * 16 + t % 32 / 4, visible[t], softcap};
    c.params.attention = {.125f, 190, 240};
    modified_probabilities<Traits>(c, visible[t], reinterpret_cast<float(&)[32]>(s[32 * t]),
                                   reinterpret_cast<uint32_t(&)[16]>(p[16 * t]), lse + c.pair, exchange + t);
    auto& ds = reinterpret_cast<float(&)[32]>(dp[32 * t]);
    if constexpr (Traits::kSendsScores) {
      modified_gradients<Traits>(c, ds, exchange + t, lse + c.pair, delta + c.pair);
    } else {
      for (int v = 0; v < 32; ++v) {
        ds[v] = (&exchange[v / 4 * 128 + t].x)[v % 4] * (ds[v] - delta[c.pair + v / 4 * 8 + v % 2]);
      }
    }
  }
}
}  // namespace sm90
}  // namespace flashbwd
using namespace flashbwd::sm90;
extern "C" double* sums() { return captured; }
extern "C" void built_in(float cap, float* s, const uint32_t* v, const float* l, const float* d, uint32_t* p,
                         float* ds) {
  run<Traits<192, false, false>>(cap, s, v, l, d, p, ds);
}
#define GENERATED(D, ADDS)                                                                               \
  extern "C" void generated_##D##_##ADDS(float cap, float* s, const uint32_t* v, const float* l, const float* d, \
                                         uint32_t* p, float* ds) {                                       \
    run<Traits<D, true, ADDS>>(cap, s, v, l, d, p, ds);                                                  \
  }
GENERATED(192, 0) GENERATED(192, 1) GENERATED(256, 0) GENERATED(256, 1)
"""


def part(path: Path, begin: str, end: str) -> str:
    text = path.read_text()
    first = text.index(begin)
    return text[first : text.index(end, first)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    score_mod = (SM90 / "large_head_dim" / "score_mod.cuh").read_text()
    score_mod = re.sub("#(include|pragma once).*", "", score_mod)
    fragments = SM90.parents[1] / "common" / "wgmma_fragments.cuh"
    source = [
        PRELUDE,
        part(fragments, "template <int kEarly>", "// Calls visit"),
        "namespace sm90 {",
        part(SM90 / "tile_mask.cuh", "template <int kWords>\nstruct VisibleBits", "// A tile has"),
        part(SM90 / "score_mod" / "scores.cuh", "template <bool kMasked>", "// The function of a consumer"),
        CALLER,
        part(SM90 / "score_mod" / "generated.cuh", "template <typename Traits>", "// S becomes P"),
        score_mod.replace("flashbwd::sm90::", ""),
        WARPGROUP,
    ]
    folder = tmp_path_factory.mktemp("score_mod")
    (folder / "score_mod.cpp").write_text("\n".join(source))
    command = ["c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "score_mod.cpp", "-o", "score_mod.so"]
    subprocess.run(command, cwd=folder, check=True)
    loaded = ctypes.CDLL(str(folder / "score_mod.so"))
    loaded.sums.restype = ctypes.c_void_p
    return loaded


def places() -> tuple[Tensor, Tensor]:
    """The query and the key, within the tile, of each value of each thread."""
    t, v = torch.arange(THREADS)[:, None], torch.arange(VALUES)
    return t % 4 * 2 + v // 4 * 8 + v % 2, t // 32 * 16 + t % 32 // 4 + v % 4 // 2 * 8


def tile_of(values: Tensor) -> Tensor:
    tile = torch.empty(QUERIES, KEYS, dtype=torch.float64)
    tile[places()] = values.double()
    return tile


def words_of(visible: Tensor) -> Tensor:
    """One word per thread: the bits of its first key, then those of its second one, in the order of the queries."""
    bits = visible[places()].view(THREADS, 8, 2, 2).permute(0, 2, 1, 3).reshape(THREADS, VALUES).long()
    words = (bits << torch.arange(VALUES)).sum(1)
    return words.where(words < 2**31, words - 2**32).int()


def softcap_and_alibi(cap: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda s, q, k: (cap * torch.tanh(s / cap) if cap else s) - 0.03 * (q - k).abs()


def generated(s: Tensor, q: Tensor, k: Tensor) -> Tensor:
    q, k = q.clamp(max=SEQLEN_Q - 1), k.clamp(max=SEQLEN_K - 1)
    return s * (1 + 0.01 * HEAD) + 0.003 * q - 0.002 * k + 1e-4 * s * s


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])  # of the pairs that are visible
@pytest.mark.parametrize(
    ("name", "cap"),
    [("built_in", 0.0), ("built_in", 3.0), *((f"generated_{d}_{adds}", 0.0) for d in (192, 256) for adds in (0, 1))],
)
def test_a_warpgroup_agrees_with_whole_tiles(library: ctypes.CDLL, name: str, cap: float, share: float) -> None:
    generator = torch.Generator().manual_seed(5)
    scores, dp = (torch.randn(THREADS, VALUES, generator=generator) * 4 for _ in range(2))
    lse, delta = (torch.randn(QUERIES, generator=generator) for _ in range(2))
    visible = torch.rand(QUERIES, KEYS, generator=generator) < share
    s = (tile_of(scores) * SCALE).requires_grad_()
    q, k = FIRST_QUERY + torch.arange(QUERIES)[:, None], FIRST_KEY + torch.arange(KEYS)
    t = softcap_and_alibi(cap)(s, q, k) if name == "built_in" else generated(s, q, k)
    p = torch.exp(t - lse.double()[:, None]).masked_fill(~visible, 0.0).detach()
    dt = p * (tile_of(dp) - delta.double()[:, None])
    (ds,) = torch.autograd.grad(t, s, dt)

    packed = torch.full((THREADS, VALUES // 2), -1, dtype=torch.int32)  # NaN
    found, words = dp.clone(), words_of(visible)
    scaled = lse / torch.log(torch.tensor(2.0))
    tensors = (scores, words, scaled, delta, packed, found)
    getattr(library, name)(ctypes.c_float(cap), *(ctypes.c_void_p(x.data_ptr()) for x in tensors))
    low, high = (half.contiguous().view(torch.float32) for half in (packed << 16, packed >> 16 << 16))
    torch.testing.assert_close(tile_of(torch.stack([low, high], -1).flatten(1)), p, rtol=2**-7, atol=1e-7)
    torch.testing.assert_close(tile_of(found), ds, rtol=1e-4, atol=1e-6)
    sums = torch.tensor((ctypes.c_double * 512).from_address(library.sums()), dtype=torch.float64)
    want = torch.zeros(512, dtype=torch.float64)
    if name.endswith("_1"):
        at = q.clamp(max=SEQLEN_Q - 1) + k.clamp(max=SEQLEN_K - 1)
        want.index_add_(0, at.flatten(), (dt * s.detach()).flatten())
    torch.testing.assert_close(sums, want, rtol=1e-4, atol=1e-5)
