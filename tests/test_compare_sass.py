"""scripts/compare_sass.py finds the differences of two dumps of machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import compare_sass


def dump(*instructions: str, symbol: str = "_Z6kernelv") -> str:
    lines = [f"\t\tFunction : {symbol}"]
    lines += [
        f"        /*{16 * i:04x}*/                   {text} ;   /* 0x0{i} */" for i, text in enumerate(instructions)
    ]
    return "\n".join(lines) + "\n"


def test_symbols_and_addresses_are_ignored() -> None:
    one = compare_sass.kernels_of(dump("MOV R1, R2", "EXIT"))
    other = compare_sass.kernels_of(dump("MOV R1,   R2", "EXIT", symbol="_Z7renamedv"))
    assert one == other == [["MOV R1, R2", "EXIT"]]


def test_a_different_register_is_no_difference_of_opcodes() -> None:
    fits, words = compare_sass.compare(["@P0 MOV R1, R2"], ["@P1 MOV.64 R1, R3"])
    assert fits
    assert "1 differ: the same opcodes" in words


def test_a_different_opcode_is_reported_with_its_counts() -> None:
    fits, words = compare_sass.compare(["LDS R1, [R2]", "EXIT"], ["LDS R1, [R2]", "LDS R3, [R2]", "EXIT"])
    assert not fits
    assert "LDS 1 -> 2" in words


def test_a_missing_kernel_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(dump("EXIT") + dump("EXIT"))
    after.write_text(dump("EXIT"))
    assert compare_sass.main(str(before), str(after)) == 1
    assert "2 kernels before, 1 after" in capsys.readouterr().out
