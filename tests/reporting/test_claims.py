"""Verdicts: every kind of test on synthetic rows, what makes a claim's verdict of its tests', and what readers are told."""

from dataclasses import replace

import numpy as np
import pytest
from fixtures import arm, block, settings

from specbench.records import metrics, statistics
from specbench.records.blocks import below
from specbench.records.rows import Batched, Measurement, Row, Served
from specbench.records.totals import draws
from specbench.records.trainings import current_trainings
from specbench.reporting import cells, claim_text, claims, evidence
from specbench.reporting.claims import (
    INCONCLUSIVE,
    NOT_REPRODUCED,
    NOT_RUN,
    NOT_TESTABLE,
    PRELIMINARY,
    REPRODUCED,
    ClaimVerdict,
    compare,
    judge,
    judge_study,
)
from specbench.reporting.evidence import Evidence, rate

ARMS = {  # tokens accepted in turn, and how much faster than the baseline a token is
    "good": ([3, 3, 4, 2], 2.0),
    "poor": ([1, 1, 2, 0], 1.0),
    "mixed": ([0, 1, 5, 3], 1.0),
}
STUDY = {
    "title": "x",
    "source": ["x"],
    "varies": ["temperature", "dataset"],
    "cells": [["dataset=a", "data.limit=24"]],
    "arms": {name: {"run": [f"drafter={name}"]} for name in ARMS},
}
CLAIM = {"says": "x", "source": "x", "published": "x"}
CATEGORIES = ("coding", "writing", "maths")


def rows(name, questions=24):
    """Ten cycles a question, each drafting 0.1 s in two of at most four passes; with the baseline's, a second a token.

    What they accept stands in `ARMS`.
    """
    accepted, speed = ARMS[name]
    for q in range(questions):
        path = [accepted[(q + c) % len(accepted)] for c in range(10)]
        tokens = [0] * (1 + sum(path) + len(path))
        yield row(name, q, tokens, path, len(tokens) / speed, drafted=[5] * len(path), passes=[2] * len(path), draft_s=1.0)


def row(name, question, tokens, path, seconds, drafted, **more):
    nodes, ranks = [d * (name != "none") for d in drafted], [[0] * a for a in path]
    category = CATEGORIES[question % 3]
    return Row(name, str(question), category, 0, 5, tokens, 0.1, seconds, nodes, drafted, path, ranks, **more)


def plain(questions=24, length=36):
    for q in range(questions):
        tokens = [0] * length
        passes = length - 1
        yield row("none", q, tokens, [0] * passes, float(length), drafted=[0] * passes, target_s=float(passes))


def write(results, header, *names, questions=24, change=lambda r: r):
    """A block of the study with these drafters' rows."""
    cell = block(results / "s", {"study": "s", **header})
    for name in names:
        for one in plain(questions) if name == "none" else rows(name, questions):
            cell.write(change(one))
    return cell


def header(**more):
    known = settings(*ARMS, dataset="a", **more)
    known["arms"] = {"none": arm("none")} | {n: arm(n, parameters=50 if n == "good" else 100, passes=4) for n in ARMS}
    known["target"] |= {"parameters": 1000}
    return known


def gathered(folder, **more):
    return Evidence({**STUDY, **more}, cells.collect(below(folder), folder))


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    cell = write(folder, header(), "none", *ARMS)
    for repetition in range(5):
        for name, peak in (("good", 90.0), ("poor", 100.0), ("mixed", 100.5)):
            cell.write(Measurement(name, "memory", repetition, {"peak": peak + repetition % 3}))
    return gathered(folder)


def verdict(test, known):
    return judge(test, compare(test, known))


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ({"metric": "tau", "of": "good", "over": "poor", "is": "more"}, REPRODUCED),
        ({"metric": "tau", "of": "good", "over": "poor", "is": "less"}, NOT_REPRODUCED),
        ({"metric": "tau", "of": "good", "over": "good", "is": "more"}, INCONCLUSIVE),
        ({"metric": "tau", "of": "good", "over": "absent", "is": "more"}, NOT_RUN),
        ({"metric": "tau", "of": "good", "over": "poor", "is": "more", "by": 1.5}, REPRODUCED),
        ({"metric": "tau", "of": "good", "over": "poor", "is": "more", "by": 2.5}, NOT_REPRODUCED),
        ({"metric": "speed_up", "of": "good", "over": "poor", "is": "more"}, REPRODUCED),
        ({"metric": "speed_up", "of": "poor", "over": "poor", "within": 0.05}, REPRODUCED),
        ({"metric": "speed_up", "of": "good", "over": "poor", "within": 0.05}, NOT_REPRODUCED),
        ({"metric": "speed_up", "of": "good", "than": 1.5, "is": "more"}, REPRODUCED),
        ({"metric": "late_alpha", "of": "good", "over": "poor", "is": "more"}, REPRODUCED),
        ({"metric": "alpha0", "of": "good", "over_metric": "alpha4", "is": "more"}, REPRODUCED),
        ({"metric": "parameters", "of": "good", "over": "poor", "is": "less"}, REPRODUCED),
        ({"metric": "draft_ms", "of": "good", "over": "poor", "within": 0.01}, REPRODUCED),
        ({"metric": "tau", "of": "poor", "than": 1.9, "is": "more"}, REPRODUCED),
        ({"metric": "tau", "of": "poor", "than": 2.1, "is": "more"}, NOT_REPRODUCED),
        ({"metric": "tau", "of": "poor", "than": 2.0, "within": 0.1}, REPRODUCED),
        ({"metric": "draft_cost", "of": "good", "over_metric": "draft_cost_by_parameters", "within": 0.1}, REPRODUCED),
        ({"metric": "draft_cost", "of": "poor", "over_metric": "draft_cost_by_parameters", "within": 0.1}, NOT_REPRODUCED),
        ({"measured": "memory.peak", "of": "good", "over": "poor", "is": "less"}, REPRODUCED),
        ({"measured": "memory.peak", "of": "poor", "over": "mixed", "within": 0.05}, REPRODUCED),
        ({"measured": "memory.peak", "of": "poor", "over": "mixed", "is": "less"}, INCONCLUSIVE),
        ({"measured": "memory.peak/peak", "of": "good", "than": 1.0, "within": 0.1}, REPRODUCED),
        ({"measured": "memory.peak/loaded", "of": "good", "than": 1.0, "within": 0.1}, NOT_RUN),
        ({"measured": "memory.loaded", "of": "good", "over": "poor", "is": "less"}, NOT_RUN),
        ({"measured": "training.peak", "of": "good", "over": "poor", "is": "less"}, NOT_RUN),
        ({"metric": "lossless", "of": "good", "than": 0.999, "is": "more"}, NOT_RUN),  # these rows hold no audit
    ],
)
def test_verdicts(known, test, expected):
    assert verdict(test, known) == expected


def test_a_claim_is_as_good_as_its_worst_test(known):
    right = {"metric": "tau", "of": "good", "over": "poor", "is": "more"}
    wrong, open_, absent = {**right, "is": "less"}, {**right, "over": "good"}, {**right, "over": "absent"}
    for tests, expected in (
        ([right, right], REPRODUCED),
        ([right, open_], INCONCLUSIVE),
        ([open_, wrong, right], NOT_REPRODUCED),
        ([wrong, absent], NOT_RUN),
    ):
        study = {**STUDY, "claims": [{**CLAIM, "tests": tests}]}
        assert judge_study("s", study, known.entries)[0].verdict == expected


def test_a_claim_that_waits_for_the_project_needs_no_test(known):
    claim = {**CLAIM, "needs": {"project": "a time machine"}, "tests": []}
    (found,) = judge_study("s", {**STUDY, "claims": [claim]}, known.entries)
    assert (found.verdict, found.summary) == (NOT_TESTABLE, "needs a time machine")


def test_late_acceptance_is_everything_behind_the_first_step(known):
    entry = known.find("mixed", None, timed=False)
    tried = passed = 0
    for one in entry.rows:
        for accepted, drafted in zip(one.accepted, one.drafted, strict=True):
            for depth in range(2, drafted + 1):
                if accepted >= depth - 1:
                    tried, passed = tried + 1, passed + (accepted >= depth)
    assert 0 < passed < tried
    assert float(rate(entry, "late_alpha")(entry.totals.pooled)) == pytest.approx(passed / tried)


def test_the_expected_speed_up_is_that_of_tokens_drawn_one_by_one(known):
    """Theorem 3.8: draft gamma tokens, each right with probability alpha, at a cost of c target passes each."""
    entry = known.find("good", None, timed=True)
    sums = entry.totals.pooled
    alpha, gamma = float(metrics.RATES["alpha"](sums)), 4  # the chain's length, whatever ran of it
    cost = float(rate(entry, "draft_cost")(sums))
    emitted = sum(alpha**depth for depth in range(gamma + 1))  # the bonus, and each token that all before it let through
    assert 0 < alpha < 1 and cost == pytest.approx(0.05)
    assert float(rate(entry, "expected_speed_up")(sums)) == pytest.approx(emitted / (gamma * cost + 1))


def test_an_effect_over_a_number_has_the_interval_that_tables_show(known):
    speed = known.find("mixed", None, timed=True).summary.speed_up
    found = compare({"metric": "speed_up", "of": "mixed", "than": 2.0, "is": "more"}, known).effect
    assert [2 * v for v in (found.value, found.low, found.high)] == pytest.approx([speed.value, speed.low, speed.high])
    assert speed.low < speed.value < speed.high


def test_what_a_pass_costs_is_not_reckoned_from_passes_that_nobody_counted(tmp_path):
    def change(one):
        one.passes = []
        return one

    write(tmp_path, header(), "none", "good", change=change)
    known = gathered(tmp_path)
    for metric in ("draft_cost", "expected_speed_up"):
        test = {"metric": metric, "of": "good", "than": 1.0, "is": "less"}
        assert (compare(test, known).effect, compare(test, known).reason) == (None, "no number")
    assert compare({"metric": "draft_ms", "of": "good", "than": 1.0, "is": "more"}, known).effect is not None


def test_a_fitted_tree_is_held_to_what_was_expected_of_it(known, monkeypatch):
    entry = known.find("good", None, timed=True)
    test = {"metric": "speed_up", "of": "good", "over_metric": "promised_speed_up", "within": 0.1}
    found = compare(test, known).effect
    assert found is None, "nothing was promised of a tree that was not fitted"
    monkeypatch.setitem(entry.arm, "fitted", {"choice": {"speedup": 2 * entry.summary.speed_up.value}})
    found = compare(test, known).effect
    assert found.value == pytest.approx(0.5) and verdict(test, known) == "not reproduced"


def test_effects_are_those_of_a_studentised_bootstrap_written_out(known):
    found = compare({"metric": "tau", "of": "mixed", "over": "poor", "is": "more"}, known).effect
    ours, theirs = (known.find(name, None, timed=False).rows for name in ("mixed", "poor"))
    names = sorted({r.question for r in ours})

    def effect(asked):
        """The difference of tau, and its standard error from each question's influence on both sides."""
        sides = []
        for part in (ours, theirs):
            each = [[r for r in part if r.question == q] for q in asked]
            emitted = np.array([sum(len(r.tokens) - 1 for r in own) for own in each])
            cycles = np.array([sum(len(r.accepted) for r in own) for own in each])
            tau = emitted.sum() / cycles.sum()
            sides.append((tau, (emitted - tau * cycles) / cycles.sum()))
        influence = sides[0][1] - sides[1][1]
        return sides[0][0] - sides[1][0], np.sqrt((influence**2).sum() * len(asked) / (len(asked) - 1))

    value, error = effect(names)
    samples = [effect([names[i] for i in sample]) for sample in draws(len(names))]
    reach = np.quantile([abs(v - value) / e for v, e in samples], 0.95) * error
    assert found is not None and found.value == pytest.approx(metrics.tau(ours) - metrics.tau(theirs))
    assert (found.low, found.high) == pytest.approx((value - reach, value + reach), rel=1e-4)


def test_a_claim_about_several_data_sets_is_tested_on_all_of_them(tmp_path):
    """The mean of three sets, with an interval as narrow as that of independent means."""
    sets = ("a", "b", "c")
    for dataset in sets:
        other = header()
        other["config"] = {**other["config"], "dataset": {"name": dataset}}
        write(tmp_path / dataset, other, "none", *ARMS)
    cells_ = [[f"dataset={dataset}", "data.limit=24"] for dataset in sets]
    known = Evidence({**STUDY, "varies": [], "cells": cells_}, [e for d in sets for e in gathered(tmp_path / d).entries])
    test = {"metric": "tau", "of": "mixed", "over": "poor", "is": "more"}
    one, three = (compare({**test, "at": at}, known).effect for at in ({"dataset": "b"}, {"dataset": list(sets)}))
    assert one is not None and three is not None and three.value == pytest.approx(one.value)
    assert three.high - three.low == pytest.approx((one.high - one.low) / 3**0.5, rel=0.2)
    lacking = compare({**test, "at": {"dataset": ["a", "d"]}}, known)
    assert lacking.effect is None and lacking.reason == "no rows of mixed at dataset=d"
    (told,) = judge_study(
        "s", {**known.study, "claims": [{**CLAIM, "tests": [{**test, "at": {"dataset": [*"abc"]}}]}]}, known.entries
    )
    assert told.summary.startswith("tau of mixed at the mean of a, b, c over poor: +")


def test_before_its_planned_size_a_claim_is_preliminary(tmp_path):
    """However clear it looks: who stops when an interval excludes zero finds something in noise."""
    write(tmp_path, header(), "none", *ARMS)
    claim = {**CLAIM, "tests": [{"metric": "tau", "of": "good", "over": "poor", "is": "more"}]}
    for limit, expected, size in (("data.limit=24", REPRODUCED, ""), ("data.limit=30", PRELIMINARY, "24 of 30")):
        known = gathered(tmp_path, cells=[["dataset=a", limit]])
        (found,) = judge_study("s", {**known.study, "claims": [claim]}, known.entries)
        assert (found.verdict, found.size) == (expected, size)
        assert claims.cells(found)[-1] == (f"{expected}, {size}" if size else expected)


def test_a_category_stands_against_all_others(tmp_path):
    def change(one):
        if one.category == "coding" and one.drafter == "good":  # as good as it gets
            one.accepted, one.tokens, one.ranks = [5] * 10, [0] * 61, [[0] * 5 for _ in range(10)]
        return one

    write(tmp_path, header(), "none", *ARMS, questions=60, change=change)
    known = gathered(tmp_path)
    test = {"metric": "tau", "of": "good", "at": {"category": "coding"}, "over_at": {}, "is": "more"}
    found = compare(test, known).effect
    entry = known.find("good", None, timed=False)
    parts = [[r for r in entry.rows if (r.category == "coding") == mine] for mine in (True, False)]
    assert found is not None and found.value == pytest.approx(metrics.tau(parts[0]) - metrics.tau(parts[1]))
    assert verdict(test, known) == REPRODUCED
    alone = compare({"metric": "tau", "of": "good", "at": {"category": "coding"}, "than": 6.0, "within": 0.1}, known).effect
    assert alone is not None and alone.value == pytest.approx(0)
    both = compare(
        {"metric": "tau", "of": "good", "at": {"category": "coding"}, "over": "poor", "is": "more"}, known
    ).effect
    poor = [r for r in known.find("poor", None, timed=False).rows if r.category == "coding"]
    assert both is not None and both.value == pytest.approx(6 - metrics.tau(poor))
    none, why = (c := compare({**test, "at": {"category": "cooking"}}, known)).effect, c.reason
    assert none is None and why == "no questions of both sides"


def test_prompt_sets_are_compared_without_pairing_their_questions(tmp_path):
    """Both have a question 0, which are two questions."""
    write(tmp_path, header(), "none", "good")
    other = header()
    other["config"] = {**other["config"], "dataset": {"name": "b"}}
    write(tmp_path, other, "none", "good", questions=5)
    known = gathered(tmp_path)
    test = {"metric": "tau", "of": "good", "at": {"dataset": "a"}, "over_at": {"dataset": "b"}, "is": "more"}
    found = compare(test, known).effect
    ours, theirs = (known.find("good", {"dataset": name}, timed=False).rows for name in "ab")
    assert (len(ours), len(theirs)) == (24, 5)
    assert found is not None and found.value == pytest.approx(metrics.tau(ours) - metrics.tau(theirs))


@pytest.mark.parametrize(("questions", "expected"), [(1, PRELIMINARY), (19, PRELIMINARY), (20, REPRODUCED)])
def test_fewer_than_twenty_questions_decide_nothing(questions, expected, tmp_path):
    """Even where the study plans fewer. Numbers that do not depend on questions are judged nevertheless."""
    write(tmp_path, header(), "none", *ARMS, questions=questions)
    known = gathered(tmp_path, cells=[["dataset=a", f"data.limit={questions}"]])
    for test in (
        {"metric": "tau", "of": "good", "over": "poor", "is": "more"},
        {"metric": "tau", "of": "good", "than": 2.0},
    ):
        assert verdict({"is": "more", **test}, known) == expected
    assert verdict({"metric": "parameters", "of": "good", "over": "poor", "is": "less"}, known) == REPRODUCED


def test_unpaired_intervals_are_as_wide_as_the_two_sides_say(known):
    """Of independent sides the variances add; paired with itself an arm has no spread at all."""
    totals = known.find("mixed", None, timed=False).totals
    assert statistics.contrast(metrics.RATES["tau"], totals, totals).low == 0
    alone = statistics.interval(metrics.RATES["tau"], totals)
    apart = statistics.estimate_contrast(metrics.RATES["tau"], totals, totals, paired=False).interval()
    assert apart.high - apart.low == pytest.approx(2**0.5 * (alone.high - alone.low), rel=0.15)


def test_counts_of_replayed_and_of_decoded_answers_are_compared(tmp_path):
    """Temperature 1 cannot be replayed, and a replay counts what decoding would have counted. Speeds it has none."""
    warm = header()
    warm["config"] = {**warm["config"], "sampler": {"temperature": 1.0}}
    write(tmp_path, {**header(), "replay": True}, "none", "good")
    write(tmp_path, {**warm, "hardware": {"device": "fridge", "cores": 1}}, "none", "good", questions=6)
    known = gathered(tmp_path)
    test = {"metric": "tau", "of": "good", "at": {"temperature": 1}, "over_at": {}, "is": "less"}
    found = compare(test, known)
    assert found.effect is not None and found.effect.value == 0 and found.size == "6 of 20"
    assert compare({**test, "metric": "speed_up"}, known).reason == "no rows of good"


def test_seconds_are_compared_on_a_machine_that_measured_both(tmp_path):
    fridge = {**header(), "hardware": {"device": "fridge", "cores": 1}}
    write(tmp_path / "both", header(), "none", "good", "poor", questions=6)
    write(tmp_path / "one", fridge, "none", "good", questions=9)
    known = Evidence(STUDY, [e for one in ("both", "one") for e in gathered(tmp_path / one).entries])
    for of, over in (("good", "poor"), ("poor", "good")):
        found = compare({"metric": "tokens_per_s", "of": of, "over": over, "is": "more"}, known)
        assert found.effect is not None and found.size == "6 of 24"


def test_counts_of_earlier_weights_are_not_pooled_with_those_of_the_newest(tmp_path):
    """Another machine measured them; what it has of arms whose weights are the same counts."""
    for digest, device, started in (("old", "fridge", "2026-01-01T00:00:00Z"), ("new", "toaster", "2026-01-02T00:00:00Z")):
        said = {**header(), "started": started, "hardware": {"device": device, "cores": 1}}
        good = said["arms"]["good"]
        said["arms"]["good"] = {
            **good,
            "drafter": {**good["drafter"], "weights": "w/good"},
            "contents": {"model.safetensors": digest},
        }
        write(tmp_path / "cell" / device, said, "none", "good", "poor")
    known = Evidence(STUDY, cells.find(tmp_path).entries)
    assert {e.superseded for e in known.entries if e.name == "good"} == {True, False}
    assert not known.find("good", None, timed=False).superseded
    assert known.find("good", None, timed=False).header["hardware"]["device"] == "toaster"
    assert verdict({"metric": "tau", "of": "good", "over": "poor", "is": "more"}, known) == REPRODUCED


def slowed(r):
    """Everything takes three times as long, and `poor` is another engine, which has no cycles."""
    served = {name: [] for name in ("nodes", "drafted", "accepted", "ranks", "passes")} | {"served": Served(counted=False)}
    return replace(r, decode_s=3 * r.decode_s, **(served if r.drafter == "poor" else {}))


@pytest.mark.parametrize("change", [lambda r: replace(r, decode_s=3 * r.decode_s), slowed], ids=["drafter", "engine"])
def test_speeds_of_one_cell_are_free_of_what_the_machine_did_between_its_blocks(tmp_path, change):
    """`good` was measured while the machine was fast, `poor` while it was slow."""
    write(tmp_path, header(), "none", "good")
    write(tmp_path, header(), "none", "poor", change=change)
    for of, over, ratio in (("good", "poor", 2.0), ("good", "none", 2.0), ("none", "poor", 1.0)):
        found = compare({"metric": "tokens_per_s", "of": of, "over": over, "is": "more"}, gathered(tmp_path))
        assert found.effect is not None and found.effect.value == pytest.approx(ratio, rel=0.05)


def test_seconds_are_those_of_a_machine_that_suffices_for_a_verdict(tmp_path):
    """A busy machine measured all questions first, then a quiet one, then a third more questions while busy."""
    for device, others, questions in (("fridge", 0.9, 24), ("toaster", 0.0, 24), ("kettle", 0.9, 30)):
        known = {**header(), "hardware": {"device": device, "cores": 1}}
        write(tmp_path, known, "none", "good", "poor", questions=questions, change=lambda r, o=others: replace(r, others=o))
    found = compare({"metric": "tokens_per_s", "of": "good", "over": "poor", "is": "more"}, gathered(tmp_path))
    assert (found.done, found.doubt) == (24, "")


@pytest.mark.parametrize(("length", "compared"), [(64, True), (32, False)])
def test_answers_of_one_length_are_compared_wherever_the_code_stood_that_limited_them(tmp_path, length, compared):
    for dataset, module, tokens in (("a", "specbench.bench", 64), ("b", "specbench.engine.decode", length)):
        known = header()
        decode = {"_target_": f"{module}.RunSettings", "max_new_tokens": tokens}
        known["config"] = {**known["config"], "dataset": {"name": dataset}, "decode": decode}
        write(tmp_path / dataset, known, "none", "good")
    known = Evidence(STUDY, [e for dataset in "ab" for e in gathered(tmp_path / dataset).entries])
    test = {"metric": "tau", "of": "good", "at": {"dataset": "a"}, "over_at": {"dataset": "b"}, "is": "more"}
    found = compare(test, known)
    assert ("length" in found.reason, found.effect is not None) == (not compared, compared)


def test_a_category_of_few_questions_decides_nothing(known):
    """Each has 8 of 24 questions."""
    alone = {"metric": "tau", "of": "good", "at": {"category": "coding"}, "over": "poor", "is": "more"}
    against = {"metric": "tau", "of": "good", "at": {"category": "coding"}, "over_at": {}, "is": "less"}
    for test in (alone, against):
        assert (verdict(test, known), compare(test, known).size) == (PRELIMINARY, "8 of 20")


TRAINED = {"arms": {**STUDY["arms"], "good": {"run": ["drafter=eagle2"], "train": ["train=short"]}}}
(TODAYS,) = current_trainings("good", {**STUDY, **TRAINED}, header()["config"]["model"]["name"])


@pytest.mark.parametrize(
    ("metric", "change", "more", "size"),
    [
        ("tau", {}, {"arms": {**STUDY["arms"], "good": {"run": ["drafter=good"], "seeds": [0, 1, 2]}}}, "1 of 3 seeds"),
        ("tau", {"length": 8}, {}, "answers of another length"),
        ("tau", {"timing": 1}, {}, ""),
        ("speed_up", {"timing": 1}, {}, "with an earlier engine"),
        ("tau", {"others": 0.9}, {}, ""),
        ("speed_up", {"others": 0.9}, {}, "on a busy machine"),
        ("speed_up", {"timing": 1, "limit": 30}, {}, "24 of 30, with an earlier engine"),
        ("tau", {"weights": "eagle2-0123456789ab"}, TRAINED, "of another training than today's"),
        ("tau", {"weights": TODAYS}, TRAINED, ""),
    ],
)
def test_rows_other_than_planned_decide_nothing_whatever_their_number(metric, change, more, size, tmp_path):
    said = header()
    arm = said["arms"]["good"]
    said["arms"]["good"] = {**arm, "of": "good", "drafter": {**arm["drafter"], "weights": f"/{change.get('weights')}"}}
    said["config"] = {**said["config"], "decode": {"max_new_tokens": change.get("length", 64)}}
    timing = {"timing": change["timing"]} if "timing" in change else {}
    write(tmp_path, {**said, **timing}, "none", *ARMS, change=lambda r: replace(r, others=change.get("others")))
    study = {**STUDY, "cells": [["dataset=a", f"data.limit={change.get('limit', 24)}", "decode.max_new_tokens=64"]], **more}
    claim = {**CLAIM, "tests": [{"metric": metric, "of": "good", "over": "poor", "is": "more"}]}
    (found,) = judge_study("s", {**study, "claims": [claim]}, gathered(tmp_path, **study).entries)
    assert (found.verdict, found.size) == (PRELIMINARY if size else REPRODUCED, size), found.summary


def test_measurements_are_those_of_the_newest_engine_on_the_machine_with_most(tmp_path):
    """What earlier blocks say of a machine's speed must not decide for ever."""
    for timing, device, count, ratio in ((1, "toaster", 9, 1.0), (3, "fridge", 5, 2.0), (3, "toaster", 6, 3.0)):
        said = {**header(), "timing": timing, "hardware": {"device": device, "cores": 1}}
        cell = write(tmp_path / f"{device}-{timing}", said, "none", "good")
        for repetition in range(count):
            cell.write(Measurement("good", "generate", repetition, {"ratio": ratio}))
    known = Evidence(STUDY, [e for one in sorted(tmp_path.iterdir()) for e in gathered(one).entries])
    test = {"measured": "generate.ratio", "of": "good", "than": 1.0, "is": "more"}
    assert compare(test, known).effect.value == 3.0 and verdict(test, known) == REPRODUCED
    old = Evidence(STUDY, gathered(tmp_path / "toaster-1").entries)
    assert compare(test, old).size == "with an earlier engine" and verdict(test, old) == PRELIMINARY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": "another", "versions": {"torch": "9"}, "load": 3.0}, []),
        ({"hardware": {"device": "fridge", "cores": 1}}, ["machine"]),
        ({"hardware": {"device": "toaster", "cores": 2}}, ["machine"]),
        ({"hardware": {"device": "toaster", "cores": 1, "memory": 9}}, []),
        ({"timing": 99}, ["machine"]),
        ({"study": "t"}, ["study"]),
    ],
)
def test_arms_are_compared_whatever_commit_measured_them_and_only_on_one_kind_of_machine(tmp_path, change, message):
    write(tmp_path / "first", header(), "none", "good")
    write(tmp_path / "second", {**header(), **change}, "none", "poor")
    (ours,) = (e for e in cells.collect(below(tmp_path / "first")) if e.name == "good")
    (theirs,) = (e for e in cells.collect(below(tmp_path / "second")) if e.name == "poor")
    assert evidence.config_differences(ours, theirs) == message == evidence.config_differences(theirs, ours)


def test_replayed_arms_are_compared_whatever_machine_replayed_them(tmp_path):
    write(tmp_path, {**header(), "replay": True}, "none", "good")
    write(tmp_path, {**header(), "replay": True, "hardware": {"device": "fridge", "cores": 8}}, "none", "poor")
    found = {e.name: e for e in cells.collect(below(tmp_path))}
    assert evidence.config_differences(found["good"], found["poor"]) == []
    effect = compare({"metric": "tau", "of": "good", "over": "poor", "is": "more"}, gathered(tmp_path)).effect
    assert effect is not None and effect.value == pytest.approx(2)


@pytest.mark.parametrize(
    ("texts", "message"),
    [({}, []), ({"0": "same"}, ["prompts"]), ({str(q): "x" for q in range(24)}, ["prompts"]), ({"99": "new"}, [])],
)
def test_questions_that_both_sides_have_must_be_the_same_text(tmp_path, texts, message):
    """How many each side has is no matter."""

    def change(one):
        one.text = texts.get(one.question, f"text {one.question}") if one.drafter == "poor" else f"text {one.question}"
        return one

    write(tmp_path, header(), "good", change=change)
    write(tmp_path, header(), "poor", questions=7, change=change)
    found = {e.name: e for e in cells.collect(below(tmp_path))}
    assert (
        evidence.config_differences(found["good"], found["poor"])
        == message
        == evidence.config_differences(found["poor"], found["good"])
    )


def test_readers_are_told_effects_in_words(known):
    tau = {"metric": "tau", "of": "good", "is": "more"}
    speed, memory = {"metric": "speed_up", "of": "good"}, {"measured": "memory.peak", "of": "good"}
    expected_by_test = {
        "tau of good over poor: +2.00, claimed more": {**tau, "over": "poor"},
        "tau of good over poor: +2.00, claimed at least 0.5": {**tau, "over": "poor", "by": 0.5},
        "tau of good: 4.00 [3.97, 4.03], claimed at least 2.5": {**tau, "than": 2.5},
        "tau of good: 4.00 [3.97, 4.03], claimed 1.9 to 2.1": {"metric": "tau", "of": "good", "than": 2, "within": 0.1},
        "speed-up of good: 2.01 [2.01, 2.01], claimed at least 1.5": {**speed, "than": 1.5, "is": "more"},
        "speed-up of good: 2.01 [2.01, 2.01], claimed at most 1.5": {**speed, "than": 1.5, "is": "less"},
        "speed-up of good: 2.01 [2.01, 2.01], claimed 1.8 to 2.2": {**speed, "than": 2.0, "within": 0.1},
        "peak memory of good over poor: 0.90 [": {**memory, "over": "poor", "is": "less"},
        "tau of good at coding over all others: +0.00 [": {**tau, "at": {"category": "coding"}, "over_at": {}},
        "tau of good at T=1 over greedy: no rows of good": {**tau, "at": {"temperature": 1}, "over_at": {}},
        "tau of good over b: no rows of good": {**tau, "over_at": {"dataset": "b"}},
        "tau of good at b over a: no rows of good": {**tau, "at": {"dataset": "b"}, "over_at": {}},
    }
    study = {**STUDY, "claims": [{**CLAIM, "tests": [test]} for test in expected_by_test.values()]}
    for expected, found in zip(expected_by_test, judge_study("s", study, known.entries), strict=True):
        assert found.summary.startswith(expected), found.summary
    assert claim_text.words("link.up") == "link: up" and claim_text.words("alpha2") == "acceptance of step 3"


def test_the_tally_counts_verdicts_and_leaves_out_what_there_is_none_of():
    kinds = [REPRODUCED, NOT_TESTABLE, REPRODUCED, NOT_RUN]
    verdicts = [ClaimVerdict("s", CLAIM, (), kind, "message") for kind in kinds]
    assert list(claims.tally(verdicts).items()) == [(REPRODUCED, 2), (NOT_TESTABLE, 1), (NOT_RUN, 1)]
    assert claims.cells(verdicts[0]) == ["x", "x", "x", "message", REPRODUCED]


def test_what_was_not_run_says_how_to(known):
    study = {**STUDY, "claims": [{**CLAIM, "tests": [{"metric": "tau", "of": "good", "than": 1, "is": "more"}]}]}
    (found,) = judge_study("elsewhere", study, known.entries)
    assert found.verdict == NOT_RUN and found.summary == "study elsewhere was not run"


def test_latency_is_a_sequences_own_time_whatever_its_batch_decoded(tmp_path):
    """Of 36 tokens behind the first the share of the batch took 18 s, the sequence itself waited 72 s."""
    together = header()
    together["config"] = {**together["config"], "batch": 4}

    def batched(r):
        return replace(r, batch=Batched(4, 4 * len(r.tokens), 1.0, 80.0, 72.0))

    write(tmp_path, header(), "none", "good")
    write(tmp_path, together, "none", "good", change=batched)
    known = gathered(tmp_path, varies=["batch"])
    for at, expected in (({}, 500.0), ({"batch": 4}, 72000 / np.mean([len(r.tokens) - 1 for r in rows("good")]))):
        e = known.find("good", at, timed=True)
        assert float(rate(e, "token_ms")(e.totals.pooled)) == pytest.approx(expected, rel=0.05)
    test = {"metric": "token_ms", "of": "good", "at": {"batch": 4}, "over_at": {}, "is": "more"}
    assert verdict(test, known) == REPRODUCED


def test_batches_are_compared_only_where_a_study_says_so(tmp_path):
    """Rows of a batch are another cell's; by default a claim is about one sequence at a time."""
    together = header()
    together["config"] = {**together["config"], "batch": 4}
    write(tmp_path, header(), "none", "good", "mixed")

    def slower(r):
        return replace(r, decode_s=2 * r.decode_s) if r.drafter == "good" else r

    write(tmp_path, together, "none", "good", change=slower)
    test = {"metric": "speed_up", "of": "good", "at": {"batch": 4}, "over_at": {}, "is": "less"}
    known = gathered(tmp_path, varies=["batch"])
    found = compare(test, known)
    assert found.effect is not None and found.effect.value == pytest.approx(0.5)
    assert known.find("good", None, timed=True).batch == 1 and known.find("mixed", {"batch": 4}, timed=True) is None
    assert verdict(test, known) == REPRODUCED
    apart = gathered(tmp_path)
    assert compare(test, apart).effect is None and "batch" in compare(test, apart).reason
    assert "a batch of 4 over one sequence" in claim_text.describe(test, None, "no", apart.place)
