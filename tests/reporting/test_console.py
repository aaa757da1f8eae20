"""What a run, a sweep and a benchmark print: labels, one table of 80 columns, and no winner where there is none."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fixtures import arm, block, random_row, settings
from rich.cells import cell_len
from test_overview import bench

from specbench.records.statistics import contrast
from specbench.reporting import cells, console, fastest, names, overview, tables
from specbench.reporting.groups import Asked, groups, measured

EAGLE2 = {"_target_": "specbench.engine.policies.Dynamic", "depth": 6, "top_k": 10, "nodes": 60}
RATE = {"_target_": "specbench.tuning.cost_aware.Rate", "depth": 8, "top_k": 10, "nodes": 64}


SAME = "identical"


def group_of(folder, **more):
    """The one group below a folder, with its labels."""
    bench(folder, **more)
    (found,) = groups(names.labelled(cells.find(folder).entries))
    return found


# Labels ------------------------------------------------------------------------------------------------------------------


def labels(tmp_path, drafters, **more):
    """What drafters are called. drafters: their part of the configuration, by arm."""
    header = settings(*drafters, **more)
    for label, options in drafters.items():
        header["arms"][label] = arm(label) | {"drafter": options}
    cell = block(tmp_path, header)
    for name in ("none", *drafters):
        cell.write(random_row(np.random.default_rng(0), name)[0])
    return {e.name: e.title for e in names.labelled(cells.find(tmp_path).entries)}


def test_rows_are_named_by_what_differs(tmp_path):
    drafters = {
        "eagle2": {"name": "eagle2", "growth": EAGLE2},
        "eagle2_rate": {"name": "eagle2", "growth": RATE, "vocabulary": 8192},
        "hass_rate": {"name": "hass", "growth": RATE},
        "suffix": {"name": "suffix"},
        "vanilla": {"name": "vanilla"},
        "gamma 5": {"name": "vanilla", "gamma": 5},
    }
    assert labels(tmp_path, drafters) == {
        "none": "plain", "eagle2": "eagle2 · paper", "eagle2_rate": "eagle2 · rate", "hass_rate": "hass · rate",
        "suffix": "suffix", "vanilla": "vanilla SD", "gamma 5": "gamma 5",
    }  # fmt: skip


def test_a_single_drafter_with_its_papers_tree_needs_no_more_than_its_name(tmp_path):
    assert labels(tmp_path, {"eagle2": {"name": "eagle2", "growth": EAGLE2}}) == {"none": "plain", "eagle2": "eagle2"}


def test_options_that_tell_rows_apart_are_named_and_no_others(tmp_path):
    wide, narrow = ({"name": "vanilla", "growth": EAGLE2 | {"nodes": n}, "vocabulary": v} for n, v in ((60, 1), (9, 2)))
    found = labels(tmp_path, {"vanilla": wide, "vanilla_b": narrow})
    assert found == {
        "none": "plain",
        "vanilla": "vanilla SD · dynamic · nodes=60",
        "vanilla_b": "vanilla SD · dynamic · nodes=9",
    }


def test_an_arms_own_name_comes_last_and_does_not_repeat_its_drafters(tmp_path):
    plain = {"name": "eagle2", "growth": EAGLE2, "weights": "shipped"}
    drafters = {"eagle2": plain, "eagle2_8192": plain | {"vocabulary": 8192}, "eagle2_longer": plain | {"weights": "other"}}
    assert labels(tmp_path, drafters) == {
        "none": "plain", "eagle2": "eagle2", "eagle2_8192": "eagle2 · vocabulary=8192", "eagle2_longer": "eagle2 · longer",
    }  # fmt: skip


def test_cells_of_a_sweep_over_links_and_sampling_are_told_apart(tmp_path):
    found = []
    for number, (link, top_p) in enumerate((("4g", 1.0), ("lan", 1.0), ("local", 0.9))):
        config = settings()["config"] | {
            "link": {"name": link, "delay_ms": number},
            "sampler": {"temperature": 0.0, "top_p": top_p},
        }
        bench(tmp_path, {"eagle2": 1.5}, questions=2, cell=f"decode-{number}", config=config)
    found = names.labelled(cells.find(tmp_path).entries)
    assert {e.title for e in found if e.name == "eagle2"} == {"eagle2 · link=4g", "eagle2 · link=lan", "eagle2 · top_p=0.9"}
    assert len(groups(found)) == 3 and all(sum(e.name == "none" for e in g) == 1 for g in groups(found))


# Groups ------------------------------------------------------------------------------------------------------------------


def test_a_group_holds_the_same_questions_and_one_baseline_of_them(tmp_path):
    header = settings("a", "b")
    cell = block(tmp_path, header)
    rng = np.random.default_rng(0)
    for question in range(8):
        for name in ("none", "a", *(["b"] if question < 3 else [])):
            cell.write(random_row(rng, name, str(question))[0])
    found = groups(cells.find(tmp_path).entries)
    assert [[(e.name, e.summary.prompts) for e in g] for g in found] == [
        [("none", 8), ("a", 8)], [("none", 3), ("b", 3)],
    ]  # fmt: skip
    assert all(line.startswith("m, d, 8 q") or line.startswith("m, d, 3 q") for line in console.lines(found[0])[:1])


def test_what_was_asked_for_is_shown_and_nothing_older(tmp_path):
    from fixtures import ledger

    header = settings("a", "b")
    header["arms"]["b"]["drafter"]["window"] = 5
    made = block(tmp_path, header)
    rng = np.random.default_rng(0)
    rows = [random_row(rng, name, str(q))[0] for q in range(4) for name in ("none", "a", "b")]
    for row in rows:
        made.write(row)
    own = ledger(made.path.parent, settings("a"))
    asked = Asked.of(own, [row.text for row in rows[:6]])
    assert [(e.name, e.summary.prompts) for e in measured([asked])] == [("none", 2), ("a", 2)]
    assert [(e.name, e.summary.prompts) for e in measured([asked, asked])] == [("none", 2), ("a", 2)]


def test_older_rows_of_one_name_are_folded_away(tmp_path):
    for number, sha in enumerate(("old", "new")):
        header = settings("a")
        header["arms"]["a"] |= {"contents": {"model.safetensors": sha}}
        cell = block(tmp_path, header)
        for question in range(2):
            for name in ("none", "a"):
                row = random_row(np.random.default_rng(number), name, str(question))[0]
                cell.write(row)
    found = console.lines(cells.find(tmp_path).entries)
    assert sum(line.startswith("a ") for line in found) == 1 and "1 older set of rows" in " ".join(found)


# The table ---------------------------------------------------------------------------------------------------------------


def test_speed_up_is_tokens_a_pass_over_cost_and_no_line_is_wider_than_a_terminal(tmp_path):
    group = group_of(tmp_path, speeds={"a_drafter_whose_name_is_longer_than_any_column": 1.5, "b": 0.5}, questions=4)
    for e in group:
        if e.name != "none":
            assert e.summary.tau / console.cost(e) == pytest.approx(e.summary.speed_up.value)
    for width in (80, 120):
        for details in (False, True):
            found = console.lines(cells.find(tmp_path).entries, width, details)
            assert all(cell_len(line) <= width for line in found), max(found, key=len)
    narrow = console.lines(cells.find(tmp_path).entries)
    assert narrow[0] == "m, mtbench, 4 questions, greedy; machine quiet" and narrow[1].split()[0] == "drafter"
    assert [line.split()[0][:9] for line in narrow[2:5]] == ["a_drafter", "plain", "b"]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["identical"] * 3, "same"),
        (["identical", "numerical tie"], "1 tie"),
        (["bug", "identical"], "1 DIFFER"),
        ([], "unknown"),
    ],
)
def test_output_is_said_in_a_word(tmp_path, verdicts, expected):
    cell = block(tmp_path, settings("a"))
    for question, message in enumerate(verdicts or [None]):
        row = random_row(np.random.default_rng(0), "a", str(question))[0]
        row.audit = message and {"verdict": message}
        cell.write(row)
    (entry,) = cells.find(tmp_path).entries
    assert console.output(entry) == expected


def test_replayed_rows_show_acceptance_and_no_empty_columns(tmp_path):
    bench(tmp_path, {"a": 2.0}, questions=4, replay=True)
    found = console.lines(cells.find(tmp_path).entries)
    assert "replayed: acceptance only" in found[0] and "speed-up" not in found[1] and not any("=>" in x for x in found)


# Verdicts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "noise", "questions", "expected"),
    [
        ({"slow": 0.5, "next": 1.5, "best": 2.0}, 0.02, 20, "best is fastest: "),
        ({"a": 2.0, "b": 2.0, "c": 1.0}, 0.2, 20, "Fastest, with no significant difference on these questions: "),
        ({"a": 1.0}, 0.3, 20, "No drafter is surely faster than plain decoding here"),
        ({"a": 0.5, "b": 0.4}, 0.02, 20, "No drafter pays here"),
        ({"a": 2.0}, 0.02, 19, "19 questions: too few for a verdict"),
        ({"a": 2.0}, 0.02, 1, "times the speed of plain decoding, the most here. 1 question: too few for a verdict"),
        ({"a": 0.5}, 0.02, 19, "No drafter ran faster than plain decoding: a ran at 0.5"),
        ({}, 0.02, 20, "No speed-up was measured here."),
    ],
)
def test_a_verdict_says_no_more_than_the_intervals(tmp_path, speeds, noise, questions, expected):
    assert expected in fastest.sentence(group_of(tmp_path, speeds=speeds, noise=noise, questions=questions))


def test_a_busy_machine_yields_no_winner(tmp_path):
    cell = block(tmp_path, settings("a"))
    for question in range(20):
        for name, seconds in (("none", 1.0), ("a", 0.2)):
            row = random_row(np.random.default_rng(question), name, str(question))[0]
            row.decode_s, row.others = seconds, 0.9
            cell.write(row)
    (group,) = groups(names.labelled(cells.find(tmp_path).entries))
    message = fastest.sentence(group)
    assert (
        fastest.fastest(group).best == () and "the machine did other work" in message.lower() and "fastest" not in message
    )


def test_of_lines_that_differ_in_numbers_alone_the_worst_is_shown(tmp_path):
    group = group_of(tmp_path, speeds={"a": 2.0, "b": 1.5})
    message = "The machine was busy: other processes kept {} of its 2 cores at work. Do not rely on speeds.".format
    busy = [replace(e, busy=message(cores)) for e, cores in zip(group, ("1.1", "1.3", "0.9"), strict=True)]
    assert tables.notes(busy) == [message("1.3")]
    assert tables.notes(group) == []


def test_speeds_of_an_earlier_engine_are_noted_and_have_to_be_measured_again(tmp_path):
    group = group_of(tmp_path, speeds={"a": 2.0}, questions=8)
    old = [replace(e, header={**e.header, "timing": 1}) for e in group]
    assert tables.notes(old) == [tables.OUTDATED]
    assert tables.notes([replace(e, header={**e.header, "replay": True}) for e in old]) == []

    def advised(some, limit=8):
        (a,) = (e for e in some if e.name == "a")
        return console.advice([replace(a, header={**a.header, "config": a.header["config"] | {"data": {"limit": limit}}})])[
            0
        ]

    assert advised(group).endswith("decides.") and advised(old).endswith("decides; all 20 have to be measured.")
    assert (
        advised(group, None) == advised(group, 80) == "Next: a prompt set of 20 questions or more, which a verdict takes."
    )


def test_rows_of_earlier_weights_stand_beside_none_of_newer_ones_and_decide_nothing(tmp_path):
    """A drafter's table is of one training, whichever rows are larger; alone, earlier rows are shown and noted."""
    for digest, cell in (("old", {"replay": True, "questions": 40}), ("new", {"questions": 20})):
        arms = settings("a", "b")["arms"]
        arms["a"] |= {"drafter": {"name": "a", "weights": "w/a"}, "contents": {"model.safetensors": digest}}
        bench(tmp_path, {"a": 2.0, "b": 1.5}, arms=arms, cell=digest, **cell)
    found = {(e.name, e.replayed): e for e in cells.find(tmp_path).entries}
    assert [key for key, e in found.items() if e.superseded] == [("a", True)]
    view = overview.Overview(found.values())
    assert {e.name: e.replayed for e in view.accepting(view.first)} == {"a": False, "b": True}
    assert [e.name for e in overview.Overview([found["a", True]]).accepting(view.first)] == ["a"]
    assert any(note.startswith("Of earlier weights") and note.endswith(": a.") for note in tables.notes([found["a", True]]))


def test_simulated_and_lossy_rows_are_never_ranked(tmp_path):
    header = settings("honest", "lossy", dataset="mtbench")
    header["arms"]["lossy"]["lossy"] = True
    cell = block(tmp_path, header)
    for question in range(20):
        for name, seconds in (("none", 1.0), ("honest", 0.5), ("lossy", 0.1)):
            row = random_row(np.random.default_rng(question), name, str(question))[0]
            row.decode_s = seconds
            cell.write(row)
    (group,) = groups(names.labelled(cells.find(tmp_path).entries))
    assert [e.name for e in fastest.fastest(group).best] == ["honest"]
    assert [e.name for e in console.in_order(group)] == ["honest", "none", "lossy"]


def test_of_equal_arms_none_is_called_fastest_more_often_than_one_time_in_twenty():
    """Ten arms of one true speed over 20 questions: a winner, or a gain over plain decoding, is a false alarm."""

    class Simulated:
        """What `fastest._beaten` asks of an entry."""

        def __init__(self, totals):
            self.totals = totals

    from specbench.records.totals import Totals

    rng, alarms, draws = np.random.default_rng(0), 0, 200
    for _ in range(draws):
        ease = rng.lognormal(0, 0.4, 20)  # of a question, alike for all
        arms = []
        for _ in range(10):
            seconds = ease * rng.lognormal(0, 0.3, 20)
            ones = np.ones(20)
            sums = {"tokens": ones, "seconds": seconds, "base_tokens": ones, "base_seconds": ease * math.exp(0.3**2 / 2)}
            arms.append(Simulated(Totals(tuple(map(str, range(20))), sums)))
        best = [not lost for lost in fastest._beaten(arms)]
        alarms += sum(best) < len(best)
    assert alarms <= 0.05 * draws + 2 * math.sqrt(0.05 * 0.95 * draws)


def test_two_arms_of_different_speed_are_told_apart_as_their_interval_is(tmp_path):
    group = group_of(tmp_path, speeds={"a": 1.5, "b": 1.2}, noise=0.1, questions=30)
    a, b = (next(e for e in group if e.name == name) for name in "ab")
    assert contrast(tables_rate(), a.totals, b.totals, ratio=True).low > 1
    assert [e.name for e in fastest.fastest(group).best] == ["a"]


def tables_rate():
    from specbench.records.metrics import RATES

    return RATES["speed_up"]


def test_a_page_is_named_below_the_last_table(tmp_path):
    bench(tmp_path, {"a": 2.0}, questions=4)
    found = console.lines(cells.find(tmp_path).entries, page="Page: here")
    assert found[-1] == "=> Page: here" and tables.ABSENT in found[3]
