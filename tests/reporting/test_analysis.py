"""Every number of the insights against a count over random rows, figures looked over."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from fixtures import arm, settings
from matplotlib import pyplot as plt

from specbench.records.metrics import summarise
from specbench.records.rows import BINS, Row
from specbench.records.statistics import Interval
from specbench.reporting import analysis, analysis_figures, analysis_tables, figures, overview, styles
from specbench.reporting.analysis import Rated
from specbench.reporting.cells import Entry

DEPTH = 5  # of the drafts below


def spelled(rng, answer, drafter="eagle2", question="q", turn=0, category="c", skill=0.6, known=False):
    """A row of random cycles that spell an answer, the last one cut as the loop cuts it."""
    row = Row(drafter, question, category, turn, 5, answer[:1], 0.5, 0.0, replayed=known)
    while len(row.tokens) < len(answer):
        begin, drafted = len(row.tokens), int(drafter != "none") * int(rng.integers(1, DEPTH + 1))
        accepted = min(int(rng.geometric(1 - skill)) - 1, drafted)
        row.tokens = answer[: begin + accepted + 1]
        emitted = len(row.tokens) - begin
        row.nodes.append(7 * drafted)
        row.drafted.append(drafted if emitted > accepted else emitted - 1)
        row.accepted.append(emitted - 1)
        row.ranks.append([0] * (emitted - 1))
        row.passes.append(drafted)
        if not known:
            row.draft_s, row.target_s = row.draft_s + drafted * rng.random(), row.target_s + rng.random()
    row.decode_s = 0.0 if known else row.draft_s + row.target_s + 0.01
    if known and drafter != "none":
        nodes = rng.integers(0, 30, BINS).tolist()
        row.confidence = [
            (n, int(rng.binomial(n, (i + 0.5) / BINS)), n * (i + rng.random()) / BINS) for i, n in enumerate(nodes)
        ]
    return row


def answers(rng, questions=8, turns=2, shortest=20, longest=60):
    """(question, turn) -> ids."""
    return {
        (str(q), turn): rng.integers(0, 9, int(rng.integers(shortest, longest + 1))).tolist()
        for q in range(questions)
        for turn in range(turns)
    }


def entry(rows, baseline=(), temperature=0.0, **own):
    name = rows[0].drafter
    options, header = arm(name, **own), settings(name, replay=any(r.replayed for r in rows))
    header["config"]["sampler"]["temperature"] = temperature
    summary = summarise(header, options, name, rows, list(baseline))
    return Entry("", summary, 0, rows, header, options, 1, {}, Path("rows.jsonl"), baseline=list(baseline))


def rows_of(rng, asked, drafter="eagle2", skill=0.6, known=False):
    return [
        spelled(rng, ids, drafter, q, t, "even" if int(q) % 2 == 0 else "odd", skill, known)
        for (q, t), ids in asked.items()
    ]


def group(seed=0, drafters=(("eagle2", 0.7), ("vanilla", 0.3)), known=False, **more):
    """Entries of several drafters that answered the same prompts, the baseline first."""
    rng = np.random.default_rng(seed)
    asked = answers(rng, **more)
    plain = rows_of(rng, asked, "none", known=known)
    return [entry(plain, plain), *(entry(rows_of(rng, asked, name, skill, known), plain) for name, skill in drafters)]


def cycles(rows):
    """(place of the first emitted token, emitted, accepted, drafted, nodes) of every cycle."""
    for r in rows:
        place = 1
        for a, d, n in zip(r.accepted, r.drafted, r.nodes, strict=True):
            yield place, a + 1, a, d, n
            place += a + 1


def mean(values):
    values = list(values)
    return sum(values) / len(values)


SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_tau_by_category_equals_counts(seed):
    e = group(seed)[1]
    found = analysis.by_category(e)
    assert list(found) == ["even", "odd"]
    for category, rate in found.items():
        taken = list(cycles([r for r in e.rows if r.category == category]))
        assert rate.tries == len(taken) and rate.interval.value == pytest.approx(mean(c[1] for c in taken))


@SEEDS
def test_tau_by_position_is_that_of_cycles_which_no_end_could_cut(seed):
    rng = np.random.default_rng(seed)
    asked = answers(rng, questions=30, turns=1, shortest=200, longest=200)
    whole = rows_of(rng, asked, skill=0.7)
    cut = []
    for row in whole:  # the same decoding, ended by a cap of 50 tokens
        short = Row("eagle2", row.question, row.category, 0, 5, row.tokens[:1], 0.5, 1.0)
        for place, emitted, _, drafted, nodes in cycles([row]):
            left = 50 - place
            if left <= 0:
                break
            accepted = min(emitted, left) - 1
            short.tokens += row.tokens[place : place + accepted + 1]
            short.nodes.append(nodes)
            short.drafted.append(drafted if emitted <= left else accepted)
            short.accepted.append(accepted)
            short.ranks.append([0] * accepted)
        cut.append(short)
    found = analysis.by_position(entry(cut))
    assert len(found) == 4
    for at, rate in enumerate(found):
        taken = [c[1] for c in cycles(whole) if c[0] // 16 == at and c[0] + DEPTH + 1 <= 50]  # as they were before the cut
        assert rate.tries == len(taken)
        assert rate.interval is None if not taken else rate.interval.value == pytest.approx(mean(taken))
    ends = [[c[1] for c in cycles(rows) if 50 - DEPTH <= c[0] < 50] for rows in (cut, whole)]
    assert len(ends[0]) == len(ends[1]) and mean(ends[0]) < mean(ends[1]), "no cycle was cut: nothing was tested"


def test_positions_widen_until_a_table_holds_them():
    long = group(1, shortest=300, longest=300, questions=2)
    assert analysis_tables.stretch(long) == 64 and analysis_tables.stretch(group(1)) == 16
    columns, lines = analysis_tables.positions(long)
    assert columns == ("drafter", "from 0", "from 64", "from 128", "from 192", "from 256")
    assert [line[0] for line in lines] == ["eagle2", "vanilla"] and all(len(line) == 6 for line in lines)


def row_of(drafter, accepted, question="q"):
    """A row of cycles that accept so many tokens each."""
    tokens = list(range(1 + sum(a + 1 for a in accepted)))
    n = len(accepted)
    return Row(drafter, question, "c", 0, 5, tokens, 0.1, 1.0, [9] * n, [DEPTH] * n, list(accepted), [[]] * n)


# Confidence, conventions -----------------------------------------------------------------------------------


@SEEDS
def test_calibration_equals_counts(seed):
    whole = group(seed, known=True)[1]
    e = entry([*whole.rows, Row("eagle2", "0", "c", 2, 5, [1], 0.1, 0.0)])  # in an answer of one token nothing was asked
    found = analysis.calibration(e)
    bins = [[sum(r.confidence[i][k] for r in whole.rows) for k in range(3)] for i in range(BINS)]
    total = sum(n for n, _, _ in bins)
    assert found.candidates == total
    for (probability, rate), (n, right, sure) in zip(found.curve, bins, strict=True):
        assert probability == pytest.approx(sure / n) and rate.tries == n
        assert rate.interval.value == pytest.approx(right / n)
    assert found.error.value == pytest.approx(sum(n / total * abs(sure / n - right / n) for n, right, sure in bins))
    assert found.excess.value == pytest.approx(sum(sure - right for _, right, sure in bins) / total)
    assert found.error.low < found.error.value < found.error.high


def test_calibration_without_confidences_and_with_empty_bins():
    assert analysis.calibration(group()[1]) is None
    row = spelled(np.random.default_rng(0), list(range(9)), known=True)
    row.confidence = [(0, 0, 0.0)] * BINS
    assert analysis.calibration(entry([row])) is None
    row.confidence = [(20, 1, 1.0), *[(0, 0, 0.0)] * (BINS - 2), (4, 4, 3.8)]
    found = analysis.calibration(entry([row]))
    assert found.error.value == pytest.approx(0.2 / 24) and found.excess.value == pytest.approx(-0.2 / 24)
    cells = analysis_tables.calibration([entry([row])])[1][0]
    assert cells[4:] == ["0.05", *["-"] * (BINS - 2), analysis.FEW]


@SEEDS
def test_tau_under_each_convention_equals_counts(seed):
    some = group(seed, shortest=1, longest=30)[1]
    e = entry([*some.rows, Row("eagle2", "silent", "c", 0, 5, [1], 0.1, 0.0)])
    for row in e.rows[::3]:  # sometimes nothing is drafted, as by a drafter that copies from the text
        row.nodes = [n if a else 0 for n, a in zip(row.nodes, row.accepted, strict=True)]
    found = {name: x.value for name, x in analysis.conventions(e).items()}
    decoded = [r for r in e.rows if r.accepted]
    taken = list(cycles(decoded))
    emitted = sum(len(r.tokens) - 1 for r in decoded)
    assert found["pooled"] == pytest.approx(emitted / len(taken)) == pytest.approx(e.summary.tau)
    assert found["mean over answers"] == pytest.approx(mean((len(r.tokens) - 1) / len(r.accepted) for r in decoded))
    assert found["mean over answers"] == pytest.approx(e.summary.tau_macro)
    by_question = [[r for r in decoded if r.question == q] for q in sorted({r.question for r in decoded})]
    taus = [sum(len(r.tokens) - 1 for r in rows) / sum(len(r.accepted) for r in rows) for rows in by_question]
    assert found["mean over questions"] == pytest.approx(mean(taus))
    assert found["without the bonus"] == pytest.approx(mean(c[2] for c in taken)) == pytest.approx(found["pooled"] - 1)
    assert found["drafted cycles only"] == pytest.approx(mean(c[1] for c in taken if c[4]))
    assert found["with the prefill's token"] == pytest.approx(sum(len(r.tokens) for r in decoded) / len(taken))
    assert found["cycles counted from 0"] == pytest.approx(emitted / sum(len(r.accepted) - 1 for r in decoded))
    assert set(found) == set(analysis.CONVENTIONS)


def test_fitted_trees_stand_beside_what_was_expected_of_them():
    made = group(drafters=(("eagle2", 0.7), ("hass", 0.5)))
    tree = {"depth": 4, "top_k": 2, "nodes": 8, "tau": 2.5, "speedup": 1.5}
    made[1].arm["fitted"] = {"choice": tree, "runner_up": tree | {"depth": 5, "speedup": 1.25}, "costs": {}}
    columns, lines = analysis_tables.fitted(made)
    (line,) = lines
    up = made[1].summary.speed_up
    assert line[:3] == ["eagle2", "depth 4, top 2, 8 nodes", "2.50"] and line[4] == "1.50" and len(line) == len(columns)
    assert line[6] == f"{up.value / 1.5:.2f}" and line[7] == "depth 5, top 2, 8 nodes: 1.25"
    made[1].arm["drafter"]["trained"] = "eagle2"
    assert analysis_tables.fitted(made)[1] == [], "what a hybrid copies was not expected of its trees"


def test_an_estimate_by_parameters_is_absent_where_no_pass_was_counted():
    made = group()
    for row in made[1].rows:
        row.passes = []
    old = entry(made[1].rows, made[0].rows)
    cells = dict(zip((table := overview.times([old])).columns, table.lines[0], strict=True))
    assert cells["expected (times)"] == f"{old.summary.expected:.2f}" and "expected (parameters)" not in cells


# Tables, edges, figures --------------------------------------------------------------------------------------------------


def test_what_rests_on_few_tries_is_marked():
    found = Interval(0.5, 0.25, 0.75)
    assert analysis_tables.cell(Rated(found, 10)) == "0.50 [0.25, 0.75]" and Rated(found, 10).shown == found
    assert analysis_tables.cell(Rated(found, 9)) == analysis.FEW and Rated(found, 9).shown is None
    assert analysis_tables.cell(Rated(None, 0)) == "-"


@pytest.mark.parametrize("known", [False, True])
def test_every_table_has_a_cell_a_column(known):
    tables = analysis_tables.all_of(group(known=known))
    assert set(tables) == set(analysis_tables.TABLES) - {"fitted", *([] if known else ["calibration"])}
    for _, (columns, lines) in tables.values():
        assert lines and all(len(line) == len(columns) and all(isinstance(c, str) and c for c in line) for line in lines)
    assert [line[0] for line in tables["categories"][1][1]] == ["eagle2", "vanilla"], "the one that accepts most is first"


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [entry([Row("eagle2", "q", "c", 0, 5, [1], 0.1, 0.0)])],  # an answer that ends with the prefill's token
        [entry([row_of("eagle2", [])]), entry([row_of("vanilla", [])])],
        group(questions=1, turns=1),
        group(questions=1, turns=1, known=True, shortest=2, longest=2),
    ],
    ids=["nothing", "no cycle", "two without a cycle", "one question", "one cycle"],
)
def test_hardly_any_rows_still_make_tables_and_figures(entries):
    for _, (columns, lines) in analysis_tables.all_of(entries).values():
        assert all(len(line) == len(columns) and "nan" not in " ".join(line) for line in lines)
    for figure in (figure for figure, _ in analysis_figures.draw(entries).values() if figure):
        figure.canvas.draw()
        drawn = [x for axes in figure.axes for x in (*axes.patches, *axes.lines)]
        plt.close(figure)
        assert drawn, "axes without anything in them"


NAMES = [name for name in styles.KNOWN if name != "none"]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("names", [NAMES, ["eagle2", "_$x^$ " + "long" * 30], ["hass"]], ids=["all", "two", "one"])
def test_figures_are_drawn_and_nothing_lies_over_their_data_or_beyond_their_edge(known, names):
    entries = group(drafters=[(name, 0.5) for name in names], known=known)
    drawn = {name: figure for name, (figure, _) in analysis_figures.draw(entries).items() if figure}
    assert set(drawn) == {"positions", *(["reliability"] if known else [])}
    for name, figure in drawn.items():
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
        assert all(axes.get_legend() is None for axes in figure.axes), name
        for legend in figure.legends:
            box = legend.get_window_extent(renderer)
            assert not any(box.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes), name
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2)), name
        edge, width, height = figure.get_tightbbox(renderer), *figure.get_size_inches()
        assert edge.x0 > -0.03 and edge.y0 > -0.03 and edge.x1 < width + 0.03 and edge.y1 < height + 0.03, name
        plt.close(figure)


def test_a_drafter_looks_the_same_everywhere_and_like_no_other():
    looks = [tuple(styles.style(name).values()) for name in styles.KNOWN]
    assert len(set(looks)) == len(looks)
    assert len({tuple(styles.style(f"hass-n{n}").values()) for n in range(40)}) > 30
    assert styles.style("hass-n3") == {"color": "#CC79A7", "marker": "s"}, "changes between runs"


def test_figures_of_one_run_keep_a_drafters_colour():
    for names in (["eagle2", "hass"], ["vanilla", "hass"]):
        figure = figures.step_alphas(group(drafters=[(name, 0.5) for name in names]))
        colours = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
        assert colours["hass"] == styles.style("hass")["color"]
        plt.close(figure)
