"""Figures that studies declare: what each kind draws of which rows, what it says without them, what a wrong one is told."""

import numpy as np
import pytest
from conftest import ROOT
from fixtures import block, random_row, settings
from matplotlib import pyplot as plt
from test_overview import bench
from test_published import paper

from specbench.common.errors import SpecBenchError
from specbench.common.io import validate
from specbench.engine.interface import Step
from specbench.records import figures, studies
from specbench.records.identity import question_digest
from specbench.records.metrics import RATES, step_alpha
from specbench.records.rows import Measurement, Row
from specbench.reporting import cells, charts, declared, leviathan, published, sections, styles
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.evidence import Evidence

PUBLISHED = published.load(ROOT / "results" / "published")
CHAIN = {"_target_": "specbench.engine.policies.Chain", "gamma": 5}


def study(*drawn, arms=("a", "b"), cells=(["dataset=mtbench"],), run=("drafter.steps=1", "drafter.groups=1"), **more):
    made = {"title": "x", "source": ["X, Figure 1"], "cells": list(cells), "figures": list(drawn)}
    return made | {"arms": {arm: {"run": ["drafter=eagle2", *run]} for arm in arms}} | more


def figure(kind, **more):
    return {"kind": kind, "title": "t", "source": ["X, Figure 1"], **more}


def made(folder, spec, numbers=PUBLISHED):
    """The figures of study s, from the rows in a folder."""
    spec = studies.check(validate(spec, studies.Study, "s.yaml"), "s")
    entries = cells.find(folder).entries if folder is not None else []
    return declared.all_of({"s": Evidence(spec, entries)}, numbers)


def chart_of(folder, spec, numbers=PUBLISHED):
    (one,) = made(folder, spec, numbers)
    assert one.chart is not None, one.missing
    return one.chart


def entry(folder, name, dataset="mtbench", temperature=0.0):
    (e,) = (e for e in cells.find(folder).entries if (e.name, e.dataset, e.temperature) == (name, dataset, temperature))
    return e


def pooled(e, metric):
    return pytest.approx(float(RATES[metric](e.totals.pooled)))


def values(series):
    return {x: v.value for x, v in series.points}


def drawn_axes(chart):
    plt.close("all")
    return charts.draw(chart).axes


# Declarations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (figure("progres"), r"figures\.0: .*'progres' found using 'kind' .*'progress', 'by_position'"),
        (figure("stack", parts="cycel"), r"figures\.0\.stack\.parts: input should be 'cycle', 'token' or 'drafting'"),
        (figure("bars", by="arm", y=["tua"]), r"figures\.0\.bars\.y\.0: input should be 'tau'"),
        (figure("scatter", x="tau"), r"figures\.0\.scatter\.x: extra inputs are not permitted"),
        (figure("progress", arms=["c"]), "study s: figure 't': no arm is called c; there are a, b"),
        (figure("scatter") | {"source": ["Y"]}, "figure 't' has the source 'Y', which the study does not name; it names X"),
        (figure("steps", x="drafter.stepz", y=["tau"]), "x=drafter.stepz, which none of its arms sets; they set drafter, "),
        (figure("heatmap", x="drafter.steps", y="tree.k", value=["tau"]), "y=tree.k, which none of its arms sets"),
        (
            figure("stack", parts="cycle", arms={"both": ["a", "b"]}),
            "series 'both' has several arms, of which stack draws one",
        ),
    ],
)
def test_a_wrong_declaration_is_one_clear_line(wrong, message):
    with pytest.raises(SpecBenchError, match=message) as caught:
        made(None, study(wrong))
    assert "\n" not in str(caught.value)


def test_every_kind_has_a_function_and_every_committed_figure_a_place():
    known = {name: Evidence(spec, []) for name, spec in studies.load().items()}
    kinds = {f["kind"] for evidence in known.values() for f in evidence.study.get("figures", [])}
    assert (
        kinds
        == set(declared.KINDS)
        == {part.__annotations__["kind"].__args__[0] for part in figures.Figure.__args__[0].__args__}
    )
    waiting = declared.all_of(known, PUBLISHED)
    assert len({f.name for f in waiting}) == len(waiting) > 30 and all(f.chart is None and f.missing for f in waiting)
    drawn = {source for f in waiting for source in f.source.split("; ")}
    papers = {source for evidence in known.values() for source in evidence.study["source"] if ", Figure " in source}
    assert papers <= drawn


# Kinds ----------------------------------------------------------------------------------------------------------------


def test_progress_draws_the_history_of_every_seed_and_the_measured_end(tmp_path):
    header = settings("a-0", "a-1", dataset="mtbench", study="s")
    for seed in (0, 1):
        history = [
            {
                "tokens": n * 10**6,
                "step": n,
                "chain_tau": 1 + n / 10 + seed,
                "n_alpha": [0.1 * n, 0.05 * n],
                "alpha0_top4": 0.3 * n,
                "classification": 1 / n,
            }
            for n in (1, 2)
        ]
        weights = {"history": history, "tokens_seen": 2 * 10**6, "steps": 2, "parameters": 1, "hours": 0.0,
                   "data": {"unique_tokens": 1}, "machine": {"device": "x", "cores": 1}}  # fmt: skip
        header["arms"][f"a-{seed}"] |= {
            "of": "a",
            "seed": seed,
            "weights": weights,
            "drafter": {"name": "a", "growth": CHAIN},
        }
    cell, rng = block(tmp_path, header), np.random.default_rng(0)
    for question in range(6):
        for name in ("none", "a-0", "a-1"):
            cell.write(random_row(rng, name, str(question))[0])
    found = chart_of(tmp_path, study(figure("progress", y=["alpha0", "alpha1", "tau", "alpha4"]), arms=["a", "b"]))
    curves = [[list(curve) for curve in panel.series[0].curves] for panel in found.panels]
    assert curves[0] == curves[0][:1] * 2 == [[(1.0, 0.1), (2.0, 0.2)]] * 2
    assert curves[1][0] == [(1.0, 0.05), (2.0, 0.1)] and curves[2] == [[(1.0, 1.1), (2.0, 1.2)], [(1.0, 2.1), (2.0, 2.2)]]
    assert values(found.panels[0].series[0]) == {2.0: pooled(entry(tmp_path, "a"), "alpha0")}
    assert [panel.title for panel in found.panels][:2] == ["step 1", "step 2"] and "not measured yet: b" in found.notes[-1]
    drawn = charts.draw(found)
    assert [list(line.get_ydata()) for line in drawn.axes[0].get_lines()[:2]] == [[0.1, 0.2]] * 2
    assert not drawn.legends, "a legend names what is drawn, and one series needs none"
    ranks = chart_of(tmp_path, study(figure("progress", y=["alpha0_top4", "classification"]), arms=["a"]))
    assert [panel.y for panel in ranks.panels] == ["first token among the 4 likeliest", "training loss, cross-entropy"]
    assert [list(panel.series[0].curves[0]) for panel in ranks.panels] == [
        [(1.0, 0.3), (2.0, 0.6)],
        [(1.0, 1.0), (2.0, 0.5)],
    ]
    assert ranks.panels[0].share and not ranks.panels[1].share and not any(values(p.series[0]) for p in ranks.panels)
    (by_step,) = chart_of(tmp_path, study(figure("progress", x="step", y=["tau"]), arms=["a"])).panels
    assert by_step.x == "training steps" and by_step.series[0].curves[0][-1] == (2.0, 1.2)


def test_a_training_that_goes_on_is_drawn_behind_the_one_it_starts_from(tmp_path):
    header = settings("a", "b", dataset="mtbench", study="s")
    for name, tokens in (("a", 2), ("b", 1)):
        history = [{"tokens": tokens * 10**6, "step": tokens, "chain_tau": 1.5, "n_alpha": [0.3]}]
        weights = {"history": history, "tokens_seen": tokens * 10**6, "steps": tokens, "parameters": 1, "hours": 0.0,
                   "data": {"unique_tokens": 1}, "machine": {"device": "x", "cores": 1}}  # fmt: skip
        header["arms"][name] |= {"weights": weights, "drafter": {"name": name, "growth": CHAIN}}
    cell, rng = block(tmp_path, header), np.random.default_rng(0)
    for question in range(6):
        for name in ("none", "a", "b"):
            cell.write(random_row(rng, name, str(question))[0])
    one = study(figure("progress", y=["alpha0"]))
    for name, arm in one["arms"].items():
        arm |= {"train": ["train=short"], **({"start": "a"} if name == "b" else {})}
    (panel,) = chart_of(tmp_path, one).panels
    assert [[list(curve) for curve in series.curves] for series in panel.series] == [[[(2.0, 0.3)]], [[(3.0, 0.3)]]]
    assert [list(values(series)) for series in panel.series] == [[2.0], [3.0]]
    one["arms"] = {"c": {"run": ["drafter=a"], "train": ["train=short"]}} | one["arms"]
    one["arms"]["b"]["start"] = "c"
    (panel,) = chart_of(tmp_path, one).panels
    drawn = [series.label for series in panel.series if series]
    assert drawn == ["a"], "where b's training began is not known"


def test_acceptance_by_position_is_of_the_named_cells_and_beside_what_was_printed(tmp_path):
    bench(tmp_path / "s", {"a": 2.0, "b": 1.5}, study="s", questions=30)
    bench(tmp_path / "s", {"a": 2.0}, study="s", questions=30, temperature=1.0, cell="decode-2", seed=1)
    numbers = paper(tmp_path / "p", ("EAGLE", "0", "mtbench", "0", "0-alpha", "0.8"),
                    ("EAGLE", "2", "mtbench", "0", "2-alpha", "0.7"), ("EAGLE", "1", "mtbench", "1", "1-alpha", "0.6"),
                    target="m")  # fmt: skip
    shows = [{"paper": "x", "table": "Table 1", "arms": {"EAGLE": "a"}}]
    places = [["dataset=mtbench"], ["dataset=mtbench", "sampler.temperature=1"]]
    spec = study(figure("by_position", panels=[{}, {"temperature": 1}]), cells=places, shows=shows)
    found = chart_of(tmp_path, spec, numbers)
    for panel, temperature in zip(found.panels, (0.0, 1.0), strict=True):
        e = entry(tmp_path, "a", temperature=temperature)
        expected = {i + 1: pytest.approx(float(step_alpha(i)(e.totals.pooled))) for i in range(len(panel.series[0].points))}
        assert values(panel.series[0]) == expected and len(expected) > 2
    assert [list(panel.series[0].printed) for panel in found.panels] == [[(1, 0.8), (3, 0.7)], [(2, 0.6)]]
    assert found.panels[1].title == "T=1" and "open or in brackets: as printed" in found.notes
    axes = drawn_axes(found)[0]
    opened = [line for line in axes.get_lines() if line.get_markerfacecolor() == "none"]
    assert [list(line.get_ydata()) for line in opened] == [[0.8, 0.7]]
    assert list(axes.containers[0].lines[0].get_ydata()) == list(values(found.panels[0].series[0]).values())


def test_numbers_of_another_target_are_not_drawn(tmp_path):
    bench(tmp_path / "s", {"a": 2.0, "b": 1.5}, study="s")
    shows = [{"paper": "x", "table": "Table 1", "arms": {"EAGLE": "a"}}]
    numbers = paper(tmp_path / "p", ("EAGLE", "tau", "mtbench", "0", "tau", "4.1"))
    found = chart_of(tmp_path, study(figure("bars", by="arm", y=["tau"]), shows=shows), numbers)
    assert not any(s.printed for s in found.panels[0].series)
    assert "its source prints numbers of another target" in found.notes


def test_bars_by_batch_size_read_the_cell_of_each_batch(tmp_path):
    bench(tmp_path / "s", {"a": 2.0}, study="s", questions=16)
    together = settings()["config"] | {"dataset": {"name": "mtbench"}, "batch": 4}
    bench(tmp_path / "s", {"a": 1.5}, study="s", questions=16, config=together, cell="decode-batch4", seed=1)
    places = [["dataset=mtbench"], ["dataset=mtbench", "batch=4"], ["dataset=mtbench", "batch=8"]]
    found = chart_of(tmp_path, study(figure("bars", by="batch", y=["speed_up"]), arms=("a",), cells=places))
    (panel,) = found.panels
    assert (panel.x, list(panel.ticks), list(panel.absent)) == ("sequences at once", ["1", "4"], ["8"])
    speeds = {e.batch: pooled(e, "speed_up") for e in cells.find(tmp_path).entries if e.name == "a"}
    assert values(panel.series[0]) == {0: speeds[1], 1: speeds[4]} and speeds[1] != speeds[4]


@pytest.mark.parametrize("by", ["arm", "dataset", "temperature", "category"])
def test_bars_stand_in_groups(tmp_path, by):
    bench(tmp_path / "s", {"a": 2.0, "b": 1.5}, study="s", questions=16)
    bench(tmp_path / "s", {"a": 3.0}, study="s", questions=16, dataset="gsm8k", seed=1)
    bench(tmp_path / "s", {"a": 2.5, "b": 1.0}, study="s", questions=16, temperature=1.0, cell="decode-2", seed=2)
    places = [["dataset=mtbench"], ["dataset=gsm8k"], ["dataset=cnndm"], ["dataset=mtbench", "sampler.temperature=1"]]
    found = chart_of(tmp_path, study(figure("bars", by=by, y=["speed_up"]), cells=places))
    first = found.panels[0]
    ticks = {"arm": ["a", "b"], "dataset": ["mtbench", "gsm8k"], "temperature": ["T=0", "T=1"]}
    assert list(first.ticks) == ticks.get(by, first.ticks) and len(first.ticks) == {"category": 8}.get(by, 2)
    assert [panel.title for panel in found.panels] == ([""] if by == "temperature" else ["T=0", "T=1"])
    a = values(first.series[0])
    if by != "category":
        assert a[0] == pooled(entry(tmp_path, "a"), "speed_up")
    else:
        e = entry(tmp_path, "a")
        chosen = sorted({row.asked for row in e.rows if row.category == first.ticks[3]})
        assert a[3] == pytest.approx(float(RATES["speed_up"](e.totals.among(chosen).pooled)))
    if by == "dataset":
        assert a[1] == pooled(entry(tmp_path, "a", "gsm8k"), "speed_up") and list(values(first.series[1])) == [0]
        assert any("cnndm" in note for note in found.notes)
    if by == "temperature":
        assert a[1] == pooled(entry(tmp_path, "a", temperature=1.0), "speed_up")
    drawn = drawn_axes(found)
    assert len({axes.get_ylim() for axes in drawn}) == 1  # one scale in all panels
    heights = [bar.get_height() for bar in drawn[0].patches]
    assert heights == [v for s in first.series for v in values(s).values()]


def test_stacks_add_up_to_the_time_of_a_token(tmp_path):
    rng, cell = np.random.default_rng(0), block(tmp_path, settings("a", dataset="mtbench", study="s"))
    for question in range(6):
        for name in ("none", "a"):
            cell.write(random_row(rng, name, str(question))[0])
    for repetition, ms in enumerate((8.0, 10.0, 12.0)):
        cell.write(Measurement("a", "drafting", repetition, {"ms": ms, "head": 0.5, "network": 0.3, "rest": 0.2}))
    sums = entry(tmp_path, "a").totals.pooled
    for parts, per in (("token", "tokens"), ("cycle", "cycles")):
        (panel,) = chart_of(tmp_path, study(figure("stack", parts=parts), arms=["a"])).panels
        *each, whole = (values(s)[0] for s in panel.series)
        assert whole == pytest.approx(sum(each)) == pytest.approx(1000 * sums["seconds"] / sums[per])
        assert each[0] == pytest.approx(1000 * sums["draft"] / sums[per]) and min(each) >= -1e-9
    drafting = chart_of(tmp_path, study(figure("stack", parts="drafting"), arms=["a", "b"]))
    assert [values(s)[0] for s in drafting.panels[0].series] == pytest.approx([5.0, 3.0, 2.0, 10.0])
    assert [bar.get_width() for bar in drawn_axes(drafting)[0].patches] == pytest.approx([5.0, 3.0, 2.0])


def test_steps_and_grids_take_the_options_of_the_rows(tmp_path):
    options = {f"g{g}s{s}": {"name": "a", "groups": g, "steps": s} for g in (4, 8) for s in (1, 2, 3)} | {
        "x": {"name": "x"}
    }
    cell = bench(tmp_path / "s", dict.fromkeys(options, 2.0), study="s", options=options)
    for repetition in range(5):
        cell.write(Measurement("g4s2", "training", repetition, {"peak": (1 + repetition) * 2.0**30, "seconds": 1.0}))
    arms = {"four": ["g4s3", "g4s1", "g4s2", "x"], "eight": ["g8s1", "g8s2"]}
    steps = figure("steps", x="drafter.steps", y=["tau", "training.peak"], arms=arms)
    found = chart_of(tmp_path, study(steps, arms=options))
    tau, peak = found.panels
    assert values(tau.series[0]) == {s: pooled(entry(tmp_path, f"g4s{s}"), "tau") for s in (1, 2, 3)}
    assert list(values(tau.series[0])) == [1.0, 2.0, 3.0] and values(peak.series[0]) == {2.0: 3.0}
    four, eight = (list(bars.lines[0].get_xdata()) for bars in drawn_axes(found)[0].containers)
    assert eight == pytest.approx([1.0, 2.0], abs=0.05) and four[0] < 1.0 < eight[0], "no interval covers another"
    heat = figure("heatmap", x="drafter.steps", y="drafter.groups", value=["tau"], arms={"a": list(options)})
    (grid,) = chart_of(tmp_path, study(heat, arms=options)).panels
    assert [s.label for s in grid.series] == ["4", "8"] and list(grid.ticks) == ["1", "2", "3"]
    assert values(grid.series[1]) == {i: pooled(entry(tmp_path, f"g8s{i + 1}"), "tau") for i in range(3)}
    (axes,) = drawn_axes(charts.Chart([grid]))
    assert axes.get_images()[0].get_array()[1, 2] == values(grid.series[1])[2]
    assert {text.get_text() for text in axes.texts} == {f"{v:.2f}" for s in grid.series for v in values(s).values()}


def test_draft_vocabularies_are_drawn_by_their_ids(tmp_path):
    options = {f"a_{ids}": {"name": "a", "vocabulary": ids} for ids in (10, 20)}
    options |= {"a": {"name": "a", "vocabulary": None}, "r": {"name": "r", "groups": 4, "active": 1, "vocabulary": None}}
    target = {"dtype": "float32", "parameters": 100, "vocabulary": 40}
    ids = figure("steps", x="ids", log=True, y=["tau", "speed_up"], arms={"a": ["a", "a_10", "a_20"], "r": ["r"]})
    for replay, cell in [(True, "replay-1"), (False, "decode-1")]:
        more = {"study": "s", "replay": replay, "cell": cell, "options": options, "target": target}
        bench(tmp_path, dict.fromkeys(options, 1.5), **more)
        found = chart_of(tmp_path, study(ids, arms=options))
        assert len(found.panels) == 1 + (not replay), "a panel without rows"
    for panel in found.panels:
        assert [list(values(s)) for s in panel.series] == [[10.0, 20.0, 40.0], [10.0]]
    assert drawn_axes(found)[1].get_xscale() == "log"


def timed_chains(folder, lengths, cost=0.1, questions=20, **more):
    """Chains whose tokens are accepted with probability 0.7, drafted at `cost` target passes each."""
    header = settings(*(f"g{n}" for n in lengths), dataset="mtbench", study="s") | more
    for n in lengths:
        header["arms"][f"g{n}"] |= {"drafter": {"name": "vanilla", "growth": CHAIN | {"gamma": n}}, "parameters": 25}
    cell, rng = block(folder, header), np.random.default_rng(0)
    for question in range(questions):
        for name, n in {"none": 0, **{f"g{n}": n for n in lengths}}.items():
            row = Row(name, str(question), "c", 0, 5, [1], 0.5, 0.0, text=question_digest([str(question)]))
            for _ in range(30):
                accepted = int(min(n, rng.geometric(0.3) - 1))
                row.add(Step([7] * (accepted + 1), n, n, accepted, [0] * accepted, n, 0.02 * cost * n, 0.02, 0.0, 0.0))
            row.decode_s = row.draft_s + row.target_s
            cell.write(row)


def test_chains_stand_beside_the_theory_of_their_own_acceptance_and_cost(tmp_path):
    timed_chains(tmp_path, (1, 3, 5, 9))
    (one,) = made(
        tmp_path, study(figure("best_gamma", arms={"chains": ["g1", "g3", "g5", "g9"]}), arms=("g1", "g3", "g5", "g9"))
    )
    tokens, gain, operations, best = one.chart.panels
    for name, gamma, (alpha, tau) in zip(("g1", "g3", "g5", "g9"), (1, 3, 5, 9), tokens.series[0].points, strict=True):
        e = entry(tmp_path, name)
        assert alpha == pooled(e, "alpha") and tau.value == pooled(e, "tau")
        assert tau.value == pytest.approx(leviathan.expected_tokens(0.7, gamma), rel=0.1)
        assert values(gain.series[0])[alpha] == pytest.approx(leviathan.speed_up(alpha, gamma, 0.1), rel=0.06)
        assert values(operations.series[0])[alpha] == pytest.approx((0.25 * gamma + gamma + 1) / tau.value)
    measured, theory = (next(iter(values(s).values())) for s in best.series)
    assert measured in (3, 5) and abs(theory - measured) <= 2 and "c=0.1" in best.series[1].label
    assert [len(table.lines) for table in one.chart.tables] == [6, 4]
    assert len(drawn_axes(one.chart)) == 4


def test_the_formulas_give_the_printed_predictions():
    table = leviathan.predictions(PUBLISHED)
    assert len(table.lines) == 6
    for *_, operations, printed, gain, printed_gain in table.lines:
        assert abs(float(operations) - float(printed)) < 0.0101 and abs(float(gain) - float(printed_gain)) < 0.0101
    assert leviathan.expected_tokens(1.0, 4) == 5 and leviathan.best_gamma(0.2, 0.5) == 0
    assert leviathan.best_gamma(0.8, 0.1) == max(range(1, 20), key=lambda g: (1 - 0.8 ** (g + 1)) / (0.2 * (g * 0.1 + 1)))


def test_a_pass_stands_at_its_parameters_and_milliseconds(tmp_path):
    timed_chains(tmp_path, (2, 4))
    shows = [{"paper": "x", "table": "Table 1", "arms": {"L": "g2"}}]
    numbers = paper(
        tmp_path / "p", ("L", "size", "", "", "pass_parameters", "350"), ("L", "ms", "", "", "pass_ms", "1.36"), target="m"
    )
    found = chart_of(tmp_path, study(figure("scatter"), arms=("g2", "g4"), shows=shows), numbers)
    points = {s.label: s.points[0] for s in found.panels[0].series}
    assert {name: x for name, (x, _) in points.items()} == {"g2": 25e-6, "g4": 25e-6, "target": 100e-6}
    assert points["g2"][1].value == pytest.approx(2.0) and points["target"][1].value == pytest.approx(20.0)
    assert found.panels[0].series[0].printed == [(350.0, 1.36)]


# What is missing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drawn", "more", "phrase"),
    [
        (figure("progress"), {}, "run study s"),
        (figure("scatter"), {"needs": {"device": "cuda"}}, "waits for a GPU"),
    ],
)
def test_without_rows_a_figure_says_what_to_run(drawn, more, phrase):
    (one,) = made(None, study(drawn, **more))
    assert one.chart is None and one.missing == phrase


@pytest.mark.parametrize(
    ("drawn", "phrase"),
    [
        (figure("bars", by="arm", y=["speed_up"]), "run study s: its timed cells have no rows yet"),
        (figure("stack", parts="drafting"), "run study s: drafting is not measured yet"),
        (figure("progress"), "train the arms of study s anew: these rows hold no history"),
        (figure("steps", x="nodes", y=["training.peak"]), "run study s: training.peak are not measured yet"),
    ],
)
def test_other_rows_than_those_it_needs_are_said(tmp_path, drawn, phrase):
    bench(tmp_path / "s", {"a": 2.0, "b": 1.5}, study="s", replay=True, cell="replay-1")
    (one,) = made(tmp_path, study(drawn))
    assert one.chart is None and one.missing == phrase


def test_what_a_drawn_figure_lacks_stands_in_its_caption(tmp_path):
    bench(tmp_path / "s", {"a": 2.0}, study="s", replay=True, cell="replay-1")
    (one,) = made(tmp_path, study(figure("bars", by="arm", y=["tau", "speed_up"])))
    assert len(one.chart.panels) == 1
    assert one.caption.startswith("X, Figure 1. t; m, ") and one.caption.endswith(
        " questions; not measured yet: b; speed-up over plain decoding"
    )


def test_a_report_shows_what_is_drawn_and_lists_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.reporting.bundle.figures.draw_all", lambda *_: {})
    bench(tmp_path / "r", {"eagle2": 2.0, "hass": 1.5}, study="hass", replay=True, cell="replay-1", options={})
    bench(tmp_path / "r", {"x": 2.0}, study="bench")
    found = Report(Sources(tmp_path / "r", chosen=["hass", "leviathan", "bench"]))
    found.write()
    drawn, missing = ((tmp_path / "r" / name).read_text() for name in ("figures.md", "figures-missing.md"))
    assert "](figures/hass-2-bars.png)" in drawn and (tmp_path / "r" / "figures" / "hass-2-bars.svg").exists()
    assert "| Leviathan, Figure 3; Leviathan, Table 2 | Chains by acceptance and length | run study leviathan |" in missing
    assert "figures-missing.md" in (tmp_path / "r" / "README.md").read_text()
    found.no_studies = True
    assert sections._figures(found) == []


def test_series_of_one_figure_differ_in_colour():
    looks = styles.distinct(["coral", "coral_router", "k1", "k2", "eagle2"])
    assert len({look["color"] for look in looks.values()}) == 5
    assert looks["coral"]["color"] == styles.VERMILION and looks["eagle2"]["color"] == styles.BLUE
    many = styles.distinct(map(str, range(60)))
    assert len({(look["color"], look["marker"]) for look in many.values()}) == 60
    assert {look["linestyle"] for look in list(many.values())[: len(styles.COLOURS)]} == {"-"}
    dashes = [look["linestyle"] for look in many.values() if look["color"] == styles.BLUE]
    assert dashes[: len(styles.DASHES)] == list(styles.DASHES)
