"""What a report says first: the answer, what is accepted, who beats whom; each only of rows that were measured alike."""

import numpy as np
import pytest
from fixtures import block, random_row, settings

from specbench import trace
from specbench.metrics import RATES, contrast
from specbench.records.rows import Row
from specbench.reporting import cells, document, figures, look, overview, sections, tables
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.claims import Verdict
from specbench.reporting.overview import Overview, Setting
from specbench.trace import BINS

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def bench(folder, speeds, questions=12, dataset="mtbench", temperature=0.0, study=None, replay=False, cell="decode-1",
          noise=0.02, seed=0, said=None, **more):  # fmt: skip
    """A cell whose drafters are so many times as fast as its baseline, give or take; random cycles.

    said: of a drafter's configuration, by drafter. more: goes over the header.
    """
    rng = np.random.default_rng(seed)
    header = settings(*speeds, dataset=dataset, **{"study": study, "replay": replay})
    header["config"]["sampler"] = {"temperature": temperature}
    for name, own in (said or {}).items():
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
    bench(tmp_path, {"best": 2.0})
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
            trace.write(trace.path_of(made.path.parent, name), traces)
    assert [t["drafter"] for t in Report(Sources(tmp_path)).traces] == ["a", "b"]


def test_of_an_arm_with_seeds_the_first_ones_traces_are_shown(tmp_path):
    header = settings("a@0", "a@1", dataset="mtbench", study="bench")
    cell, cycle = block(tmp_path / "bench", header), {"root": "a", "nodes": [], "path": [], "bonus": "c", "ms": {}}
    for seed, label in enumerate(("a@0", "a@1")):
        header["arms"][label] |= {"of": "a", "seed": seed}
    for who in ("none", "a@0", "a@1"):
        cell.write(random_row(np.random.default_rng(0), who)[0])
        traces = [{"question": "1", "drafter": who, "prompt": "p", "first": "f", "cycles": [cycle]}]
        trace.write(trace.path_of(cell.path.parent, who), traces)
    assert [t["drafter"] for t in Report(Sources(tmp_path)).traces] == ["a@0", "none"]


# Tables and figures ------------------------------------------------------------------------------------------------------


def test_the_matrix_holds_every_pair_and_colours_what_is_real(tmp_path):
    bench(tmp_path, {"a": 2.0, "b": 1.0, "c": 1.001}, noise=0.1)
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
    assert tables.cells(entry)[tables.COLUMNS.index("alpha per step")] == "1.00 0.75"
    assert tables.alphas(entry)[2:] == ["1.00", "0.75", "-", "-", "-", "-"]
    figure = figures.step_alphas([entry])
    assert figure is not None and list(figure.axes[0].lines[0].get_xdata()) == [1, 2]
    figures.plt.close(figure)


def test_bars_are_sorted_and_a_drafters_trees_stand_together(tmp_path):
    own = {"_target_": "drafters.eagle.Eagle", "weights": "drafters/weights/m/eagle2"}
    trees = {
        "eagle2": own | {"growth": {"nodes": 60}},
        "eagle2_small": own | {"growth": {"nodes": 3}},
        "hass": own | {"weights": "drafters/weights/m/hass", "growth": {"nodes": 60}},
    }
    bench(tmp_path, {"eagle2": 0.5, "hass": 1.0, "eagle2_small": 1.5}, said=trees)
    found = view(tmp_path).timed(Setting("mtbench", 0.0))
    arms = [[e.name for e in family] for family in overview.families([e for e in found if e.name != "none"])]
    assert arms == [["eagle2_small", "eagle2"], ["hass"]]
    figure = figures.speed_up_bars(found)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["eagle2_small", "eagle2", "hass"]
    places = figure.axes[0].get_yticks()
    assert places[1] - places[0] < places[2] - places[1], "trees of one drafter stand closer"
    figures.plt.close(figure)


def test_an_arm_named_after_a_drafter_has_its_colour_and_looks_like_no_other():
    names = ["vanilla", "medusa", "eagle1", "eagle2", "hass", "coral", "coral_router", "eagle2_router", "beagle", "moa"]
    fitted = [f"{name}_fitted" for name in names]
    assert [look.style(name)["color"] for name in names] == [look.style(name)["color"] for name in fitted]
    looks = [look.style(name) for name in [*names, *fitted]]
    assert len({(s["color"], s["marker"]) for s in looks}) == len(looks), "told apart as points"
    assert len({(s["color"], s["hatch"]) for s in looks}) == len(looks), "told apart as bars"


def test_draft_vocabularies_are_drawn_by_their_ids(tmp_path):
    said = {f"a_{ids}": {"name": "a", "vocabulary": ids} for ids in (10, 20)}
    said |= {"a": {"name": "a", "vocabulary": None}, "r": {"name": "r", "groups": 4, "active": 1, "vocabulary": None}}
    target = {"dtype": "float32", "parameters": 100, "vocabulary": 40}
    for replay, cell in [(True, "replay-1"), (False, "decode-1")]:
        bench(tmp_path, dict.fromkeys(said, 1.5), study="vocabulary", replay=replay, cell=cell, said=said, target=target)
        figure = figures.draft_vocabularies(cells.find(tmp_path).entries)
        assert len(figure.axes) == 1 + (not replay), "a panel without rows"
    for axes in figure.axes:
        assert [sorted(c.lines[0].get_xdata()) for c in axes.containers] == [[10, 20, 40], [10]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "r"]
    figures.plt.close(figure)


def test_a_heat_maps_scale_spans_the_intervals(tmp_path):
    grid = {f"r{n}-{g}": {"groups": n, "active": g} for n in (8, 16) for g in (1, 2)}
    bench(tmp_path, dict.fromkeys(grid, 1.5), said=grid, noise=0.2)
    found = cells.find(tmp_path).entries
    ups = [e.summary.speed_up for e in found if e.name != "none"]
    figure = figures.router_grid(found)
    image = figure.axes[0].images[0]
    assert image.get_clim() == pytest.approx((min(u.low for u in ups), max(u.high for u in ups)))
    assert all("[" in text.get_text() for text in figure.axes[0].texts) and len(figure.axes[0].texts) == 4
    figures.plt.close(figure)


def test_no_legend_lies_over_data(tmp_path):
    bench(tmp_path, {"a": 2.0, "b": 1.0}, said={"a": {"growth": {"_target_": "x.grow.Chain", "gamma": 4}}})
    found = view(tmp_path).timed(Setting("mtbench", 0.0))
    weights = {"a": {"history": [{"tokens": 9, "chain_tau": 1.5, "n_alpha": [0.4]}]}}
    for figure in (
        figures.speed_up_bars(found),
        figures.step_alphas(found),
        figures.tau_against_speed_up(found),
        figures.time_split(found),
        figures.theory(found),
        figures.learning_curves(weights),
    ):
        figure.canvas.draw()
        boxes = [legend.get_window_extent() for legend in figure.legends]
        assert not any(axes.get_legend() for axes in figure.axes)
        assert not any(box.overlaps(axes.bbox) for box in boxes for axes in figure.axes)
        figures.plt.close(figure)


def test_the_ledger_shows_what_was_judged_and_folds_the_rest(tmp_path):
    kinds = {"reproduced": 2, "not reproduced": 1, "not testable here": 3, "not run": 1}
    bench(tmp_path, {"a": 2.0})
    found = Report(Sources(tmp_path))
    claim = {"says": "x", "source": "y", "published": "z"}
    found.verdicts = [Verdict("s", claim, (), kind, "one; two") for kind, n in kinds.items() for _ in range(n)]
    tally, *_, decided, needy, unrun = sections._ledger(found)
    assert [(c.text, c.tone) for c in tally.counts] == [
        ("2 reproduced", "good"),
        ("1 not reproduced", "bad"),
        ("3 not testable here", "away"),
        ("1 not run", "away"),
    ]
    assert [line[0].text for line in decided.lines] == ["reproduced"] * 2 + ["not reproduced"]
    assert decided.lines[0][4].parts == ("one", "two")
    assert (needy.title, len(needy.blocks[0].lines)) == ("3 not testable here", 3) and unrun.title == "1 not run"
    assert "7 claims: **2 reproduced**, **1 not reproduced**, 3 not testable here" in document.markdown(
        [document.Section("c", "C", "C", sections._ledger(found))], {}
    )
