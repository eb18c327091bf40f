"""Gradients of captured tensors are summed in registers and by warps: csrc/mods/gradient_sum.cuh on simulated lanes.

The lanes of a warp are threads that meet at a barrier in each warp-wide function, as the lanes of a GPU do.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

LANES = 32
SOURCE = Path(__file__).parent.parent / "csrc" / "mods" / "gradient_sum.cuh"
PRELUDE = r"""
#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>
#define __CUDACC__
#define __device__
#define __forceinline__ inline
static thread_local struct { int x; } threadIdx;
static pthread_barrier_t meeting;
static unsigned long long board[32];
static double numbers[32];
static std::mutex memory;
static int additions;

static unsigned __ballot_sync(unsigned, bool lane) {
  board[threadIdx.x] = lane;
  pthread_barrier_wait(&meeting);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(board[i]) << i;
  pthread_barrier_wait(&meeting);
  return bits;
}
static bool __all_sync(unsigned all, bool lane) { return __ballot_sync(all, lane) == ~0u; }
static unsigned long long __shfl_sync(unsigned, unsigned long long value, int from) {
  board[threadIdx.x] = value;
  pthread_barrier_wait(&meeting);
  const unsigned long long found = board[from];
  pthread_barrier_wait(&meeting);
  return found;
}
template <typename T> static T __shfl_xor_sync(unsigned, T value, int mask) {
  numbers[threadIdx.x] = value;
  pthread_barrier_wait(&meeting);
  const T found = static_cast<T>(numbers[threadIdx.x ^ mask]);
  pthread_barrier_wait(&meeting);
  return found;
}
static int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
template <typename T> static void add_to_memory(bool adds, T* element, T value) {
  if (!adds) return;
  const std::lock_guard<std::mutex> lock(memory);
  *element += value;
  ++additions;
}
"""
RUN = r"""
// In step i, lane l adds values[l * steps + i] to gradient[at[l * steps + i]]. If that is -1 - n, it adds nothing, and
// its element is n.
extern "C" int sum_up(int steps, const int* at, const double* values, double* gradient) {
  pthread_barrier_init(&meeting, nullptr, 32);
  additions = 0;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([=] {
      threadIdx.x = lane;
      flashbwd::GradientSum<double> sum;
      for (int i = lane * steps; i < (lane + 1) * steps; ++i) {
        sum.add(at[i] >= 0, gradient + std::max(at[i], -1 - at[i]), values[i]);
      }
      sum.finish();
    });
  }
  for (std::thread& lane : lanes) lane.join();
  pthread_barrier_destroy(&meeting);
  return additions;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header with the assembly, which only a GPU runs, replaced by an addition that is counted."""
    text, replaced = re.subn(
        r"asm volatile\(.*?\);", "add_to_memory(adds, element, value);", SOURCE.read_text(), flags=re.S
    )
    assert replaced == 2
    folder = tmp_path_factory.mktemp("gradient_sum")
    (folder / "sum.cpp").write_text(PRELUDE + text + RUN)
    command = ["c++", "-std=c++17", "-O1", "-w", "-pthread", "-shared", "-fPIC", "-o", "sum.so", "sum.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "sum.so"))


def sum_up(library: ctypes.CDLL, at: torch.Tensor, values: torch.Tensor, elements: int) -> tuple[torch.Tensor, int]:
    """Return the gradient and the number of additions to memory. ``at`` and ``values`` are (lanes, steps)."""
    gradient = torch.zeros(elements, dtype=torch.float64)
    at, values = at.int().contiguous(), values.double().contiguous()
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (at, values, gradient)]
    return gradient, library.sum_up(at.shape[1], *pointers)


def expected(at: torch.Tensor, values: torch.Tensor, elements: int) -> torch.Tensor:
    kept = at >= 0
    return torch.zeros(elements, dtype=torch.float64).index_add(0, at[kept], values[kept].double())


@given(elements=st.integers(1, 5), steps=st.integers(0, 6), skipped=st.floats(0, 1), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_value_is_added_once(library: ctypes.CDLL, elements: int, steps: int, skipped: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(elements, (LANES, steps), generator=generator)
    at = at.where(torch.rand(at.shape, generator=generator) >= skipped, -1 - at)
    values = torch.randint(-8, 9, at.shape, generator=generator)
    gradient, _ = sum_up(library, at, values, elements)
    assert torch.equal(gradient, expected(at, values, elements))


def test_a_warp_adds_once_to_an_element_that_all_its_pairs_share(library: ctypes.CDLL) -> None:
    gradient, additions = sum_up(library, torch.full((LANES, 16), 2), torch.ones(LANES, 16), 4)
    assert additions == 1
    assert gradient.tolist() == [0, 0, LANES * 16, 0]


def test_pairs_that_add_nothing_do_not_keep_a_warp_from_adding_once(library: ctypes.CDLL) -> None:
    at = torch.full((LANES, 16), 3)
    at[::2, 1:] = -1 - 3
    gradient, additions = sum_up(library, at, torch.ones(LANES, 16), 4)
    assert additions == 1
    assert gradient[3] == LANES / 2 * 16 + LANES / 2


def test_a_warp_without_pairs_adds_nothing(library: ctypes.CDLL) -> None:
    assert sum_up(library, torch.zeros(LANES, 0), torch.ones(LANES, 0), 1)[1] == 0


def test_a_lane_adds_once_per_run_of_one_element(library: ctypes.CDLL) -> None:
    at = torch.tensor([0, 0, 0, 1, 1, 2]).repeat(LANES, 1)
    at[:, 5] += torch.arange(LANES) % 2  # the last elements differ, so each lane adds its last run alone
    gradient, additions = sum_up(library, at, torch.ones(LANES, 6), 4)
    assert additions == 3 * LANES
    assert gradient.tolist() == [3 * LANES, 2 * LANES, LANES / 2, LANES / 2]


def test_sums_of_0_are_not_added(library: ctypes.CDLL) -> None:
    values = torch.tensor([1.0, -1.0]).repeat(LANES, 1)
    _, additions = sum_up(library, torch.zeros(LANES, 2, dtype=torch.long), values, 1)
    assert additions == 0


def test_nan_reaches_its_element(library: ctypes.CDLL) -> None:
    values = torch.zeros(LANES, 2)
    values[7, 0] = torch.nan
    at = torch.zeros(LANES, 2, dtype=torch.long)
    at[7] = 1
    gradient, _ = sum_up(library, at, values, 2)
    assert gradient[0] == 0 and gradient[1].isnan()
