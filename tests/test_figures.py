"""The figures of the pages are those of the result files, and a row counts all cases of its heading."""

from __future__ import annotations

import copy
import json
import re
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed package goes before the one of the tree

from flashbwd.bench import results  # noqa: E402
from scripts import figures  # noqa: E402

README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_of_a_page_are_those_of_the_result_files(page):
    assert figures.problems_of(page, page.read_text()) == []


@pytest.mark.parametrize(("figure", "wrong"), [("1.15 to 1.94", "3.15 to 9.94"), ("| 38 |", "| 36 |")])
def test_another_figure_in_a_block_is_a_problem(figure, wrong):
    text = BENCHMARKS.read_text()
    assert figure in text
    assert any(wrong in line for line in figures.problems_of(BENCHMARKS, text.replace(figure, wrong)))


def test_another_speedup_on_a_cpu_is_a_problem():
    changed = re.sub(r"(layer norm fp32 N768 .* )[\d.]+( \()", r"\g<1>77.7\2", BENCHMARKS.read_text())
    assert any("77.7" in line for line in figures.problems_of(BENCHMARKS, changed))


@pytest.mark.parametrize(
    "sentence",
    [
        "It is 3.16 to 9.70 times as fast.",
        "A call takes 5 us.",
        "It reaches 720 TFLOP/s.",
        "A step is 8 % faster.",
        "| D 64 | 1.25 |",
    ],
)
def test_a_figure_outside_of_the_blocks_is_a_problem(sentence):
    text = README.read_text().replace("## What it supports", f"{sentence}\n\n## What it supports")
    assert any("stands outside" in line for line in figures.problems_of(README, text))


def test_versions_and_code_are_no_figures():
    text = "Python 3.10 to 3.13 with torch 2.10, 2.11, `scale=0.88`, cases of 8192 tokens."
    assert figures.loose_figures(text, figures.MARKER) == []


def test_a_row_of_the_readme_has_the_fastest_other_kernel():
    case_of_row = "bf16 B2 S8192 H16 D128 causal"  # with a settled clock
    rates = {}
    for case in json.loads((ROOT / "benchmarks" / "results" / f"{figures.FILES['attention']}.json").read_text())[
        "results"
    ]:
        if case["name"] == case_of_row:
            timed = {name: peer for name, peer in case["peers"].items() if peer["sustained_ms"] and "torch" in name}
            rates = {n: p["work"] / statistics.median(p["sustained_ms"]) for n, p in timed.items()}
    fastest = max(rates, key=rates.__getitem__)
    assert fastest.startswith("torch cuDNN")
    rows = [line.split(" | ") for line in figures.headline().splitlines()[2:]]
    assert len(rows) == 6
    assert rows[1][1:3] == ["cuDNN", f"{rates[fastest] / 1e9:.0f}"]
    assert all(float(row[4].rstrip(" |")) == pytest.approx(int(row[3]) / int(row[2]), rel=0.05) for row in rows)


def test_a_block_without_a_name_that_is_known_is_refused():
    with pytest.raises(ValueError, match="no figures named 'speed'"):
        figures.rendered("<!-- figures: speed -->\n<!-- end of figures -->")


def raw_ratios(stem: str, ours: str, over: str) -> dict[str, float]:
    """Median ratios of a result file by case, without the library's reading of it."""
    found = {}
    for case in json.loads((ROOT / "benchmarks" / "results" / f"{stem}.json").read_text())["results"]:
        a, b = (case["peers"].get(name) for name in (ours, over))
        if a and b and a["times_ms"] and b["times_ms"]:
            rates = ((a["work"] / x) / (b["work"] / y) for x, y in zip(a["times_ms"], b["times_ms"], strict=True))
            found[case["name"]] = statistics.median(rates)
    return found


def test_a_row_has_the_least_and_the_greatest_of_its_heading():
    """The row of sm80 has D 96, full, the least of D 64 to 256."""
    ratios = {
        name: ratio
        for suite in figures.ATTENTION
        for name, ratio in raw_ratios(figures.FILES[suite], "flashbwd sm80", "torch flash").items()
    }
    plain = re.compile(r"(bf16|fp16) B\d+ S\d+ H\d+ D(64|80|96|112|128|160|192|256) (full|causal)")
    counted = [ratio for name, ratio in ratios.items() if plain.fullmatch(name)]
    assert f"{min(counted):.2f}" == f"{ratios['bf16 B4 S4096 H16 D96 full']:.2f}"
    span = f"{min(counted):.2f} to {max(counted):.2f}"
    row = next(line for line in BENCHMARKS.read_text().splitlines() if line.startswith("| sm80, D 64 to 256 |"))
    header = next(line for line in BENCHMARKS.read_text().splitlines() if line.startswith("| kernel and cases |"))
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert (cells["short slots"], cells["cases |"]) == (span, f"{len(counted)} |")


def test_a_row_of_blocks_has_every_model():
    over = ("torch eager", "flashbwd eager"), ("torch compiled", "flashbwd compiled")
    for how, (theirs, ours) in zip(("eager", "compiled"), over, strict=True):
        ratios = raw_ratios(figures.FILES["block"], ours, theirs)
        assert len(ratios) == 3
        shown = next(line for line in BENCHMARKS.read_text().splitlines() if f"{how} | PyTorch |" in line)
        assert f"| {min(ratios.values()):.2f} to {max(ratios.values()):.2f} |" in shown
        assert shown.endswith("| 3 |")


def test_every_case_with_a_bar_over_a_peer_is_counted_by_a_row_of_the_summary():
    counted = {
        (suite, row.ours, result.name)
        for row in figures.SUMMARY
        for suite in row.suites
        for result, _ in row.selected()
    }
    for suite in figures.FILES.keys() - {"cpu"}:
        for result in figures.measured(suite):
            for bar in result.bars:
                if result.verdict(bar).passed is not None and bar.over != result.unit:
                    assert (suite, bar.ours, result.name) in counted, (result.name, bar)


def test_figures_of_a_settled_clock_come_first(monkeypatch):
    rows = [row for row in figures.SUMMARY if row.suites == ("decoding",)]
    monkeypatch.setattr(figures, "SUMMARY", rows)
    results = copy.deepcopy(figures.measured("decoding"))
    for result in results:
        for name, peer in result.peers.items():
            peer.sustained_ms = [2.0 if name == "flashbwd decoding" else 3.0]
    few = results[0].peers.values()
    for peer in few:
        peer.eager_ms = [5.0]
    monkeypatch.setattr(figures, "measured", lambda *suites: results)
    header, _, first, *_ = figures.summary(figures.H100).splitlines()
    assert header == "| kernel and cases | over | settled clock | short slots | eager, with the host | cases |"
    assert first == "| decoding, 1 query | PyTorch's SDPA | 1.50 | 1.00 to 1.06 | 1.00 (1 of them) | 8 |"


def test_every_missed_bar_is_listed():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    missed = [
        f"| {result.name} | {bar.ours} | {bar.over} |"
        for suite in figures.FILES
        for result in figures.measured(suite)
        for bar in result.bars
        if result.verdict(bar).passed is False and not bar.goal
    ]
    assert len(missed) > 10
    assert all(line in page for line in missed)


def test_the_committed_results_are_one_complete_run_per_suite_and_device():
    files = sorted(path.stem for path in figures.RESULTS.glob("*.json"))
    assert files == sorted(figures.FILES.values())
    runs = [results.load(figures.RESULTS / f"{stem}.json") for stem in files]
    assert all(run.complete for run in runs)
    assert len({(run.suite, run.machine["device"], run.machine.get("devices", 1)) for run in runs}) == len(runs)
    extra = [path.name for path in figures.RESULTS.iterdir() if not path.name.startswith(tuple(files))]
    assert extra == []


def test_a_case_without_a_property_that_is_asked_for_does_not_match():
    result = figures.measured("layer_norm")[0]
    assert "softcap" not in result.case
    assert not figures.matches(result, {"softcap": lambda softcap: True})


@pytest.mark.parametrize(("wanted", "has"), [(4096, True), (4095, False), ({4096, 1}, True), ({1}, False)])
def test_a_case_matches_one_value_or_one_of_a_set(wanted, has):
    result = next(r for r in figures.measured("attention") if r.case["seqlen"] == 4096)
    assert figures.matches(result, {"seqlen": wanted}) is has


@pytest.mark.parametrize(
    ("start", "name", "taken", "others"),
    [
        ("sm90, {group} query heads", "group", [2, 4, 8], [1]),
        ("sm80, {group} query heads", "group", [2, 4, 8], [1]),
        ("sm90, softcap", "softcap", [0.5, 1.0, 30.0], [0.0]),
        ("sm90, FlashAttention-2's dropout", "dropout_p", [0.1, 0.5], [0.0]),
        ("sm80, memory-efficient dropout,", "dropout_p", [0.1, 0.5], [0.0]),
        ("sm90, windows", "window", [1, 4096], [None]),
        ("sm80, windows", "window", [1, 4096], [None]),
        ("sm90, packed", "lengths", [[1, 2]], [None]),
        ("sm80, packed", "lengths", [[1, 2]], [None]),
        ("sm90, bias", "bias_batch", [1, 4], [None]),
        ("sm80, bias", "bias_batch", [1, 4], [None]),
        ("sm80, D below 64", "head_dim", [32, 63], [64, 128]),
        ("decoding, {seqlen_q} queries", "seqlen_q", [2, 16], [1]),
    ],
)
def test_a_row_takes_every_value_of_its_feature_and_no_case_without_it(start, name, taken, others):
    rows = [row for row in figures.SUMMARY if row.heading.startswith(start)]
    assert rows
    for row in rows:
        if callable(wanted := row.where[name]):
            assert all(wanted(value) for value in taken), row
            assert not any(wanted(value) for value in others), row


def test_the_rows_of_dense_sm80_take_every_head_dimension_from_64_on_or_beyond_256():
    of_flash, of_efficient = (
        row.where["head_dim"]
        for row in figures.ATTENTION_ROWS
        if row.heading == "sm80, D {head_dim}" and row.ours == figures.SM80
    )
    dims = (63, 64, 65, 256, 257, 264)
    assert [of_flash(dim) for dim in dims] == [False, True, True, True, True, True]
    assert [of_efficient(dim) for dim in dims] == [False, False, False, False, True, True]


def test_a_table_of_every_case_leaves_out_cases_that_this_library_did_not_run(monkeypatch):
    one, two, three = copy.deepcopy(figures.measured("layer_norm")[:3])
    del one.peers[figures.cases.NORM]
    two.peers[figures.cases.NORM].times_ms = []
    monkeypatch.setattr(figures, "measured", lambda *suites: (one, two, three))
    _, _, *rows = figures.every_case(["layer_norm"], figures.cases.NORM, ["torch native"]).splitlines()
    assert [row.split(" |")[0] for row in rows] == [f"| {three.name}"]


def test_a_peer_that_did_not_run_a_case_has_no_rate_and_no_ratio(monkeypatch):
    (one,) = copy.deepcopy(figures.measured("layer_norm")[:1])
    del one.peers["torch native"]
    monkeypatch.setattr(figures, "measured", lambda *suites: (one,))
    _, _, row = figures.every_case(["layer_norm"], figures.cases.NORM, ["torch native"]).splitlines()
    assert re.fullmatch(rf"\| {re.escape(one.name)} \| - \| \S+ \| - \| - \|", row)


@pytest.mark.parametrize(("ms", "shown"), [(0.12345, "0.123"), (9.876, "9.88"), (99.4, "99.4"), (1234.0, "1234")])
def test_a_time_has_three_digits_and_never_an_exponent(monkeypatch, ms, shown):
    (one,) = copy.deepcopy(figures.measured("cpu")[:1])
    peer = one.fastest_peer()
    ours = next(name for name, found in one.peers.items() if name.startswith("flashbwd") and found.timed)
    one.peers[peer].times_ms, one.peers[ours].times_ms = [4 * ms] * 5, [ms] * 5
    one.peers[peer].work = one.peers[ours].work = 1e9
    one.peers = {name: one.peers[name] for name in (peer, ours)}
    monkeypatch.setattr(figures, "measured", lambda *suites: (one,))
    row = figures.times("cpu").splitlines()[2]
    assert row.split(" | ")[2:] == [shown, "4 |"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([3], "3"),
        ([2, 1, 2], "1 and 2"),
        ([3, 1, 2], "1, 2 and 3"),
        ([4, 3, 1, 2], "1 to 4"),
        ([0.5, 30.0], "0.5 and 30"),
    ],
)
def test_values_of_a_heading_stand_for_themselves_up_to_three(values, shown):
    assert figures.extent(values) == shown


@pytest.mark.parametrize(("medians", "shown"), [([1.234, 1.231], "1.23"), ([2.0, 1.5, 1.75], "1.50 to 2.00")])
def test_a_span_has_two_ends_where_they_differ(medians, shown):
    assert figures.span(medians) == shown


@pytest.fixture
def page(monkeypatch, tmp_path) -> Path:
    """A page whose block is not that of the result files, the only page."""
    path = tmp_path / "docs" / "page.md"
    path.parent.mkdir()
    path.write_text("<!-- figures: two -->\nold\n<!-- end of figures -->\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PAGES", [path])
    monkeypatch.setitem(figures.BLOCKS, "two", lambda: "new")
    return path


def test_without_check_the_blocks_are_written(page, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    figures.main()
    assert page.read_text() == "<!-- figures: two -->\n\nnew\n\n<!-- end of figures -->\n"


def test_the_check_names_what_differs_and_writes_nothing(page, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    before = page.read_text()
    with pytest.raises(SystemExit, match=r"-old\n\+\n\+new"):
        figures.main()
    assert page.read_text() == before
    shown = figures.problems_of(page, before)
    assert [line for line in shown if not line.startswith(("---", "+++", "@@"))] == ["-old", "+", "+new", "+"]


def test_the_check_passes_what_was_written(page, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    figures.main()
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    figures.main()


def test_a_page_of_a_kernel_may_hold_figures_that_name_their_run(page, monkeypatch):
    text = "It takes 5 us.\n"
    kernels = page.parent / "kernels" / "page.md"
    assert [len(figures.problems_of(path, text)) for path in (page, kernels)] == [1, 0]
