"""Writes the figures of the README and the docs from the committed result files, or checks that they match.

Usage: figures.py [--check]

A page has its figures between "<!-- figures: NAME -->" and "<!-- end of figures -->"; BLOCKS defines their contents.
The heading of a row is generated from the cases that the row selects, so it cannot claim more or less than was counted.
Outside of such blocks, README.md and docs/*.md may not contain measured figures. docs/kernels/ and docs/lab/ may,
because they name their runs.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashbwd.bench import cases, results
from flashbwd.bench.cases import CUDNN, EFFICIENT, FLASH, SM80, SM90
from flashbwd.bench.results import COOL, EAGER, SUSTAINED, CaseResult, Ratio
from flashbwd.bench.scale_cases import ONE_FLASHBWD, OURS, RINGS
from scripts import scale_memory
from scripts.loose_figures import loose_figures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

# The newest complete run of each suite. benchmarks/results holds only these runs.
H100 = "nvidia-h100-80gb-hbm3"
H200 = "nvidia-h200"
FILES = {
    "attention": f"{H100}-attention-20261128-204517",
    "attention_features": f"{H100}-attention_features-20261123-101529",
    "attention_h200": f"{H200}-attention-20261130-082417",
    "attention_features_h200": f"{H200}-attention_features-20261129-160508",
    "layer_norm": f"{H100}-layer_norm-20261128-205437",
    "block": f"{H100}-block-20261121-205230",
    "decoding": f"{H100}-decoding-20261121-210638",
    "flex": f"{H200}-flex-20261130-172536",
    "short": f"{H200}-short-20261129-135203",
    "triangle": f"{H200}-triangle-20261129-135431",
    "cpu": "amd-epyc-all-20261129-195421",
    "scale_2": f"{H200}-scale_2-20261129-093028",
    "scale_4": f"{H200}-scale_4-20261128-211048",
}


ATTENTION = ("attention", "attention_features")
ATTENTION_H200 = ("attention_h200", "attention_features_h200")


@functools.lru_cache
def measured(*suites: str) -> tuple[CaseResult, ...]:
    """Return the results of suites."""
    return tuple(result for suite in suites for result in results.load(RESULTS / f"{FILES[suite]}.json").results)


# ---- selecting ------------------------------------------------------------------------------------

# Properties of an attention case unless a row overrides them; ``group`` is the number of query heads per KV head.
PLAIN = {
    "window": None,
    "lengths": None,
    "bias_batch": None,
    "softcap": 0.0,
    "alibi": False,
    "dropout_p": 0.0,
    "dtype": {"bf16", "fp16"},
    "group": 1,
}

MODELS = {1024: "GPT-2 medium", 2048: "Llama 3.2 1B", 4096: "Llama 3 8B"}  # by the width of a block


def value(result: CaseResult, name: str) -> Any:
    if name == "group":
        return result.case["heads"] // result.case["heads_kv"]
    if name == "model":
        return MODELS[result.case["width"]]
    return getattr(result, name) if name in ("table", "name") else result.case[name]


def matches(result: CaseResult, where: dict[str, Any]) -> bool:
    """Return whether a case has the properties ``where``: each is a value, a set of values, or a predicate."""
    for name, wanted in where.items():
        if name not in (*result.case, "group", "table", "name"):
            return False
        has = value(result, name)
        if not (wanted(has) if callable(wanted) else has in wanted if isinstance(wanted, set) else has == wanted):
            return False
    return True


@dataclass(frozen=True)
class Row:
    """A line of a summary: every case of the suites that ``where`` selects and that both peers ran.

    Names of properties in braces in ``heading`` are replaced by the values of that property in the selected cases.
    """

    heading: str
    ours: str
    over: str  # a peer, or ANY_PEER
    over_in_words: str
    where: dict[str, Any] = field(default_factory=dict)
    suites: tuple[str, ...] = ATTENTION

    def selected(self, figure: str = COOL) -> list[tuple[CaseResult, Ratio]]:
        where = PLAIN | self.where if self.suites in (ATTENTION, ATTENTION_H200) else self.where
        chosen = []
        for result in measured(*self.suites):
            over = result.fastest_peer() if self.over == cases.ANY_PEER else self.over
            if over and matches(result, where) and (ratio := result.ratio(self.ours, over, figure)):
                chosen.append((result, ratio))
        if not chosen and figure == COOL:
            raise ValueError(f"flashbwd: no case for the row {self.heading!r}")
        return chosen

    def cells(self, figures: Sequence[str] = (COOL,)) -> list[str]:
        """Return the heading, the peer, the smallest and largest ratio of each figure, and the number of cases."""
        chosen = self.selected()
        heading = re.sub(r"{(\w+)}", lambda name: extent([value(r, name[1]) for r, _ in chosen]), self.heading)
        spans = []
        for figure in figures:
            ratios = [ratio.median for _, ratio in self.selected(figure)]
            fewer = f" ({len(ratios)} of them)" if ratios and len(ratios) < len(chosen) else ""
            spans.append(span(ratios) + fewer if ratios else "-")
        return [heading, self.over_in_words, *spans, str(len(chosen))]


def extent(values: Iterable[Any]) -> str:
    """List up to three values; write more values as "smallest to largest"."""
    distinct = sorted(set(values))
    shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in distinct]
    if len(shown) > 3:
        return f"{shown[0]} to {shown[-1]}"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def span(medians: Sequence[float]) -> str:
    least, most = f"{min(medians):.2f}", f"{max(medians):.2f}"
    return least if least == most else f"{least} to {most}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- what the pages hold --------------------------------------------------------------------------

_MAIN = {64, 128, 256}
_PLAIN_TABLES = {"main", "grouped", "grouped_window", "other", "varlen"}
_DENSE: dict[str, Any] = {"group": lambda group: group >= 1, "window": lambda window: True}
_DROPOUT: dict[str, Any] = {"dropout_p": lambda p: p > 0, "bias_batch": None}
_BIAS: dict[str, Any] = {"bias_batch": lambda batch: batch is not None}
_PACKED: dict[str, Any] = {"lengths": lambda lengths: lengths is not None}
_WINDOW: dict[str, Any] = {"window": lambda window: window is not None}
ORDERED = SM90 + cases.DETERMINISTIC
_IN_WORDS = {
    CUDNN: "cuDNN's backward",
    cases.CUDNN_HEADS_FIRST: "cuDNN's backward",
    FLASH: "FlashAttention-2's backward",
    EFFICIENT: "the memory-efficient backward",
}


def _row(heading: str, ours: str, over: str, **where: Any) -> Row:
    return Row(heading, ours, over, _IN_WORDS.get(over, "the sm80 kernel"), where)


SCALE = ("scale_2", "scale_4")

ATTENTION_ROWS = [
    _row("sm90, D {head_dim}, S {seqlen}", SM90, CUDNN, head_dim=_MAIN),
    _row("sm90, D {head_dim}, S {seqlen}", SM90, CUDNN, head_dim=lambda d: d not in _MAIN),
    _row("sm90, {group} query heads per KV head", SM90, CUDNN, group=lambda g: g > 1),
    _row("sm90, windows of {window} keys", SM90, FLASH, **_WINDOW),
    _row("sm90, windows of {window} keys, {group} query heads per KV head", SM90, FLASH, group=4, **_WINDOW),
    _row("sm90, packed sequences, D {head_dim}", SM90, FLASH, **_PACKED),
    _row("sm90, bias with its gradient, D {head_dim}", SM90, EFFICIENT, **_BIAS),
    _row("sm90, ALiBi (the peer uses a bias without gradient), D {head_dim}", SM90, EFFICIENT, alibi=True),
    _row("sm90, softcap, D {head_dim}", SM90, SM80, softcap=lambda cap: cap > 0),
    _row("sm90, FlashAttention-2's dropout, D {head_dim}", SM90, FLASH, dropout_layout="flash", **_DROPOUT),
    _row("sm90, memory-efficient dropout, D {head_dim}", SM90, EFFICIENT, dropout_layout="efficient", **_DROPOUT),
    _row(
        "sm90, memory-efficient dropout and a bias with its gradient, D {head_dim}",
        SM90,
        EFFICIENT,
        **{**_DROPOUT, **_BIAS},
    ),
    _row("sm90, ALiBi, D {head_dim}", SM90, SM80, alibi=True),
    _row("sm90, dropout with and without a bias, D {head_dim}", SM90, SM80, **{**_DROPOUT, "bias_batch": {None, 4}}),
    Row("sm90 deterministic, dense" , ORDERED, SM90, "the same kernel, non-deterministic", _DENSE),
    Row("sm90 deterministic, packed sequences", ORDERED, SM90, "the same kernel, non-deterministic", _PACKED),
    _row("sm80, D {head_dim}", SM80, FLASH, head_dim=lambda d: d >= 64),
    _row("sm80, D below 64: {head_dim}", SM80, FLASH, head_dim=lambda d: d < 64),
    _row("sm80, {group} query heads per KV head", SM80, FLASH, group=lambda g: g > 1),
    _row("sm80, windows of {window} keys", SM80, FLASH, **_WINDOW),
    _row("sm80, packed sequences, D {head_dim}", SM80, FLASH, **_PACKED),
    _row("sm80, FlashAttention-2's dropout, D {head_dim}", SM80, FLASH, dropout_layout="flash", **_DROPOUT),
    _row("sm80, memory-efficient dropout, D {head_dim}", SM80, EFFICIENT, dropout_layout="efficient", **_DROPOUT),
    _row(
        "sm80, memory-efficient dropout and a bias with its gradient, D {head_dim}",
        SM80,
        EFFICIENT,
        **{**_DROPOUT, **_BIAS},
    ),
    _row("sm80, bias with its gradient, D {head_dim}", SM80, EFFICIENT, **_BIAS),
    _row("sm80, D {head_dim} with Dv {head_dim_v}", SM80, EFFICIENT, head_dim=192, head_dim_v=128),
    _row("sm80, D {head_dim}", SM80, EFFICIENT, head_dim=lambda d: d > 256),
    _row("sm80, {dtype}, D {head_dim}", SM80, EFFICIENT, dtype="fp32"),
]  # fmt: skip
# The kernel is newer than the run on an H100.
ABOVE_256 = _row("sm90, D {head_dim}", SM90, EFFICIENT, head_dim=lambda d: d > 256, group=lambda g: g >= 1)

SUMMARY = [
    *ATTENTION_ROWS,
    *(replace(row, suites=ATTENTION_H200) for row in (*ATTENTION_ROWS, ABOVE_256)),
    *(
        Row(
            f"short, {heading}, D {{head_dim}}, S {{seqlen}}", cases.SHORT, over, words, {"table": "short"} | where,
            ("short",),
        )
        for heading, where in (("no bias", {"bias_batch": None}), ("shared bias with its gradient", {"bias_batch": 1}))
        for over, words in (
            (cases.ANY_PEER, "the fastest of PyTorch's"), (cases.COPY, "a device copy of the same bytes")
        )
    ),
    *(
        Row(
            f"FlexAttention, {words}, D {{head_dim}}, S {{seqlen}}", cases.OURS_FLEX, cases.FLEX,
            "PyTorch's FlexAttention", {"table": "flex", "score": "", "mask": mask}, ("flex",),
        )
        for mask, words in (
            ("causal", "causal"), ("documents", "causal documents"), ("prefix", "prefix LM"),
            ("window", "a window of {window} keys"),
        )
    ),
    Row(
        "FlexAttention, causal with softcap, ALiBi or a relative bias, D {head_dim}", cases.OURS_FLEX, cases.FLEX,
        "PyTorch's FlexAttention", {"table": "flex", "score": lambda score: score != ""}, ("flex",),
    ),
    Row(
        "FlexAttention", cases.OURS_FLEX, cases.PLAIN, "`attention_backward` with the same mask as an argument",
        {"table": "flex"}, ("flex",),
    ),
    Row(
        "FlexAttention, deterministic", cases.OURS_FLEX + cases.DETERMINISTIC, cases.OURS_FLEX,
        "the same kernel, non-deterministic", {"table": "flex"}, ("flex",),
    ),
    Row(
        "triangle attention (a bias that all rows share, with its gradient), D {head_dim}, S {seqlen}", SM90, EFFICIENT,
        "the memory-efficient backward", {"table": "triangle"}, ("triangle",),
    ),
    *(
        Row(heading, cases.NORM, cases.COPY, "a device copy of the same bytes", {"table": tables}, ("layer_norm",))
        for heading, tables in (
            ("LayerNorm and RMSNorm backward, {rows} rows", {"layer_norm", "layer_norm_untuned", "rms_norm"}),
            ("with dropout and residual, {rows} rows", {"layer_norm_dropout"}),
            ("from the output, {rows} rows", {"layer_norm_output"}),
        )
    ),
    Row(
        "LayerNorm backward, {rows} rows",
        cases.NORM,
        cases.ANY_PEER,
        "the fastest of PyTorch, Inductor and Liger",
        {"table": "layer_norm_few_rows"},
        ("layer_norm",),
    ),
    Row("a training step of a block of {model}, eager", cases.BLOCK, cases.TORCH_BLOCK, "PyTorch", {}, ("block",)),
    Row("the same, compiled", cases.BLOCK_COMPILED, cases.TORCH_BLOCK_COMPILED, "PyTorch", {}, ("block",)),
    Row(
        "decoding, {seqlen_q} query", cases.DECODING, cases.SDPA, "PyTorch's SDPA",
        {"table": "decoding", "seqlen_q": 1}, ("decoding",),
    ),
    Row(
        "decoding, {seqlen_q} queries", cases.DECODING, cases.ANY_PEER, "the fastest of PyTorch's",
        {"table": "decoding", "seqlen_q": lambda n: n > 1}, ("decoding",),
    ),
    Row(
        "decoding's backward", cases.DECODING, cases.ANY_PEER, "the fastest of PyTorch's",
        {"table": "decoding_backward"}, ("decoding",),
    ),
    *(
        Row(
            f"a step split over {{devices}} GPUs by {ring}, {{seqlen}} tokens", f"flashbwd {ring}", f"torch {ring}",
            "PyTorch's backward with the same exchange", {"table": "scale"}, SCALE,
        )
        for ring in RINGS
    ),
    *(
        Row(
            f"a step split over {{devices}} GPUs by {peer.removeprefix('flashbwd ')}, {{seqlen}} tokens", peer,
            ONE_FLASHBWD, "one GPU", {"devices": devices}, SCALE,
        )
        for peer in (*(f"flashbwd {ring}" for ring in RINGS), OURS)
        for devices in (2, 4)
    ),
]  # fmt: skip


# The rows of the README: a common training configuration -> the case that was measured for it.
HEADLINE = {
    "full attention, 8192 tokens, head dimension 128": "bf16 B2 S8192 H16 D128 full",
    "the same with a causal mask": "bf16 B2 S8192 H16 D128 causal",
    "causal, 4096 tokens, head dimension 64": "bf16 B4 S4096 H32 D64 causal",
    "packed documents, causal, 32768 tokens in all": "bf16 B29 T32768 varlen H16 D128 causal",
    "sliding window of 4096 keys, GQA": "bf16 B2 S8192 H32:8 D128 window 4096",
    "causal, with a bias and its gradient": "bf16 B4 S2048 H16 D128 causal bias",
}


def headline() -> str:
    """Return a table of each case of HEADLINE with the fastest other kernel that ran it.

    The figures are those of a settled clock if the case has them.
    """
    of_name = {result.name: result for result in measured(*ATTENTION)}
    rows = []
    for words, name in HEADLINE.items():
        result = of_name[name]
        figure = SUSTAINED if result.peers[SM90].has(SUSTAINED) else COOL
        peer = result.fastest_peer(figure)
        assert peer is not None
        kernel = _IN_WORDS[peer].removeprefix("the ").removesuffix("'s backward").removesuffix(" backward")
        rates = [f"{result.rate(which, figure):.0f}" for which in (peer, SM90)]
        rows.append([words, kernel, *rates, f"{result.ratio(SM90, peer, figure).median:.2f}"])  # type: ignore[union-attr]
    return table(["gradient of attention", "best alternative", "its TFLOP/s", "flashbwd, TFLOP/s", "ratio"], rows)


# The order of the columns. The settled clock comes first, because long runs at the power limit have it.
FIGURES = {SUSTAINED: "settled clock", COOL: "short slots", EAGER: "eager, with the host"}


def summary(gpu: str) -> str:
    """Return the rows of SUMMARY that were measured on a GPU, with one column per figure that the runs contain."""
    rows = [row for row in SUMMARY if FILES[row.suites[0]].startswith(gpu)]
    held = [figure for figure in FIGURES if any(row.selected(figure) for row in rows)]
    names = ["speed, as a ratio"] if held == [COOL] else [FIGURES[figure] for figure in held]
    return table(["kernel and cases", "over", *names, "cases"], (row.cells(held) for row in rows))


def missed(gpu: str) -> str:
    """Return every bar that was measured and missed on a GPU."""
    rows = [
        [result.name, bar.ours, bar.over, str(result.verdict(bar).value), f"{bar.at_least:g}"]
        for suite in FILES
        if FILES[suite].startswith(gpu)
        for result in measured(suite)
        for bar in result.bars
        if not bar.goal and result.verdict(bar).passed is False
    ]
    return table(["case", "ratio of", "over", "median (range)", "bar"], rows)


def runs() -> str:
    lines = []
    for stem in FILES.values():
        written = RESULTS / f"{stem}.md"  # written by the run; contains the slot lengths
        run = results.load(written.with_suffix(".json"))
        commit, torch = (run.machine["commit"] or "")[:9], run.machine["torch"]
        how = re.search(r"^\d+ (?:or more )?interleaved rounds.*?(?=; a rate)", written.read_text(), re.MULTILINE)
        if how is None:
            raise ValueError(f"flashbwd: {written.name} does not say how long its slots are")
        file = f"`benchmarks/results/{stem}.md`"
        lines.append(f"- {run.suite}, {run.machine['device']}: {file}, commit {commit}, torch {torch}, {how[0]}")
    return "\n".join(lines)


def times(suite: str) -> str:
    """Return a table of the milliseconds of the fastest peer and of this library."""
    rows = []
    for result in measured(suite):
        peer = result.fastest_peer()
        ours = next(name for name, found in result.peers.items() if name.startswith("flashbwd") and found.timed)
        if peer and (ratio := result.ratio(ours, peer)):
            medians = (result.peers[name].median_ms for name in (peer, ours))
            rows.append([result.name, *(f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in medians), str(ratio)])
    return table(["gradient, or decoding", "PyTorch, ms", "flashbwd, ms", "speedup"], rows)


def every_case(suites: Sequence[str], ours: str, others: Sequence[str], **where: Any) -> str:
    """Return a line per case: the rate of each peer, and the ratio over the first correct peer of ``others``."""
    rows = []
    for result in measured(*suites):
        mine = result.peers.get(ours)
        if not matches(result, where) or mine is None or not mine.timed:
            continue
        timed = [name for name in others if name in result.peers and result.peers[name].timed]
        rates = [f"{result.rate(name):.4g}" if name in timed else "-" for name in others]
        ratios = ((name, result.ratio(ours, name)) for name in timed)
        over = next(([name, str(ratio)] for name, ratio in ratios if ratio), ["-", "-"])
        rows.append([result.name, *rates, f"{result.rate(ours):.4g}", *over])
    unit = next(result.unit for result in measured(*suites) if matches(result, where))
    return table([f"case, {unit} of", *others, ours, "over", "median ratio (range)"], rows)


def scaling(of_table: str) -> str:
    """Return a line per case and peer of a table of the runs on several GPUs."""
    rows = []
    for result in measured(*SCALE):
        if result.table != of_table:
            continue
        devices, seqlen = result.case["devices"], result.case["seqlen"]
        for peer in (*(f"flashbwd {ring}" for ring in RINGS), OURS):
            if (found := result.peers.get(peer)) is None:
                continue
            stock = result.ratio(peer, peer.replace("flashbwd", "torch"))
            alone = result.ratio(peer, ONE_FLASHBWD)
            assert alone is not None
            assert found.extra_bytes is not None
            rows.append(
                [
                    str(devices),
                    f"{seqlen // 1024}k",
                    f"{seqlen // devices // 1024}k",
                    peer.removeprefix("flashbwd "),
                    f"{found.median_ms:.4g}",
                    f"{alone.median / devices:.2f}",
                    "-" if stock is None else f"{stock.median:.2f}",
                    f"{found.extra_bytes / 2**30:.1f}",
                ]
            )
    header = ["GPUs", "tokens", "per GPU", "exchange", "ms", "efficiency", "speed over PyTorch's backward", "GiB"]
    return table(header, rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "summary-h100": lambda: summary(H100),
    "summary-h200": lambda: summary(H200),
    "missed-h100": lambda: missed(H100),
    "missed-h200": lambda: missed(H200),
    "runs": runs,
    "cpu": lambda: times("cpu"),
    "scale": lambda: scaling("scale"),
    "scale-packed": lambda: scaling("scale_packed"),
    "scale-memory": lambda: table(scale_memory.HEADER, scale_memory.rows_of_table()),
    "blocks": lambda: table(
        ["training step", "over", "speed, as a ratio", "cases"],
        (
            Row(f"{{model}}, S {{seqlen}}, {how}", ours, over, "PyTorch", {"name": result.name}, ("block",)).cells()
            for result in measured("block")
            for how, ours, over in (
                ("eager", cases.BLOCK, cases.TORCH_BLOCK),
                ("compiled", cases.BLOCK_COMPILED, cases.TORCH_BLOCK_COMPILED),
            )
        ),
    ),
    "sm90": lambda: every_case(ATTENTION, SM90, [CUDNN, FLASH, EFFICIENT, SM80, ORDERED], table=_PLAIN_TABLES),
    "sm90-flash-dropout": lambda: every_case(
        ATTENTION, SM90, [FLASH, CUDNN, SM80], table="dropout", dropout_layout="flash"
    ),
    "sm90-efficient-dropout": lambda: every_case(
        ATTENTION, SM90, [EFFICIENT, CUDNN, SM80], table="dropout", dropout_layout="efficient"
    ),
    "sm90-scores": lambda: every_case(ATTENTION, SM90, [EFFICIENT, SM80], table={"bias", "scores"}),
    "sm80": lambda: every_case(ATTENTION, SM80, [FLASH, EFFICIENT, SM80 + cases.DETERMINISTIC]),
    "short": lambda: every_case(["short"], cases.SHORT, [CUDNN, EFFICIENT, FLASH, cases.COPY, SM90, SM80]),
    "triangle": lambda: every_case(["triangle"], SM90, [EFFICIENT, SM80, ORDERED]),
    "flex": lambda: every_case(
        ["flex"], cases.OURS_FLEX, [cases.FLEX, cases.FLEX_TUNED, cases.OURS_FLEX + cases.DETERMINISTIC, cases.PLAIN]
    ),
    "layer-norm": lambda: every_case(["layer_norm"], cases.NORM, [cases.COPY, "torch native", "Inductor", "Liger"]),
    "decoding": lambda: every_case(
        ["decoding"], cases.DECODING, [cases.SDPA, "flex", "flex max-autotune", *cases.DECODING_FORMS]
    ),
    "reference": lambda: every_case(["cpu"], cases.REFERENCE, [cases.CPU_FLASH, "torch math"], table="cpu"),
}

# ---- pages ----------------------------------------------------------------------------------------

EXPERIMENTS = {"kernels", "lab"}  # folders of docs in which measured figures are allowed everywhere


def rendered(text: str) -> str:
    """Return the text of a page with the figures of the result files."""

    def block(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise ValueError(f"flashbwd: no figures named {match[2]!r}; there are {', '.join(BLOCKS)}")
        return f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}"

    return MARKER.sub(block, text)


def problems_of(page: Path, text: str) -> list[str]:
    name = str(page.relative_to(ROOT))
    diff = list(difflib.unified_diff(text.splitlines(), rendered(text).splitlines(), name, "results", n=0, lineterm=""))
    if page.parent.name not in EXPERIMENTS:
        diff += [
            f"{name}: {figure!r} stands outside of the generated figures" for figure in loose_figures(text, MARKER)
        ]
    return diff


def main() -> None:
    if "--check" in sys.argv[1:]:
        if problems := [line for page in PAGES for line in problems_of(page, page.read_text())]:
            sys.exit("\n".join([*problems, "python scripts/figures.py writes the blocks from the result files"]))
        return
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
