"""The energy counter of a GPU, on a made-up NVML with three GPUs, and the energy in result files and reports."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashbwd import __main__ as main
from flashbwd.bench import cases, energy, report, results, runner
from flashbwd.bench.energy import EnergyCounter, EnergyError
from flashbwd.bench.measure import Settings

GPU = torch.device("cuda", 0)
UUIDS = ("GPU-aa", "GPU-bb", "GPU-cc")  # in the order of NVML
IDLE_WATTS = 70.0


class NVMLError(Exception):
    pass


@dataclass
class MadeUpNvml:
    """NVML for three GPUs, of which the counter is updated every ``update_ms`` of a clock that only reading advances.

    Handles are indices. ``missing`` lists functions that the driver does not support.
    """

    update_ms: float = 20.0
    start: int = 2**32 - 100
    watts: float = IDLE_WATTS
    mig: bool = False
    busy: int = 0
    processes: dict[str, list[int]] = field(default_factory=lambda: {"compute": [1], "mps": []})
    missing: tuple[str, ...] = ("nvmlDeviceGetMigMode",)
    now_ms: float = 0.0
    read: list[int] = field(default_factory=list)
    NVMLError: type[Exception] = NVMLError

    def _support(self, function: str) -> None:
        if function in self.missing:
            raise NVMLError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802
        self._support("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid not in UUIDS:
            raise NVMLError("Not Found")
        return UUIDS.index(uuid)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        self._support("nvmlDeviceGetMigMode")
        return [int(self.mig), 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        self._support("nvmlDeviceGetTotalEnergyConsumption")
        self.read.append(handle)
        self.now_ms += 0.01
        updates = int(self.now_ms / self.update_ms) if self.update_ms else 0
        return self.start + round(updates * self.update_ms * self.watts)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        self._support("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid) for pid in self.processes["compute"]]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        self._support("nvmlDeviceGetMPSComputeRunningProcesses")
        return [SimpleNamespace(pid=pid) for pid in self.processes["mps"]]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        self._support("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=self.busy)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> MadeUpNvml:
    made_up = MadeUpNvml()

    def sleep(seconds: float) -> None:
        made_up.now_ms += seconds * 1e3

    monkeypatch.setitem(sys.modules, "pynvml", made_up)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: made_up.now_ms / 1e3, sleep=sleep))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="aa"))
    return made_up


# ---- the counter ----------------------------------------------------------------------------------


def test_the_energy_of_a_span_is_the_difference_of_two_readings_in_joules(nvml):
    counter = EnergyCounter(GPU)
    before = counter.millijoules()
    nvml.watts, nvml.start = 0.0, before + 4500
    assert counter.joules_since(before) == 4.5


@pytest.mark.parametrize("start", [2**32 - 100, 2**53 + 1, 2**63])
def test_a_counter_of_any_size_is_read_without_wrapping_or_rounding(nvml, start):
    counter = EnergyCounter(GPU)
    nvml.watts, nvml.start = 0.0, start
    before = counter.millijoules()
    assert before == start
    nvml.start += 1001
    assert counter.joules_since(before) == 1.001


def test_a_counter_that_goes_back_is_an_error(nvml):
    counter = EnergyCounter(GPU)
    with pytest.raises(EnergyError, match="went back from"):
        counter.joules_since(counter.millijoules() + 10**9)


@pytest.mark.parametrize("update_ms", [5.0, 20.0, 100.0])
def test_the_interval_of_the_counter_and_the_idle_power_are_measured(nvml, update_ms):
    nvml.update_ms = update_ms
    counter = EnergyCounter(GPU)
    assert counter.update_ms == pytest.approx(update_ms, abs=0.5)
    assert counter.idle_watts == pytest.approx(IDLE_WATTS, rel=0.02)
    assert counter.timed_ms(1.0) == counter.update_ms / energy.MAX_ERROR
    assert counter.timed_ms(1e6) == 1e6


def test_one_delay_of_the_process_does_not_lengthen_the_interval(nvml, monkeypatch):
    naps = iter([0.0] * 500 + [300.0])

    def sleep(seconds: float) -> None:
        nvml.now_ms += seconds * 1e3 + next(naps, 0.0)

    monkeypatch.setattr(energy.time, "sleep", sleep)
    assert EnergyCounter(GPU).update_ms == pytest.approx(20.0, abs=0.5)


@pytest.mark.parametrize("visible", [(0, 1, 2), (2, 0), (1,)])
@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_pytorchs_device_is_found_by_uuid_whatever_its_number(nvml, monkeypatch, visible, prefix):
    def properties(device: torch.device) -> Any:
        return SimpleNamespace(uuid=prefix + UUIDS[visible[device.index]].removeprefix("GPU-"))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for index, handle in enumerate(visible):
        nvml.read.clear()
        EnergyCounter(torch.device("cuda", index))
        assert set(nvml.read) == {handle}


# ---- machines on which the energy of a call is unknown --------------------------------------------


def test_without_the_package_the_message_says_what_to_install(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    with pytest.raises(EnergyError, match=r"nvidia-ml-py, which is not installed \(pip install nvidia-ml-py\)"):
        EnergyCounter(GPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"missing": ("nvmlInit",)}, "cannot use NVML, the library of the NVIDIA driver: Not Supported"),
        ({"missing": ("nvmlDeviceGetTotalEnergyConsumption",)}, "NVML does not provide: Not Supported. GPUs since"),
        ({"missing": (), "mig": True}, "needs a GPU without MIG"),
        ({"update_ms": 0.0}, "it did not change in 3.0 s"),
        ({"processes": {"compute": [7, 8], "mps": []}}, "NVML reports 2 processes: 7, 8"),
        ({"processes": {"compute": [7], "mps": [7, 9]}}, "NVML reports 2 processes: 7, 9"),
        ({"busy": 40}, "its utilization is 40 % before the first call"),
    ],
)
def test_a_counter_that_cannot_be_attributed_is_refused(nvml, changes, message):
    for name, value in changes.items():
        setattr(nvml, name, value)
    with pytest.raises(EnergyError, match=message):
        EnergyCounter(GPU)


def test_an_instance_of_mig_is_refused(nvml, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="MIG-aa"))
    with pytest.raises(EnergyError, match=r"no GPU with the UUID MIG-aa through NVML: Not Found. A MIG instance"):
        EnergyCounter(GPU)


def test_a_cpu_is_refused():
    with pytest.raises(EnergyError, match="PyTorch finds no GPU"):
        EnergyCounter(torch.device("cpu"))


def test_a_driver_that_lists_no_processes_is_not_refused(nvml):
    nvml.missing = (
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
        "nvmlDeviceGetUtilizationRates",
    )
    EnergyCounter(GPU)
    nvml.missing, nvml.mig = (), False
    EnergyCounter(GPU)


def test_a_process_that_comes_later_is_noticed(nvml):
    counter = EnergyCounter(GPU)
    counter.require_sole_use()
    nvml.processes["compute"].append(2)
    with pytest.raises(EnergyError, match="2 processes"):
        counter.require_sole_use()


# ---- files, reports and the command ---------------------------------------------------------------


def peer(joules: list[float], ms: float, status: str = results.OK) -> results.PeerResult:
    slots = [ms] * len(joules)
    return results.PeerResult(
        status, times_ms=[ms] * 5, work=6e9, sustained_ms=slots, joules=joules, energy_error=[0.02] * len(joules)
    )


def measured() -> results.Report:
    peers = {
        "torch slow": peer([1.0, 1.0, 1.0], 9.0),
        "torch fast": peer([2.0, 4.0, 4.0], 3.0),
        "flashbwd sm90": peer([1.0, 1.0, 3.0], 2.0),
    }
    case = results.CaseResult("c", "t", "TFLOP/s", 1e-2, {}, peers, [], {})
    here = dict.fromkeys(("device", "torch", "driver", "commit", "kernel_sources", "threads"), "")
    here |= {"energy_counter": {"update_ms": 20.0, "idle_watts": 70.0}}
    settings = vars(Settings(5, 10.0, 0.0, 500.0, energy=True))
    return results.Report("attention", "", here, dict(settings), [case])


def test_the_ratio_of_energies_is_taken_within_rounds_over_the_fastest_peer():
    case = measured().results[0]
    assert case.energy_ratio("flashbwd sm90") == results.Ratio(0.5, 0.25, 0.75)
    assert case.energy_ratio("torch fast") == results.Ratio(1.0, 1.0, 1.0)
    case.peers["torch fast"].joules = []
    assert case.energy_ratio("flashbwd sm90") is None


def test_a_report_has_joules_beside_the_rate_and_says_what_they_include():
    text = report.markdown(measured())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "J/call" in line]
    assert rows == [["case", "peer", "TFLOP/s", "J/call", "over the fastest peer's", "W", "error at most"]]
    ours = next(line for line in text.splitlines() if line.startswith("| c") and "0.50 (0.25-0.75)" in line)
    assert [cell.strip() for cell in ours.strip("|").split("|")] == [
        "c", "flashbwd sm90", "3", "1", "0.50 (0.25-0.75)", "500", "2.0 %",
    ]  # fmt: skip
    assert "updated every 20 ms (joules include the power of an idle GPU, which was 70 W)" in text


def test_joules_are_saved_and_older_files_without_them_are_loaded(tmp_path):
    found = measured()
    found.save(tmp_path / "new.json")
    assert results.load(tmp_path / "new.json") == found
    text = (tmp_path / "new.json").read_text()
    keys = ('"joules"', '"energy_error"', '"energy"', '"energy_counter"')
    old = json.loads(text)
    del old["settings"]["energy"], old["machine"]["energy_counter"]
    for one in old["results"][0]["peers"].values():
        del one["joules"], one["energy_error"]
    assert not any(key in json.dumps(old) for key in keys)
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = results.load(tmp_path / "old.json").results[0].peers["flashbwd sm90"]
    assert (loaded.joules, loaded.energy_error, loaded.sustained_ms) == ([], [], [2.0] * 3)


def test_a_file_without_energy_has_no_table_of_it():
    found = measured()
    for one in found.results[0].peers.values():
        one.joules, one.energy_error = [], []
    found.settings.pop("energy")
    assert report.energy(found.results) == ""
    assert "J/call" not in report.markdown(found)
    assert "energy counter" not in report.markdown(found)


def test_one_plot_shows_the_energy(tmp_path):
    pytest.importorskip("matplotlib")
    found = measured()
    names = [path.name for path in report.plots(found, tmp_path / "x")]
    assert names == ["x-t.png", "x-energy.png"]
    found.results[0].peers["torch fast"].joules = []
    assert [path.name for path in report.plots(found, tmp_path / "x")] == ["x-t.png"]


@pytest.mark.parametrize("quick", [False, True])
def test_the_option_asks_for_slots_with_a_settled_clock(quick):
    options = main._parser().parse_args(["bench", "--energy", *(["--quick"] if quick else [])])
    settings = main.settings_of(options, torch.device("cuda"))
    assert settings.energy
    assert settings.sustained_ms == main.SUSTAINED_MS
    assert not main.settings_of(main._parser().parse_args(["bench"]), torch.device("cuda")).energy


def test_the_command_says_why_it_cannot_measure_energy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(main.machine, "default_device", lambda: torch.device("cpu"))
    arguments = ["bench", "--suite", "layer_norm", "--energy", "--out", str(tmp_path)]
    assert main.main(arguments) == 2
    assert "PyTorch finds no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main.main(["bench", "--suite", "scale", "--energy"]) == 2
    assert "does not support suite scale" in capsys.readouterr().err


def test_a_counter_lost_during_a_run_leaves_the_results_so_far(tmp_path, capsys, monkeypatch):
    path = tmp_path / "found.json"

    def run_suite(*arguments: Any, **options: Any) -> results.Report:
        measured().save(path)
        raise EnergyError("another process")

    monkeypatch.setattr(runner, "run_suite", run_suite)
    monkeypatch.setattr(runner, "result_path", lambda *arguments: path)
    monkeypatch.setattr(main.machine, "default_device", lambda: torch.device("cpu"))
    assert main.main(["bench", "--suite", "layer_norm", "--energy"]) == main.STOPPED_EARLY
    assert "--resume continues with the next case" in capsys.readouterr().err


def test_the_counter_is_given_to_every_case(tmp_path, monkeypatch):
    counter = SimpleNamespace(update_ms=20.0, idle_watts=70.0)
    given = []

    def run_case(case: Any, *arguments: Any) -> results.CaseResult:
        given.append(arguments[-1])
        return replace(measured().results[0], name=case.name, table=case.table)

    monkeypatch.setattr(runner, "EnergyCounter", lambda device: counter)
    monkeypatch.setattr(runner, "run_case", run_case)
    monkeypatch.setattr(runner.measure, "ceilings", lambda *arguments: {})
    chosen = [cases.NormCase("t", 4, rows, "fp32", compiled=False) for rows in (8, 16)]
    device = torch.device("cpu")
    for on in (True, False):
        path = tmp_path / f"{on}.json"
        found = runner.run_suite("s", chosen, device, Settings(energy=on), path, progress=False)
        assert ("energy_counter" in found.machine) == on
    assert given == [counter, counter, None, None]
