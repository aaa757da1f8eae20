"""What a report says first: the answer, what is accepted, who beats whom; each only of rows that were measured alike."""

import itertools

import numpy as np
import pytest
from fixtures import block, random_row, settings
from matplotlib import pyplot as plt

from specbench.evaluation import trace
from specbench.records import blocks
from specbench.records.metrics import RATES
from specbench.records.rows import BINS, Row
from specbench.records.statistics import contrast
from specbench.reporting import cells, console, document, figures, overview, sections, study_figures, styles, tables
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.claims import ClaimVerdict
from specbench.reporting.evidence import Evidence
from specbench.reporting.overview import Overview, Setting

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def bench(folder, speeds, questions=12, dataset="mtbench", temperature=0.0, study=None, replay=False, cell="decode-1",
          noise=0.02, seed=0, options=None, **more):  # fmt: skip
    """A cell whose drafters are so many times as fast as its baseline, give or take; random cycles.

    said: of a drafter's configuration, by drafter. more: goes over the header.
    """
    rng = np.random.default_rng(seed)
    header = settings(*speeds, dataset=dataset, **{"study": study, "replay": replay})
    header["config"]["sampler"] = {"temperature": temperature}
    for name, own in (options or {}).items():
        header["arms"][name]["drafter"] |= own
    made = block(folder, header | more, f"{dataset}-{cell}")
    for question in range(questions):
        for name, speed in {"none": 1.0, **speeds}.items():
            row, _ = random_row(rng, name, str(question))
            row.category = CATEGORIES[question % len(CATEGORIES)]
            row.decode_s = row.target_s = (len(row.tokens) - 1) / speed * float(rng.uniform(1 - noise, 1 + noise))
            row.draft_s = row.verify_s = row.rest_s = 0.0
            if replay:
                row.replayed, row.decode_s, row.target_s, row.prefill_s = True, 0.0, 0.0, 0.0
                row.confidence = [(5, 3, 2.5)] * BINS if name != "none" else []
            made.write(row)
    return made


def view(folder) -> Overview:
    return Overview(cells.find(folder).entries)


def test_drafters_that_were_not_measured_alike_do_not_stand_in_one_group(tmp_path):
    short = settings()["config"] | {"dataset": {"name": "mtbench"}, "decode": {"max_new_tokens": 9}}
    bench(tmp_path, {"best": 2.0}, questions=20)
    bench(tmp_path, {"next": 1.5}, cell="decode-2", questions=30, config=short)
    found = view(tmp_path)
    assert [e.name for e in found.timed(found.first)] == ["next", "none"]
    best, other = (next(e for e in found.entries if e.name == name) for name in ("best", "next"))
    cell = overview.matrix([best, other], "tau").lines[0][2]
    assert cell.text == "-" and cell.tone == "away" and "rows that differ in length are not compared" in cell.hint
    assert [line[2:] for line in overview.versus([best, other])] == [["-", "-", "not compared", "not compared"]]


# Which rows ------------------------------------------------------------------------------------------------------------


def test_acceptance_is_of_replayed_rows_and_speeds_of_timed_ones(tmp_path):
    bench(tmp_path, {"a": 2.0, "b": 1.5})
    bench(tmp_path, {"a": 2.0, "b": 1.5}, replay=True, questions=30, cell="replay-1", seed=1)
    bench(tmp_path, {"a": 2.0}, dataset="gsm8k", questions=4, seed=2)
    bench(tmp_path, {"a": 2.0}, temperature=1.0, cell="decode-2", seed=3)
    found = view(tmp_path)
    assert list(map(str, found.settings)) == ["mtbench", "gsm8k", "mtbench, T=1"]
    assert [e.replayed for e in found.accepting(found.first)] == [True, True]
    assert [(e.name, e.replayed) for e in found.timed(found.first)] == [("a", False), ("b", False), ("none", False)]
    tau = overview.acceptance(found)
    assert tau.columns == ("drafter", "mtbench (30 replayed)", "gsm8k (4 timed)", "mtbench, T=1 (12 timed)")
    first = next(line for line in tau.lines if line[0] == "a")
    assert first[1] == tables.shown(next(e for e in found.accepting(found.first) if e.name == "a").summary.tau_interval)
    other = next(line for line in tau.lines if line[0] == "b")
    assert other[2].tone == "away" and other[2].text == "-", "b did not decode gsm8k"
    assert overview.speeds(found).columns[1] == "mtbench (12 timed)"


def test_what_a_column_holds_is_said_by_cell_where_it_differs(tmp_path):
    bench(tmp_path, {"a": 2.0, "b": 1.5})
    bench(tmp_path, {"a": 2.0}, replay=True, questions=30, cell="replay-1", seed=1)
    tau = overview.acceptance(view(tmp_path))
    assert tau.columns == ("drafter", "mtbench")
    assert {line[0]: line[1].rpartition(" (")[2] for line in tau.lines} == {"a": "30 replayed)", "b": "12 timed)"}


def test_the_answer_is_the_benchs_or_of_plain_runs_without_one(tmp_path):
    bench(tmp_path / "plain", {"own": 3.0}, questions=20)
    bench(tmp_path / "coral_table3", {"arm": 4.0}, study="coral_table3", questions=24)
    only = Report(Sources(tmp_path))
    assert {e.name for e in only.main} == {"none", "own"} and only.answer.startswith("own is fastest")
    bench(tmp_path / "bench", {"best": 2.0}, study="bench", questions=20)
    assert Report(Sources(tmp_path)).answer.startswith("best is fastest")
    assert Report(Sources(tmp_path / "coral_table3")).answer.startswith("arm is fastest")


def test_every_drafter_of_the_target_has_its_traces(tmp_path):
    cycle = {"root": "a", "nodes": [["b", 0, 0.5, None]], "path": [1], "bonus": "c", "ms": {"draft": 1.0}}
    main = bench(tmp_path / "bench", {"a": 2.0, "b": 1.5}, study="bench")
    other = bench(tmp_path / "other", {"a": 2.0, "b": 1.5, "c": 1.0}, study="other", seed=1)
    for made, names in ((main, ("a",)), (other, ("a", "b", "c"))):
        for name in names:
            traces = [{"question": "1", "drafter": name, "prompt": "p", "first": "f", "cycles": [cycle]}]
            trace.write(blocks.trace_path(made.path.parent, name), traces)
    assert [t["drafter"] for t in Report(Sources(tmp_path)).traces] == ["a", "b"]


def test_of_an_arm_with_seeds_the_first_ones_traces_are_shown(tmp_path):
    header = settings("a@0", "a@1", dataset="mtbench", study="bench")
    cell, cycle = block(tmp_path / "bench", header), {"root": "a", "nodes": [], "path": [], "bonus": "c", "ms": {}}
    for seed, label in enumerate(("a@0", "a@1")):
        header["arms"][label] |= {"of": "a", "seed": seed}
    for who in ("none", "a@0", "a@1"):
        cell.write(random_row(np.random.default_rng(0), who)[0])
        traces = [{"question": "1", "drafter": who, "prompt": "p", "first": "f", "cycles": [cycle]}]
        trace.write(blocks.trace_path(cell.path.parent, who), traces)
    assert [t["drafter"] for t in Report(Sources(tmp_path)).traces] == ["a@0", "none"]


# Tables and figures ------------------------------------------------------------------------------------------------------


def test_the_matrix_holds_every_pair_and_colours_what_is_real(tmp_path):
    bench(tmp_path, {"a": 2.0, "b": 1.0, "c": 1.001}, noise=0.1, questions=20)
    found = view(tmp_path)
    group = found.timed(found.first)
    names = [e.title for e in group]
    square = overview.matrix(group, "speed_up")
    assert list(square.columns) == ["", *names] and [line[0] for line in square.lines] == names
    for i, a in enumerate(group):
        for j, b in enumerate(group):
            cell = square.lines[i][j + 1]
            if a is b:
                assert cell.text == ""
                continue
            effect = contrast(RATES["speed_up"], a.totals, b.totals, ratio=True)
            expected = "good" if effect.low > 1 else "bad" if effect.high < 1 else ""
            assert (cell.text, cell.tone) == (f"{effect.value:.2f}", expected) and tables.shown(effect) in cell.hint
    at = names.index("a") + 1, names.index("b"), names.index("c") + 1
    assert square.lines[at[1]][at[0]].tone == "bad" and square.lines[at[1]][at[2]].tone == ""
    differences = overview.matrix([e for e in group if e.name != "none"], "tau")
    assert {cell.text[0] for line in differences.lines for cell in line[1:] if cell.text} <= {"+", "-"}


def test_alphas_of_steps_that_hardly_occurred_are_hidden(tmp_path):
    cell = block(tmp_path, settings("a", dataset="mtbench"))
    for question in range(3):  # nine cycles reach the third step, twelve the second
        row = Row("a", str(question), "c", 0, 5, [1], 0.1, 1.0)
        row.drafted, row.accepted, row.nodes = [3] * 4, [3, 2, 2, 1], [3] * 4
        row.ranks, row.tokens = [[0] * n for n in row.accepted], [0] * (1 + sum(row.accepted) + 4)
        cell.write(row)
    (entry,) = cells.find(tmp_path).entries
    assert len(entry.summary.alphas) == 3 and tables.known_depths(entry) == 2
    assert tables.alphas_by_step(entry) == "1.00 0.75"
    assert tables.alphas(entry)[2:] == ["1.00", "0.75", "-", "-", "-", "-"]
    figure = figures.step_alphas([entry])
    assert figure is not None and list(figure.axes[0].lines[0].get_xdata()) == [1, 2]
    plt.close(figure)


def two_trees(folder):
    """A drafter with its paper's tree and with one of its own, and one without a tree."""
    trees = {"eagle2": {"_target_": "specbench.engine.policies.Dynamic", "depth": 6, "top_k": 10, "nodes": 60}}
    trees |= {"eagle2_rate": {"_target_": "specbench.engine.policies.Rate", "nodes": 9}}
    options = {name: {"name": "eagle2", "growth": growth} for name, growth in trees.items()}
    speeds = {"eagle2": 0.5, "suffix": 1.0, "eagle2_rate": 1.5} | {f"d{i}": 0.4 - i / 50 for i in range(6)}
    bench(folder, speeds, questions=20, options=options)


def test_bars_are_sorted_and_a_drafters_trees_stand_together(tmp_path):
    two_trees(tmp_path)
    found = view(tmp_path).timed(Setting("mtbench", 0.0))
    figure = figures.speed_up_bars(found)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:3] == ["eagle2 · rate", "eagle2 · paper", "suffix"]
    places = figure.axes[0].get_yticks()
    assert places[1] - places[0] < places[2] - places[1], "trees of one drafter stand closer"
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert colours[0] == colours[2] != colours[1], "a paper's tree is told apart"
    plt.close(figure)


def test_acceptance_is_shown_of_the_fastest_with_their_papers_trees(tmp_path):
    two_trees(tmp_path)
    found = view(tmp_path)
    assert [e.title for e in overview.chosen(found)][:2] == ["eagle2 · paper", "suffix"]
    assert len(overview.chosen(found)) == len(overview.top(found)) == overview.TOP
    assert [e.title for e in overview.top(found)][:2] == ["eagle2 · rate", "suffix"]


def test_the_first_table_is_the_consoles(tmp_path):
    two_trees(tmp_path)
    found = view(tmp_path).timed(Setting("mtbench", 0.0))
    shown = overview.numbers(found)
    assert list(shown.columns) == [title for title, _ in console.main_columns(wide=False)]
    printed = console.table(console.in_order(found), console.main_columns(wide=False), 200)[1:]
    lines = [[cell if isinstance(cell, str) else cell.text for cell in line] for line in shown.lines]
    assert ["".join(line).replace(" ", "") for line in lines] == [line.replace(" ", "") for line in printed]
    assert [line[1].tone for line in shown.lines[:4] if not isinstance(line[1], str)] == ["good", "", "bad"]


@pytest.mark.parametrize("count", [1, 6, 26])
def test_names_in_a_scatter_hide_neither_each_other_nor_a_point(tmp_path, count):
    """Many of them at one place, as drafters of one recipe are."""
    bench(tmp_path, {f"drafter_{i}": 1.5 + i / 1000 if i % 2 else 0.5 + i / 10 for i in range(count)})
    found = view(tmp_path).timed(Setting("mtbench", 0.0))
    figure = figures.cost_against_tau(found)
    (axes,) = figure.axes
    figure.canvas.draw()
    labels = [text for text in axes.texts if not text.get_text().endswith("x")]
    assert {text.get_text() for text in labels} == {e.title for e in found}
    boxes = [text.get_window_extent() for text in labels]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    points = {e.title: axes.transData.transform((console.cost(e), e.summary.tau)) for e in found}
    assert not any(box.contains(*point) for box in boxes for point in points.values())
    lines = {text.get_text(): text.xy for text in axes.texts if text.get_text().endswith("x")}
    assert lines, "no line of equal speed-up"
    for name, (cost, tau) in lines.items():
        assert tau / cost == pytest.approx(float(name[:-1]))
    plt.close(figure)


def test_an_arm_named_after_a_drafter_has_its_colour_and_its_trees_their_dashes():
    shipped = ["vanilla", "medusa", "eagle1", "eagle2", "hass", "coral", "coral_router", "beagle", "moa"]
    assert [styles.style(n)["color"] for n in shipped] == [styles.style(f"{n}_small")["color"] for n in shipped]
    assert all(styles.style(n)["marker"] != styles.style(f"{n}_small")["marker"] for n in shipped)
    assert styles.style("vanilla SD · fitted") == styles.style("vanilla") and styles.style("plain") == styles.style("none")
    assert [styles.line(f"eagle2{tree}")["linestyle"] for tree in ("", " · paper", " · rate")] == ["-", "-", "--"]


def test_no_legend_lies_over_data(tmp_path):
    bench(tmp_path, {"a": 2.0, "b": 1.0}, options={"a": {"growth": {"_target_": "x.grow.Chain", "gamma": 4}}})
    found = view(tmp_path).timed(Setting("mtbench", 0.0))
    weights = {"a": {"history": [{"tokens": 9, "chain_tau": 1.5, "n_alpha": [0.4]}]}}
    for figure in (
        figures.speed_up_bars(found),
        figures.step_alphas(found),
        figures.cost_against_tau(found),
        study_figures.learning_curves(weights),
    ):
        figure.canvas.draw()
        boxes = [legend.get_window_extent() for legend in figure.legends]
        assert not any(axes.get_legend() for axes in figure.axes)
        assert not any(box.overlaps(axes.bbox) for box in boxes for axes in figure.axes)
        plt.close(figure)


GOAL, PAPERS = "this project's goal", "y"


def ledger(folder, kinds, study="s", **goals):
    """The section of claims that became so; `live` says whether the study has rows."""
    found = Report(Sources(folder))
    found.no_studies, entries = goals.get("own", False), found.entries if goals.get("live", True) else []
    found.evidence[study] = Evidence({"arms": {"a": {}}}, entries)
    found.verdicts = [
        ClaimVerdict(study, {"says": "x", "source": source, "published": "z"}, (), kind, "one; two")
        for (kind, source), n in kinds.items() for _ in range(n)
    ]  # fmt: skip
    return sections._ledger(found)


def test_the_ledger_parts_papers_claims_from_goals_and_folds_what_was_not_judged(tmp_path):
    kinds = {("reproduced", PAPERS): 2, ("not reproduced", GOAL): 1, ("not testable here", PAPERS): 3, ("not run", GOAL): 1}
    bench(tmp_path, {"a": 2.0})
    tally, judged, needy, unrun = ledger(tmp_path, kinds)
    assert [(c.text, c.tone) for c in tally.counts] == [("2 reproduced", "good"), ("1 not reproduced", "bad")]
    _, papers, goals = judged.blocks
    assert judged.open and judged.file == "claims.md"
    assert (papers.caption, len(papers.lines)) == ("The papers' claims", 2)
    assert (goals.caption, len(goals.lines)) == ("This project's goals", 1)
    assert papers.lines[0][2:] == ["y (z)", document.TableCell("", parts=("one", "two"))]
    assert (needy.title, len(needy.blocks[0].lines)) == ("3 claims not testable here", 3)
    assert unrun.title == "1 claims not run, of studies that were run in part" and not unrun.open
    blocks = ledger(tmp_path, kinds)
    page = document.markdown([document.Section("c", "C", "C", blocks)], {})
    assert "3 judged: **2 reproduced**, **1 not reproduced**." in page and "](claims.md)" in page and "| x |" not in page
    assert "| **reproduced** | x | y (z) | one; two |" in document.files(blocks, {})["claims.md"]


@pytest.mark.parametrize("own", [True, False])
def test_claims_without_rows_are_one_line(tmp_path, own):
    bench(tmp_path, {"a": 2.0})
    (line,) = ledger(tmp_path, {("not run", PAPERS): 40, ("not testable here", PAPERS): 9}, own=own, live=False)
    assert line.text.startswith("49 claims")


def test_ones_own_page_is_short(tmp_path):
    """The answer and what explains it; own runs at once; no list of studies, papers or claims that nobody ran."""
    bench(tmp_path, {"a": 2.0, "b": 1.5})
    bench(tmp_path, {"a": 2.0, "b": 1.5}, temperature=1.0, cell="decode-2", seed=1)
    found = Report(Sources(tmp_path))
    parts = {part.anchor: part for part in sections.sections(found)}
    assert list(parts) == ["answer", "cost", "accepted", "duels", "runs", "claims"]
    (other,) = parts["runs"].blocks
    assert other.open and "T=1" in other.title
    (line,) = parts["claims"].blocks
    assert isinstance(line, document.Paragraph)
    found.write()
    assert len((tmp_path / "README.md").read_text().splitlines()) < 80
