"""Runs independent tasks on several CPU threads, in which PyTorch's operators are then single-threaded.

An operator that uses several threads ends with a barrier. A tile runs eight operators of about 50 us, so one slow
thread (on a busy machine or a shared core) would delay all threads eight times per tile. Threads that process their own
heads synchronise only once, at the end. See docs/kernels/reference.md for the measurements.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_pool: tuple[int, ThreadPoolExecutor] | None = None
_pool_lock = threading.Lock()
_forked = False


def _forget_pool() -> None:
    """Discard the pool after a fork: the child process does not have the threads of its parent."""
    global _pool, _pool_lock, _forked
    _pool, _pool_lock, _forked = None, threading.Lock(), True


os.register_at_fork(after_in_child=_forget_pool)


def run_all(tasks: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Call all tasks, on up to `threads` CPU threads. Results are in the order of the tasks.

    One thread is the caller's, in which operators may use several threads. A forked process runs even a single task on
    a thread of its own: its operators would wait forever for the threads that OpenMP had in the parent. This protects
    tasks only. As with PyTorch's own operators, large tensors outside of tasks need ``torch.set_num_threads(1)``.
    """
    threads = max(min(threads, len(tasks)), 1)
    if threads == 1 and not (_forked and torch.get_num_threads() > 1):
        return [task() for task in tasks]
    inference = torch.is_inference_mode_enabled()
    results: dict[int, T] = {}
    left = deque(enumerate(tasks))

    def work() -> None:
        with torch.inference_mode() if inference else torch.no_grad():  # both modes are per thread
            while True:
                try:
                    index, task = left.popleft()
                except IndexError:
                    return
                results[index] = task()

    pool = _pool_of(threads)
    for done in [pool.submit(work) for _ in range(threads)]:
        done.result()
    return [results[index] for index in range(len(tasks))]


def _pool_of(threads: int) -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None or _pool[0] < threads:
            _pool = threads, _start(threads)
        return _pool[1]


def _start(threads: int) -> ThreadPoolExecutor:
    """Start threads in which PyTorch's operators use no further threads.

    ``torch.set_num_threads`` sets the thread count of the calling thread, and the default for threads that start later.
    Every worker therefore sets its own count to 1. After all workers have done so, the caller restores the default.
    """
    before = torch.get_num_threads()
    begun = threading.Barrier(threads)

    def begin() -> None:
        torch.get_num_threads()  # the first call copies the default, which must not happen after the next line
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="flashbwd", initializer=begin)
    for _ in range(threads):
        pool.submit(int)  # starts one worker each: no worker is idle before all have started
    pool.submit(int).result()
    torch.set_num_threads(before)
    return pool
