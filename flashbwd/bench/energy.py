"""Reads the energy counter of a GPU, which the driver keeps in millijoules: ``python -m flashbwd bench --energy``.

The counter belongs to the whole GPU, so its joules can be attributed to a call only if nothing else uses the GPU. The
driver updates it at intervals of some tens of milliseconds. A reading is therefore late by up to one interval, and the
energy of a time span is wrong by at most the energy of one interval. ``timed_ms`` returns a span that is long enough.

The joules include the power of an idle GPU.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

MAX_ERROR = 0.02  # largest error of a slot's joules from the interval of the counter, as a fraction
UPDATES = 10  # updates of the counter that are observed in order to measure their interval
PATIENCE_S = 3.0  # a counter that does not change for this long is unusable
BUSY_PERCENT = 5  # an idle GPU reports a lower utilization


class EnergyError(RuntimeError):
    """The energy of a call cannot be measured on this machine; the message gives the reason."""


class EnergyCounter:
    """The energy counter of one CUDA device.

    Attributes
    ----------
    update_ms
        Observed interval between two updates, in milliseconds.
    idle_watts
        Power of the GPU while this process used it for nothing.

    Raises
    ------
    EnergyError
        If the package nvidia-ml-py is missing, if the GPU has no counter, or if something else uses the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise EnergyError("flashbwd: --energy reads the energy counter of an NVIDIA GPU, and PyTorch finds no GPU")
        self._nvml = _library()
        self._handle = self._find(_uuid(device))
        self._refuse_mig()
        self.millijoules()  # raises if there is no counter
        self.update_ms, self.idle_watts = self._observe()
        self._refuse_busy()
        self.require_sole_use()

    def millijoules(self) -> int:
        """Return the energy since the driver was loaded. The 64-bit counter does not wrap around."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError as error:
            raise EnergyError(
                f"flashbwd: --energy needs the GPU's energy counter, which NVML does not provide: {error}. GPUs since "
                "Volta have one, but virtual GPUs may not."
            ) from error

    def joules_since(self, before: int) -> float:
        """Return the joules since an earlier reading."""
        now = self.millijoules()
        if now < before:
            raise EnergyError(f"flashbwd: the energy counter went back from {before} to {now} mJ")
        return (now - before) / 1e3

    def timed_ms(self, at_least: float) -> float:
        """Return a time span of ``at_least`` milliseconds in which the interval of the counter is MAX_ERROR or less."""
        return max(at_least, self.update_ms / MAX_ERROR)

    def require_sole_use(self) -> None:
        """Raise if NVML reports more than one process on the GPU.

        The process IDs are not compared with this process, because they may belong to another namespace.
        """
        nvml, found = self._nvml, set()
        for query in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetMPSComputeRunningProcesses):
            try:
                found |= {process.pid for process in query(self._handle)}
            except nvml.NVMLError:  # some drivers and containers list no processes
                continue
        if len(found) > 1:
            raise EnergyError(
                f"flashbwd: --energy needs a GPU that no other process uses, because the counter includes their "
                f"energy, but NVML reports {len(found)} processes: {', '.join(map(str, sorted(found)))}"
            )

    def _find(self, uuid: str) -> Any:
        """Return the GPU by UUID: NVML numbers all GPUs of the machine, PyTorch those of CUDA_VISIBLE_DEVICES."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            raise EnergyError(
                f"flashbwd: --energy finds no GPU with the UUID {uuid} through NVML: {error}. A MIG instance has no "
                "energy counter of its own."
            ) from error

    def _refuse_mig(self) -> None:
        try:
            current, _ = self._nvml.nvmlDeviceGetMigMode(self._handle)
        except self._nvml.NVMLError:  # this GPU does not support MIG
            return
        if current:
            raise EnergyError(
                "flashbwd: --energy needs a GPU without MIG, because the counter includes the energy of all instances"
            )

    def _observe(self) -> tuple[float, float]:
        """Return the interval between updates in milliseconds, and the power in watts.

        It is the second-longest of the observed intervals, because a delay of this process can lengthen one of them.
        """
        readings = [self._next_update(self.millijoules()) for _ in range(UPDATES + 1)]
        intervals = [1e3 * (b[0] - a[0]) for a, b in itertools.pairwise(readings)]
        (start, first), (end, last) = readings[0], readings[-1]
        return sorted(intervals)[-2], (last - first) / 1e3 / (end - start)

    def _next_update(self, before: int) -> tuple[float, int]:
        deadline = time.perf_counter() + PATIENCE_S
        while (now := time.perf_counter()) < deadline:
            if (value := self.millijoules()) != before:
                return now, value
            time.sleep(2e-4)
        raise EnergyError(f"flashbwd: --energy needs a running energy counter, but it did not change in {PATIENCE_S} s")

    def _refuse_busy(self) -> None:
        """Raise if the GPU is busy although this process has not used it yet. NVML may hide the other processes."""
        try:
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        except self._nvml.NVMLError:
            return
        if busy > BUSY_PERCENT:
            raise EnergyError(
                f"flashbwd: --energy needs a GPU that no other process uses, but its utilization is {busy} % before "
                "the first call"
            )


def _library() -> Any:
    """Return the module pynvml after its initialization."""
    try:
        import pynvml
    except ImportError as error:
        raise EnergyError(
            "flashbwd: --energy needs the package nvidia-ml-py, which is not installed (pip install nvidia-ml-py)"
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EnergyError(f"flashbwd: --energy cannot use NVML, the library of the NVIDIA driver: {error}") from error
    return pynvml


def _uuid(device: torch.device) -> str:
    """Return NVML's form of a CUDA device's UUID."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
