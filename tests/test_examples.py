"""The examples run from start to end, and fail if a gradient is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import flashbwd

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("train_gpt", monkeypatch)


@pytest.fixture
def train_packed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("train_packed", monkeypatch)


@pytest.fixture
def distributed_example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("train_distributed", monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
def test_train_gpt_agrees_with_torch_and_writes_its_results(device: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "train_gpt.py", "--steps", "4", "--device", device, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "train_gpt.json").read_text())
    assert result["agree"]
    assert result["plan"]["backend"] in ("reference", "short", "sm80", "sm90")
    assert f"{result['plan']['backend']} backend" in done.stdout
    assert [len(run["losses"]) for run in result["runs"].values()] == [4, 4]
    attention = [hits for name, hits in result["computed"].items() if "attention" in name]
    assert device == "cpu" or min(sum(attention), result["computed"]["aten::native_layer_norm_backward"]) >= 4
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def without_plotting(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python in which the packages that only plots and progress bars need can't be imported."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules.update(matplotlib=None, tqdm=None)\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize(
    ("example", "options", "verdict"),
    [
        ("train_gpt", ["--steps", "2"], "the two runs agree"),
        ("train_packed", ["--steps", "1"], "the two runs agree"),
        ("decode", ["--steps", "3", "--prompt", "300"], "tokens that agree: 100.0%"),
    ],
)
def test_an_example_needs_no_matplotlib_and_no_tqdm(
    example: str, options: list[str], verdict: str, without_plotting: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, EXAMPLES / f"{example}.py", *options, "--device", "cpu", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=without_plotting)
    assert done.returncode == 0, done.stdout + done.stderr
    before_plot, missing, _ = done.stdout.partition("no plot: ")
    assert verdict in before_plot
    assert missing and "pip install '.[bench]'" in done.stdout
    assert list(tmp_path.glob("*.png")) == []


def test_train_gpt_learns(train_gpt: ModuleType, tmp_path: Path) -> None:
    assert train_gpt.main(["--steps", "20", "--device", "cpu", "--out", str(tmp_path)]) == 0
    losses = json.loads((tmp_path / "train_gpt.json").read_text())["runs"]["flashbwd"]["losses"]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("tolerance", ["LOSS_TOLERANCE", "GRADIENT_TOLERANCE"])
def test_train_gpt_fails_if_an_error_exceeds_its_tolerance(
    tolerance: str, train_gpt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt, tolerance, dict.fromkeys(getattr(train_gpt, tolerance), -1.0))
    assert train_gpt.main(["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert not json.loads((tmp_path / "train_gpt.json").read_text())["agree"]


def scaled_gradient(factor: float) -> Callable[[Tensor], Tensor]:
    """The identity with a gradient that is wrong by a factor."""
    return lambda x: x.detach() + factor * (x - x.detach())


def test_train_gpt_fails_if_a_gradient_is_one_percent_off(
    train_gpt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = train_gpt.flashbwd_operators(torch.device("cpu"))
    wrong = scaled_gradient(1.01)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashbwd.attention(wrong(q), k, v, causal=True)

    operators = train_gpt.Operators(right.name, attention, right.layer_norm)
    monkeypatch.setattr(train_gpt, "flashbwd_operators", lambda device: operators)
    assert train_gpt.main(["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_train_packed_agrees_with_torch_and_writes_its_results(device: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "train_packed.py", "--steps", "3", "--device", device, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "train_packed.json").read_text())
    assert result["agree"] and result["sparsity"] > 50
    assert f"{result['plan']['backend']} backend" in done.stdout
    assert [len(run["losses"]) for run in result["runs"].values()] == [3, 3]
    assert (tmp_path / "train_packed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tolerance", ["LOSS_TOLERANCE", "GRADIENT_TOLERANCE"])
def test_train_packed_fails_if_an_error_exceeds_its_tolerance(
    tolerance: str, train_packed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_packed, tolerance, dict.fromkeys(getattr(train_packed, tolerance), -1.0))
    assert train_packed.main(["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert not json.loads((tmp_path / "train_packed.json").read_text())["agree"]


def test_train_packed_fails_if_a_gradient_is_one_percent_off(
    train_packed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = flashbwd.flex_attention, scaled_gradient(1.01)
    monkeypatch.setattr(flashbwd, "flex_attention", lambda q, k, v, **options: right(wrong(q), k, v, **options))
    assert train_packed.main(["--steps", "1", "--device", "cpu", "--out", str(tmp_path)]) == 1


def test_train_packed_keeps_documents_apart(train_packed: ModuleType) -> None:
    """The mean loss of a batch is the same if each document is computed alone."""
    config = train_packed.CONFIGS["cpu"]
    model = train_packed.build(config, train_packed.flashbwd_method(config), torch.device("cpu"))
    batch = train_packed.pack(train_packed.document_stream(config), config)
    packed, losses = train_packed.loss_of(model, batch), []
    tensors = (batch.ids, batch.targets, batch.documents, batch.positions)
    for row, documents in enumerate(batch.documents):
        for document in documents.unique():
            own = documents == document
            assert torch.equal(batch.positions[row, own], torch.arange(int(own.sum())))
            alone = train_packed.Batch(*(tensor[row : row + 1, own] for tensor in tensors))
            losses += [train_packed.loss_of(model, alone)] * (int(own.sum()) - 1)
    torch.testing.assert_close(packed, torch.stack(losses).mean())


@pytest.mark.parametrize("device", DEVICES)
def test_decode_gives_the_tokens_of_torch_and_plots_its_times(device: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "decode.py", "--steps", "5", "--prompt", "300", "--device", device]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tokens/s") == 2
    assert "Warning" not in done.stderr
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_decode_fails_if_the_tokens_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = load("decode", monkeypatch)
    right = flashbwd.flex_decoding
    monkeypatch.setattr(flashbwd, "flex_decoding", lambda *args, **options: -right(*args, **options))
    assert decode.main(["--steps", "3", "--prompt", "300", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "FAILED: only" in capsys.readouterr().out


def train_distributed(
    parallel: str, device: str, out: Path, count: int, *options: str, steps: int = 3
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += [str(EXAMPLES / "train_distributed.py"), "--parallel", parallel, "--device", device, *options]
    return subprocess.run([*command, "--steps", str(steps), "--out", out], capture_output=True, text=True, check=False)


def result_of(parallel: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"train_distributed_{parallel.replace(',', '_')}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("parallel", "count", "sizes"),
    [
        ("fsdp", 2, {"fsdp": 2, "context": 1, "tensor": 1}),
        ("tensor", 2, {"fsdp": 1, "context": 1, "tensor": 2}),
        ("context", 2, {"fsdp": 1, "context": 2, "tensor": 1}),
        ("tensor,context", 4, {"fsdp": 1, "context": 2, "tensor": 2}),
        ("fsdp,tensor,context", 8, {"fsdp": 2, "context": 2, "tensor": 2}),
    ],
)
def test_train_distributed_agrees_with_one_device(
    parallel: str, count: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    done = train_distributed(parallel, "cpu", tmp_path, count, steps=2)
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(parallel, tmp_path)
    assert result["agree"] and result["devices"] == count and result["sizes"] == sizes
    plots = [path.read_bytes() for path in tmp_path.glob("*.png")]
    assert len(plots) == 1 and plots[0].startswith(b"\x89PNG")
    assert [len(losses) for losses in result["losses"].values()] == [2, 2]


@pytest.mark.parametrize(
    ("parallel", "devices", "sizes"),
    [
        ("context", 8, (1, 8, 1)),
        ("fsdp,tensor,context", 4, (2, 1, 2)),
        ("fsdp,tensor,context", 12, (2, 3, 2)),
        ("fsdp=4,context", 8, (4, 2, 1)),
        ("tensor=1", 1, (1, 1, 1)),
    ],
)
def test_the_devices_are_divided_among_the_axes(
    parallel: str, devices: int, sizes: tuple[int, ...], distributed_example: ModuleType
) -> None:
    assert tuple(distributed_example.axis_sizes(parallel, devices).values()) == sizes


@pytest.mark.parametrize(
    ("parallel", "message"),
    [("fsdp=3", "makes 3 devices, expected 4"), ("pipeline", "'pipeline', expected one of fsdp")],
)
def test_a_split_that_does_not_fit_the_devices_is_an_error(
    parallel: str, message: str, distributed_example: ModuleType
) -> None:
    with pytest.raises(ValueError, match=message):
        distributed_example.axis_sizes(parallel, 4)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("parallel", ["fsdp", "tensor", "context", "fsdp,tensor", "fsdp,context", "tensor,context"])
def test_train_distributed_on_several_gpus_agrees_with_one(parallel: str, count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    done = train_distributed(parallel, "cuda", tmp_path, count)
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(parallel, tmp_path)
    assert result["agree"] and result["devices"] == count
    if parallel == "context":
        layers, steps = result["config"]["layers"], 3
        hits = [stats["hits"] for name, stats in result["overridden"].items() if "attention" in name]
        assert hits == [layers * steps * count]  # the ring has as many steps as devices


@pytest.mark.gpu
@pytest.mark.alone
def test_train_distributed_splits_sequences_over_gpus_by_default(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    done = train_distributed("context", "cuda", tmp_path, 2, "--ring", "flashbwd")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of("context", tmp_path)["ring"] == "flashbwd"


@pytest.mark.parametrize("device", DEVICES)
def test_finetune_transformers_agrees_whatever_computes_the_gradients(device: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    command = [sys.executable, EXAMPLES / "finetune_transformers.py", "--device", device, "--out", tmp_path]
    done = subprocess.run([*command, "--steps", "3", "--lengths", "64,32"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "finetune_transformers.json").read_text())
    runs = ["torch", "flashbwd"] if device == "cpu" else ["torch", "overrides", "flashbwd"]
    assert result["agree"] and list(result["losses"]) == runs
    assert list(result["ablation"]) == ["64", "32"]
    assert all(list(variants) == runs for variants in result["ablation"].values())
    assert (tmp_path / "finetune_transformers.png").read_bytes().startswith(b"\x89PNG")
    if device == "cuda":
        hits = {name: stats["hits"] for name, stats in result["overridden"].items()}
        assert sum(count for name, count in hits.items() if "attention" in name) > 0
