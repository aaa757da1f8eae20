"""Names of others are text in every medium: no markup, no formula, no escape sequence, and no word of them lost."""

import csv
import html
import io
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fixtures import SETTINGS, arm, block, random_row, settings
from matplotlib import pyplot as plt
from test_files import no_figures  # noqa: F401
from test_report import measure

from specbench.common.errors import SpecBenchError, one_line, visible
from specbench.config import cli, sweep
from specbench.records import metrics
from specbench.records.blocks import NAME
from specbench.records.metrics import RATES, sum_rows
from specbench.records.rows import CellFailure, Failure, Row
from specbench.records.statistics import Interval, contrast, interval, macro
from specbench.reporting import bundle, cells, charts, console, figures, study_figures, tables, text
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.names import labelled

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "pipe": "a|b\\|c\\",
    "ticks": "`code` ``` $x$",
    "lines": "a\nb\r\n\n| c |",
    "link": "[x](http://e.vil) ![y](z) <http://e.vil> [r][s]",
    "emphasis": "*a* **b** _c_ __d__ ~~e~~",
    "markup": "[/bold] [red]x[/red] [link=x] :smile:",
    "escapes": "\x1b[2J\x1b]0;owned\x07 \x9b31m \x7f\x00",
    "bidi": "abc\u202edef\u2066x\u2069\u200f",
    "separators": "a\u2028b\u2029c\x85d",
    "formula": "$\\frac{x$ $x^2$ \\$ $$",
    "latex": "[5pt] \\input{x} 100% #1 {~^_&",
    "star": "*[0]",
    "hidden": "_hidden",
    "entity": "&lt;b&gt; &#60; & <",
    "half": "\ud800",
    "long": "long" * 400,
    "empty": "",
    "sum": '=HYPERLINK("http://e.vil","x")',
    "at": "@SUM(1+1)",
    "plus": "+1+1",
    "minus": "-1+1|' /C calc'!A0",
    "wide": "＝1+1",
}
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
each = pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)


def test_control_characters_are_shown_once():
    assert visible("\x1b[2J\n\u202e\ud800é→") == "\\x1b[2J\\n\\u202e\\ud800é→"
    assert visible(visible("\x1b")) == visible("\x1b")
    assert one_line(SpecBenchError("no\n  weights at \x1b[2J")) == "no weights at \\x1b[2J"


def test_what_a_command_complains_of_moves_no_cursor(capsys):
    @cli.handle_errors
    def job():
        raise SpecBenchError("drafter=\x1b]0;owned\x07")

    with pytest.raises(SystemExit):
        job()
    assert capsys.readouterr().err == "specbench: drafter=\\x1b]0;owned\\x07\n"


@each
def test_a_terminal_gets_the_name_itself(name):
    printed = console.table([None], [(name, lambda _: name)], 10000)
    assert not any(CONTROL.search(line) for line in printed)
    assert all(visible(name).rstrip() in line for line in printed)


def plain(markdown: str) -> str:
    """What GitHub shows of inline Markdown that has character references and no marks."""
    return html.unescape(markdown)


@each
def test_markdown_keeps_cells_and_says_the_name(name):
    table = tables.markdown_table([name, "b"], [["c", name]])
    lines = table.split("\n")
    assert len(lines) == 3 and all(line.count("|") == 3 for line in lines)
    cell = lines[2].split("|")[2][1:-1]
    assert plain(cell) == visible(name)
    assert not CONTROL.search(cell) and "`" not in cell and "$" not in cell
    assert not re.search(r"<[\w/!?]|\]\(|\]\[|\*\S|\S\*|~~|(?<!\w)_|_(?!\w)", cell), cell
    assert not re.search(r"\\[!-/:-@\[-`{-~]", cell.replace("\\x", "").replace("\\u", "")), "an escape of Markdown's own"


@pytest.mark.parametrize("word", ["eagle2_small", "1.09 [1.05, 1.14]", "a > b < c", "50%/49%", "tau: x & y", "2 * 3"])
def test_what_is_no_mark_stays_readable(word):
    assert text.markdown(word) == word


@each
def test_html_is_escaped_once(name):
    escaped = str(text.html(name))
    assert html.unescape(escaped) == visible(name) and not re.search("[<>\"']", escaped)
    assert text.html(text.html(name)) == escaped


@each
def test_latex_has_no_command_or_argument_of_a_name(name):
    escaped = text.latex(name)
    assert not CONTROL.search(escaped) and not escaped.startswith(("[", "*"))
    known = r"\\(?:[&%$#_{}]|textbackslash |textasciitilde |textasciicircum |textbar )"
    assert not re.search(r"[\\&%$#_~^|]", re.sub(known, "", escaped))
    back = re.sub(r"^\{([\[*])\}", r"\1", escaped)
    for sign, replacement in text._LATEX.items():
        back = back.replace(replacement, sign) if replacement.startswith("\\text") and sign != "\\" else back
    back = re.sub(r"\\([&%$#_{}])", r"\1", back).replace("\\textbackslash ", "\\")
    assert back == visible(name)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine (Debian: texlive-latex-base)")
def test_latex_tables_of_hostile_names_compile(tmp_path):
    lines = [[name[:60].encode("ascii", "replace").decode()] for name in HOSTILE.values()]
    body = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n%s\\end{document}\n"
    (tmp_path / "x.tex").write_text(body % text.latex_table([["name"]], lines))
    done = subprocess.run(["pdflatex", "-halt-on-error", "x.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@each
def test_csv_has_no_formula_and_says_the_name(name):
    ((heading, cell),) = csv.reader(io.StringIO(text.csv_table([[name, name]]), newline=""))
    assert heading == cell and cell.removeprefix("'") == visible(name) and not cell.startswith(("=", "+", "-", "@", "＝"))


@pytest.mark.parametrize(
    "number", ["-", "-0.01 [-0.11, 0.06]", "+0.12", "- (0.79)", "-1,234.5", "-3%", "1.73 [1.64, 1.81]"]
)
def test_numbers_in_csv_stay_numbers(number):
    assert text.csv_cell(number) == number


def test_equal_headings_side_by_side_span_their_columns():
    made = text.latex_table([["", "a", "a", "", ""], ["", "b", "c", "d", "e"]], [["1", "2", "3", "4", "5"]])
    assert made.split("\n")[2:6] == [
        r" & \multicolumn{2}{r}{a} &  &  \\", r" & b & c & d & e \\", r"\midrule", r"1 & 2 & 3 & 4 & 5 \\",
    ]  # fmt: skip


# Whole reports ---------------------------------------------------------------------------------------------------------


def fill(folder, names, dataset="mtbench", model="m"):
    """Cells whose drafter, dataset, model, category, question and error are hostile."""
    rng = np.random.default_rng(0)
    for i, name in enumerate(names):
        header = settings(name, dataset=dataset)
        header["config"] = {**header["config"], "model": {"name": model}}
        header["arms"][name]["drafter"]["growth"] = {"_target_": "specbench.engine.policies.Chain", "gamma": 4}
        header["target"]["fingerprint"] = model  # of another target than plain `settings`: the two are not pooled
        cell = block(folder, header, f"mtbench-x-{i}")
        for q in range(2):
            for who in ("none", name):
                row = random_row(rng, who, f"{name}{q}")[0]
                row.category = name
                cell.write(row)
        cell.write(Failure(name, "lost", 0, name))


def hostile_names():
    return [name for key, name in HOSTILE.items() if key != "half"]  # JSON cannot say half a pair, and is refused


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
def test_figures_with_hostile_names_are_drawn(tmp_path):
    names = hostile_names()
    fill(tmp_path, names, "$\\frac{d$", "$\\sqrt{m$")
    fill(tmp_path / "second", ["b-chain"], "_$^$", "$\\sqrt{m$")
    found = Report(Sources(tmp_path))
    measure(tmp_path / "costs", names)
    costs = cells.collect((tmp_path / "costs").rglob(NAME))
    assert {e.name for e in costs} == {"none", *names}
    weights = {n: {"history": [{"tokens": 9, "chain_tau": 1.5, "n_alpha": [0.4]}]} for n in names}
    series = [charts.Series(name, [(0, Interval(1.0, 0.5, 1.5))], printed=[(0, 2.0)]) for name in names]
    shapes = ("lines", "bars", "stack", "grid")
    hostile = charts.Chart([charts.Panel("x", "y", series, names[0], shape, names[:1]) for shape in shapes])
    for figure in (
        figures.speed_up_bars(found.main),
        figures.step_alphas(found.main),
        figures.cost_against_tau(found.main),
        study_figures.tree_cost(costs),
        charts.draw(hostile),
        study_figures.learning_curves(weights),
    ):
        assert figure is not None
        figure.savefig(tmp_path / "x.svg")
        plt.close(figure)
        assert (tmp_path / "x.svg").stat().st_size > 2000
    assert [text.mathtext(name) for name in ("_a", "$b$")] == [" _a", "\\$b\\$"]


def test_a_report_of_hostile_names_shows_them_and_runs_nothing(tmp_path, no_figures, capsys):  # noqa: F811
    names = hostile_names()
    fill(tmp_path, names, HOSTILE["lines"], HOSTILE["link"])
    failure = CellFailure(HOSTILE["markup"], HOSTILE["pipe"], HOSTILE["escapes"], 0.0, HOSTILE["script"])
    failure.write(CellFailure.path(tmp_path, "x", {}))
    found = Report(Sources(tmp_path))
    page, readme = found.write().read_text(), (tmp_path / "README.md").read_text()
    console.lines(found.main, 400)
    for content in (page, readme):
        assert "\\x1b[2J" in content
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert well_formed(tmp_path) > 5, "tables are missing, or broken up"
    files = [tmp_path / "tables" / "decoding.csv", *(tmp_path / "tables").glob("run-*.csv")]
    written = [line for file in files for line in csv.DictReader(io.StringIO(file.read_text(), newline=""))]
    assert {text.csv_cell(n + " · chain (1 FAILED)") for n in names} <= {line["drafter"] for line in written}
    assert not CONTROL.search((tmp_path / "tables" / "decoding.tex").read_text())


def well_formed(results: Path) -> int:
    """The number of tables in a report's Markdown, after a check of its files."""
    page = (results / "report.html").read_text()
    assert page.count("<script") == 1 and "&amp;lt;script" not in page, "escaped twice"
    pages = [path.read_text() for path in (*results.glob("*.md"), *(results / "tables").glob("*.md"))]
    for content in (page, *pages):
        assert not CONTROL.search(content.split('<script nonce="specbench">')[0]) and "<script>alert" not in content
    shown = [part.strip("\n").split("\n") for text in pages for part in text.split("\n\n") if part.startswith("| ")]
    for heading, rule, *lines in shown:
        columns = heading.count("|") - 1
        assert rule == "|---" * columns + "|" and all(line.count("|") - 1 == columns for line in lines), heading
    return len(shown)


def test_a_report_of_hostile_folders_shows_them(tmp_path, no_figures):  # noqa: F811
    """Among them studies whose names differ only in what a file name cannot hold."""
    names = [name.replace("/", "!").replace("\0", "?")[:60] for name in hostile_names() if name]
    for i, name in enumerate(names):
        header = settings(f"a{i % 2}", dataset="mtbench", study=(name, "one/two", "one|two", "日本", "中国")[i % 5])
        cell = block(tmp_path / name, header, name)
        for who in ("none", f"a{i % 2}"):
            cell.write(random_row(np.random.default_rng(i), who, "0")[0])
    (cell.path.parent / "x.failed.json").write_text("{")
    found = Report(Sources(tmp_path))
    found.write()
    assert well_formed(tmp_path) > len(names) and len(found.problems) == 1
    studies = {e.study for e in found.rest}
    assert {"one/two", "one|two", "日本", "中国"} <= studies
    assert len(list((tmp_path / "tables").glob("study-*.md"))) == len(studies), "two studies in one file"


def test_names_from_rows_do_not_become_paths(tmp_path):
    for place in ("secret/x", "weights/m/y"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "provenance.json").write_text("{")
    for i, model in enumerate(("../secret", "/", "a\0b", "m" * 5000, "m")):
        fill(tmp_path / str(i), ["eagle2"], model=model)
        problems: list[str] = []
        bundle._weights(tmp_path / "weights", cells.find(tmp_path / str(i)).entries, problems)
        assert len(problems) == (model == "m")


def test_a_sweeps_end_survives_damaged_failures_and_hostile_names(tmp_path, monkeypatch, capsys):
    from omegaconf import OmegaConf

    CellFailure("m", "d", "\x1b[2J", 0.0, "boom\u202e").write(tmp_path / "a.failed.json")
    (tmp_path / "b.failed.json").write_text("[")
    monkeypatch.setenv(sweep.BEGUN, "0")
    monkeypatch.setenv(sweep.CELLS, "3")
    monkeypatch.setenv(sweep.NOTES, str(tmp_path / "notes"))
    (tmp_path / "notes").write_text(sweep.COMPLETE + "\n")
    with pytest.raises(SystemExit) as ended:
        sweep.Sweep(show=lambda *_: None).on_multirun_end(OmegaConf.create({"results": str(tmp_path)}))
    assert ended.value.code == 2
    first, second, last, failed = capsys.readouterr().err.splitlines()
    assert first == "FAILED \\x1b[2J on d (m): boom\\u202e"
    assert second.startswith(f"FAILED a cell: {tmp_path / 'b.failed.json'}: not JSON") and "sweep: 1 of 3" in last
    assert failed.startswith("specbench: 2 cells failed")


# Cells without a number --------------------------------------------------------------------------------------------


def one_token(who, question):
    """With max_new_tokens=1 an answer is the prefill's token; decoding still takes a moment."""
    return Row(who, question, "c", 0, 5, [1], 0.5, 1e-6)


def test_without_cycles_every_number_is_absent():
    rows, base = [one_token("eagle2", str(i)) for i in range(3)], [one_token("none", str(i)) for i in range(3)]
    for mine in (rows, []):
        summary = metrics.summarise(SETTINGS, arm(), "eagle2", mine, base)
        assert summary.speed_up is None and summary.tau_interval is None and summary.alphas == ()
        for value in (summary.tau, summary.tau_macro, summary.speed, summary.expected, summary.nodes):
            assert np.isnan(value)
        totals = sum_rows(mine, base)
        for name in ("tau", "tokens_per_s", "speed_up", "alpha", "alpha0", "late_alpha", "draft_ms"):
            assert interval(RATES[name], totals) is None, name
            assert contrast(RATES[name], totals, totals) is None, name
            assert np.isnan(macro(RATES[name], totals))


def test_cells_without_cycles_are_shown_as_absent_and_leave_the_others_alone(tmp_path, capsys, no_figures):  # noqa: F811
    fill(tmp_path, ["eagle2", "vanilla"])
    columns = [make for heading, make in console.main_columns(wide=True) if heading != "output"]

    def shown(e):
        return [make(e) for make in columns]

    before = [shown(e) for e in labelled(cells.find(tmp_path).entries)]
    absent = {
        "one-chain": 6,
        "failures-chain": 6,
        "zeros-chain": 3,
    }  # of six numbers; the last one has cycles and no clock
    for name in absent:
        cell = block(tmp_path, settings(name, dataset="mtbench"), f"mtbench-z-{name}")
        for q, who in itertools.product(("0", "1"), ("none", name)):
            zeros = random_row(np.random.default_rng(0), who, q)[0]
            zeros.decode_s = zeros.draft_s = zeros.target_s = zeros.verify_s = zeros.rest_s = 0.0
            made = {"one-chain": one_token(who, q), "failures-chain": Failure(who, q, 0, "boom"), "zeros-chain": zeros}
            cell.write(made[name])
    found = Report(Sources(tmp_path))
    assert not found.problems and [shown(e) for e in found.main if "z-" not in e.path.parent.name] == before
    lines = {e.name: shown(e) for e in found.main if e.name in absent}
    assert {name: line.count("-") for name, line in lines.items()} == absent, lines
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<script.*", "", found.write().read_text(), flags=re.S))
    console.show(found.main)
    assert not re.search(r"\b(nan|inf)\b", capsys.readouterr().out)
    for draw in (figures.step_alphas, figures.speed_up_bars, figures.cost_against_tau):
        plt.close(draw(found.main))


def test_a_folder_of_nothing_but_cells_without_cycles_is_reported(tmp_path, no_figures):  # noqa: F811
    cell = block(tmp_path, settings("eagle2", dataset="mtbench"))
    for who in ("none", "eagle2"):
        cell.write(one_token(who, "q"))
    found = Report(Sources(tmp_path))
    assert found.answer == "No speed-up was measured here."
    for entries in ([e] for e in found.main):
        assert figures.cost_against_tau(entries) is None and figures.step_alphas(entries) is None
    assert found.write().exists()


def test_a_temperature_that_is_no_number_costs_its_cell_alone(tmp_path):
    fill(tmp_path, ["eagle2", "vanilla"])
    path = sorted(tmp_path.rglob(NAME))[0]
    path.write_text(path.read_text().replace('"temperature": 0.0', '"temperature": NaN'))
    found = cells.find(tmp_path)
    assert found.problems == [
        f"{path} line 1: header.config.sampler.temperature: input should be a finite number, not nan; correct or remove it"
    ]
    assert {e.name for e in found.entries} == {"none", "vanilla"}
    json.dumps([e.weights for e in found.entries], allow_nan=False)
