"""scripts/pending_loads.py finds arrivals that overtake loads from shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import pending_loads

ARRIVAL = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x100], RZ"


def line(text: str, *, waits: int = 0, sets: int = pending_loads.NONE) -> tuple[str, int]:
    """An instruction, with the scoreboards that it waits for as bits, and the one that it sets."""
    return text, waits << 52 | sets << 46


def dump(*lines: tuple[str, int]) -> str:
    rows = ["\t\tFunction : _Z6kernelv"]
    for i, (text, control) in enumerate(lines):
        rows.append(f"        /*{16 * i:04x}*/                   {text} ;   /* 0x{0:016x} */")
        rows.append(f"                                              /* 0x{control:016x} */")
    return "\n".join(rows) + "\n"


def found(*lines: tuple[str, int]) -> dict[int, list[int]]:
    (kernel,) = pending_loads.kernels_of(dump(*lines)).values()
    assert [instruction.text for instruction in kernel] == [text for text, _ in lines]
    return pending_loads.pending_loads(kernel)


@pytest.mark.parametrize("load", ["LDS R1, [R2]", "@!P0 LDS.128 R4, [R2]", "LDSM.16.M88.4 R4, [R2]"])
@pytest.mark.parametrize("arrival", [ARRIVAL, f"@P1 {ARRIVAL}", "BAR.ARV 0x6, 0xa0"])
def test_an_arrival_right_after_a_load_is_found(load: str, arrival: str) -> None:
    assert found(line(load, sets=2), line(arrival), line("EXIT")) == {1: [0]}


@pytest.mark.parametrize(
    "between",
    [
        line("FADD R1, R1, R3", waits=0b100),
        line("DEPBAR.LE SB2, 0x0"),
        line("MEMBAR.ALL.CTA"),
        line("FENCE.VIEW.ASYNC.S"),
    ],
    ids=lambda x: x[0],
)
def test_a_wait_or_a_fence_ends_the_load(between: tuple[str, int]) -> None:
    assert found(line("LDS R1, [R2]", sets=2), between, line(ARRIVAL), line("EXIT")) == {}


def test_a_wait_of_the_arrival_itself_counts() -> None:
    assert found(line("LDS R1, [R2]", sets=2), line(ARRIVAL, waits=0b100), line("EXIT")) == {}


@pytest.mark.parametrize("other", [line("FADD R1, R1, R3", waits=0b10), line("DEPBAR.LE SB1, 0x0")], ids=lambda x: x[0])
def test_a_wait_for_another_scoreboard_does_not_end_the_load(other: tuple[str, int]) -> None:
    assert found(line("LDS R1, [R2]", sets=2), other, line(ARRIVAL), line("EXIT")) == {2: [0]}


def test_loads_from_global_memory_and_stores_are_not_meant() -> None:
    assert found(line("LDG.E R1, [R2]", sets=2), line("STS [R2], R1"), line(ARRIVAL), line("EXIT")) == {}


def test_a_load_without_a_scoreboard_ends_with_the_next_one_that_has_one() -> None:
    first, second = line("LDS R1, [R2]"), line("LDS R3, [R2]", sets=0)
    assert found(first, second, line(ARRIVAL), line("EXIT")) == {2: [0, 1]}
    assert found(first, second, line("FADD R1, R1, R3", waits=1), line(ARRIVAL), line("EXIT")) == {}


@pytest.mark.parametrize("branch", ["@P0 BRA 0x30", "BRA.U UP0, 0x30"])
def test_one_path_without_a_wait_is_enough(branch: str) -> None:
    wait = line("FADD R1, R1, R3", waits=1)
    assert found(line("LDS R1, [R2]", sets=0), line(branch), wait, line(ARRIVAL), line("EXIT")) == {3: [0]}


def test_no_path_leads_past_an_unconditional_branch() -> None:
    assert found(line("LDS R1, [R2]", sets=0), line("BRA 0x30"), line(ARRIVAL), line("EXIT")) == {}


def test_a_load_at_the_end_of_a_loop_meets_the_arrival_at_its_start() -> None:
    assert found(line(ARRIVAL), line("LDS R1, [R2]", sets=0), line("@P0 BRA 0x0"), line("EXIT")) == {0: [1]}


def test_the_output_names_each_kernel_with_its_arrivals_and_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dump"
    path.write_text(dump(line("LDS R1, [R2]", sets=2), line(ARRIVAL), line("EXIT")))
    assert pending_loads.main(str(path)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "_Z6kernelv: 3 instructions",
        f"  00010 {ARRIVAL}",
        "    00000 LDS R1, [R2]",
    ]
