"""Studies: arms side by side in one cell, trained where they must be, judged only on what was measured alike."""

import copy
import json
import re

import pytest
from command_line import TWO, call, read_rows, study
from conftest import settled
from fixtures import arm, random_row, settings

from specbench.common import storage
from specbench.evaluation import study_runs
from specbench.records import blocks, studies
from specbench.records.blocks import Block, read_block
from specbench.records.rows import Measurement
from specbench.records.schema import WEIGHTS
from specbench.records.trainings import Member, training_of
from specbench.reporting import cells, claims
from specbench.reporting.claims import compare, judge_study
from specbench.reporting.evidence import Evidence

TRAINED = """\
title: A trained drafter
source: [nowhere]
cells: [[dataset=mtbench, data.limit=2]]
arms:
  short:
    run: [drafter=eagle2, ++drafter.noise=0.1]
    seeds: [0, 1]
    train: [train.settings.steps=2, train.batch=2, "train.text.path=HOME/talk.json", train.text.wheel=null,
            train.corpus.source=text, train.corpus.validation=4, ~recipe]
  same: {run: [drafter=eagle2, tree=chain], weights: short}
claims:
  - {says: it emits, source: nowhere, published: much, tests: [{metric: tau, of: short, than: 0.5, is: more}]}
"""

EARLY = """\
title: Early
source: [nowhere]
cells:
  - [dataset=mtbench, data.limit=2]
  - [dataset=mtbench, data.limit=3, decode.max_new_tokens=9]
arms:
  fit:
    run: [drafter=eagle2, tree=rate]
    train: [train.settings.steps=20, train.batch=2, "train.text.path=HOME/talk.json", train.text.wheel=null,
            train.corpus.validation=8, train.corpus.answer_tokens=20, train.settings.vocabulary=32, ~recipe]
  chain: {run: [drafter=eagle2, tree=chain], weights: fit}
claims: []
"""


def test_first_rows_come_before_costs_are_timed(home, tmp_path):
    """Of a study whose trees are fitted the other arms answer the first question, in a block of its own."""
    message = study(home, EARLY, "early", f"results={tmp_path}", "memorys=1", ok=False)
    assert "memorys: no such option; did you mean memory" in message
    own = f"--config-dir={home / 'conf'}", "study=early", f"results={tmp_path}"
    done = call(home, "study", *own, SPECBENCH_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr[-3000:]
    early, whole, _ = blocks.below(tmp_path / "early" / "tiny")
    assert list(read_block(early)[0]["arms"]) == ["none", "chain@0"]
    first_question = [(r.drafter, r.turn) for r in read_rows(early)[1]]
    assert first_question == [("none", 0), ("chain@0", 0), ("none", 1), ("chain@0", 1)]
    rows = [(r.question, r.drafter, r.turn) for r in read_rows(whole)[1]]
    assert rows[:4] == [("0", "none", 0), ("0", "fit@0", 0), ("0", "none", 1), ("0", "fit@0", 1)] and len(rows) == 4 + 6
    first, timing = done.stderr.index("machine "), done.stderr.index("timing cycles")
    assert first < timing and "=>" not in done.stderr[:timing] and "with the cells behind it" in done.stderr


def test_arms_decode_the_same_prompts_beside_one_baseline_and_are_judged(home, tmp_path):
    output = study(home, TWO, "two", f"results={tmp_path}")
    output = " ".join(output.split())
    assert re.search(r"preliminary, \d of 20(, [a-z ]+)?: trees accept more", output), (
        output
    )  # on a busy machine it says so
    assert "not testable here: a GPU is fast" in output and "needs a GPU" in output
    folder = tmp_path / "two" / "tiny"
    (decoded,), (replayed,) = (blocks.below(folder / f"mtbench-greedy-12{mode}") for mode in ("", "-replayed"))
    header, rows = read_rows(decoded)
    assert list(header["arms"]) == ["none", "eagle2", "chain"] and header["study"] == "two"
    assert header["arms"]["chain"]["drafter"]["growth"] != header["arms"]["eagle2"]["drafter"]["growth"]
    assert len(rows) == 3 * 3 * 2 and [r.drafter for r in rows[:3]] == ["none", "eagle2", "chain"]  # in turn
    assert rows[6].drafter == "none" and rows[7].drafter == "chain"  # the next question begins with another one
    by_key = {r.key: r for r in rows}
    header, again = read_rows(replayed)
    assert header["replay"] and len(again) == 3 * 6 * 2
    for row in (r for r in again if r.drafter != "none"):
        assert row.replayed and row.decode_s == row.draft_s == row.target_s == row.prefill_s == 0
        assert row.draft_passes >= len(row.accepted)
        assert row.drafter != "eagle2" or sum(n for n, _, _ in row.confidence) > 0
        if row.key in by_key:  # the same cycles as decoding had
            same = by_key[row.key]
            assert (row.tokens, row.accepted, row.drafted, row.nodes, row.ranks, row.passes) == (
                same.tokens, same.accepted, same.drafted, same.nodes, same.ranks, same.passes,
            )  # fmt: skip
    before = {path: path.read_bytes() for path in blocks.below(tmp_path)}
    study(home, TWO, "two", f"results={tmp_path}")
    assert {path: path.read_bytes() for path in blocks.below(tmp_path)} == before, "what was there was measured again"


def test_arms_are_trained_once_per_seed_and_their_seeds_pooled(home, tmp_path):
    output = study(home, TRAINED, "trained", f"results={tmp_path}")
    assert "it emits" in output
    (path,) = blocks.below(tmp_path)
    header, _ = read_block(path)
    assert list(header["arms"]) == ["none", "short@0", "short@1", "same@0", "same@1"]
    assert {a.get("of") for a in header["arms"].values()} == {None, "short", "same"}
    trained = list((home / "cache" / "studies").glob("*/provenance.json"))
    assert len(trained) == 2 and all(json.loads(path.read_text())["steps"] == 2 for path in trained)
    entries = {e.name: e for e in cells.collect([path])}
    assert set(entries) == {"none", "short", "same"} and entries["short"].seeds == 2
    assert entries["short"].summary.prompts == 2 * entries["none"].summary.prompts


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (("title:", "tittle:"), (), "study.tittle"),
        (("drafter=eagle2, tree=chain", "tree=chain"), (), "arm chain names no drafter"),
        (("over: chain", "over: rope"), (), "no arm is called rope"),
        (("[drafter=eagle2, tree", "[drafter=eagle9, tree"), (), "eagle9"),
        (("metric: tau", "metric: beauty"), (), "must be 'tau'"),
        (("is: more}]}\n  -", "is: more, within: 0.1}]}\n  -"), (), "a test expects"),
        (("title", "title"), ("arms=[eagle9]",), "no arm eagle9"),
        (("title", "title"), ("drafter=hass",), "arms=[NAME,…]"),
        (("title", "title"), ("cells=[2]",), "no cell 2; there are 0 to 1"),
        (("varies:", "needs: {device: cuda}\nvaries:"), (), "not testable here: it needs a GPU"),
        (("replay=true", "replay=true, sampler.temperature=1"), (), "replay=true follows"),
    ],
)
def test_a_wrong_study_is_one_clear_line(home, tmp_path, change, arguments, message):
    line = study(home, TWO.replace(*change), "wrong", f"results={tmp_path}", *arguments, ok=False)
    assert message in line, line


def test_an_arm_that_is_not_to_be_had_costs_itself_alone(home, tmp_path):
    text = TWO.replace("tree=chain, drafter.weights=HOME/weights/eagle2", "tree=chain, drafter.weights=HOME/nowhere")
    folder = home / "conf"
    study(home, TWO, "lost")
    (folder / "study" / "lost.yaml").write_text(text.replace("HOME", str(home)))
    done = call(home, "study", f"--config-dir={folder}", "study=lost", f"results={tmp_path}")
    assert done.returncode == 2 and "chain on mtbench" in done.stderr and "1 arms are missing" in done.stderr
    for path in blocks.below(tmp_path):
        assert {r.drafter for r in read_rows(path)[1]} == {"none", "eagle2"}
    assert len(list(tmp_path.rglob("chain-*.failed.json"))) == 2  # one a cell


def test_a_drafter_that_cannot_sample_is_left_out_where_the_others_do(home, tmp_path):
    text = TWO.replace("limit=6, replay=true", "limit=3, sampler.temperature=1")
    text = text.replace(
        "chain: {run: [", "chain: {run: [drafter=ouroboros, drafter.base.weights=null]}\n  other: {run: ["
    ).replace("over: chain", "over: other")
    study(home, text, "cold", f"results={tmp_path}")
    again = call(home, "study", f"--config-dir={home / 'conf'}", "study=cold", f"results={tmp_path}")
    assert again.returncode == 0 and again.stderr.count("chain is left out at T=1") == 1
    drafters = {temperature: set() for temperature in (0, 1)}
    for path in blocks.below(tmp_path):
        header, rows = read_rows(path)
        drafters[header["config"]["sampler"]["temperature"]] = {r.drafter for r in rows}
    assert drafters == {0: {"none", "eagle2", "chain", "other"}, 1: {"none", "eagle2", "other"}}
    assert not list(tmp_path.rglob("*.failed.json"))


def test_prompts_that_are_not_to_be_had_cost_their_cell_alone(home, tmp_path):
    text = TWO.replace("[dataset=mtbench, data.limit=3]", "[dataset=gsm8k, data.root=HOME/nowhere, data.limit=3]")
    (home / "conf" / "study").mkdir(parents=True, exist_ok=True)
    (home / "conf" / "study" / "promptless.yaml").write_text(text.replace("HOME", str(home)))
    done = call(home, "study", f"--config-dir={home / 'conf'}", "study=promptless", f"results={tmp_path}")
    assert done.returncode == 2 and "cell 1 of 2" in done.stderr
    assert "1 cells and 0 arms are missing" in done.stderr
    assert [path.parent.name for path in blocks.below(tmp_path)] == ["mtbench-greedy-12-replayed"]


def test_a_replay_has_the_precision_that_it_needs():
    for replay, dtype, expected in [
        ("true", "auto", "float32"),
        ("false", "auto", "auto"),
        ("true", "bfloat16", "bfloat16"),
    ]:
        assert settled("eagle2", f"replay={replay}", f"model.dtype={dtype}").model.dtype == expected


def test_peak_memory_is_measured_beside_timed_rows_or_where_it_is_asked_for():
    for replay, measure, users, memory in [
        ("false", {}, [], 1),
        ("true", {}, [], 0),
        ("true", {"memory": 5}, [], 5),
        ("true", {}, ["memory=2"], 2),
    ]:
        base = settled("eagle2", f"replay={replay}", *users)
        message = {"cells": [["dataset=mtbench", f"replay={replay}"]], "measure": measure}
        assert study_runs.repetitions(message, 0, base, users)["memory"] == memory


def test_a_study_of_memory_measures_it_of_each_data_set_once():
    places = ("alpaca replay=true", "mtbench", "mtbench sampler.temperature=1", "gsm8k", "gsm8k batch=2")
    cells = [f"dataset={place}".split() for place in places]
    study = {"cells": cells, "measure": {"memory": 5, "drafting": 3}}
    base = settled("eagle2")
    found = [study_runs.repetitions(study, number, base, []) for number in range(len(cells))]
    assert found == [{}, {"memory": 5, "bandwidth": 1, "drafting": 3}, {}, {"memory": 5}, {}]


def test_drafters_beyond_the_studys_arms_and_other_datasets_can_be_named(home, tmp_path):
    weights = f"drafter.weights={home / 'weights' / 'eagle2'}"
    study(home, TWO, "two", f"results={tmp_path}", "arms=[none,eagle1]", "datasets=[mtbench]", "cells=[0]", weights)
    (path,) = blocks.below(tmp_path)
    assert list(read_block(path)[0]["arms"]) == ["none", "eagle1"] and not path.parent.name.endswith("replayed")


# Only like with like ---------------------------------------------------------------------------------------------------

SPEC = {
    "title": "x",
    "source": ["x"],
    "cells": [["dataset=mtbench"]],
    "arms": {"a": {"run": ["drafter=eagle2"]}, "b": {"run": ["drafter=hass"]}},
}


def entries(folder, *headers):
    """Entries of cells with these headers, twelve random rows a drafter."""
    import numpy as np

    for number, header in enumerate(headers):
        cell = Block(folder / "s" / "m" / f"mtbench-{number}", {"study": "s", **header})
        for name in header["arms"]:
            for q in range(6):
                cell.write(random_row(np.random.default_rng(q), name, str(q))[0])
    return cells.collect(blocks.below(folder), folder)


def of(*names, **more):
    """A header with arms a and b apart, so that one cell holds one of them."""
    return settings(*names, dataset="mtbench", **more)


ALTERED = {
    "machine": {"hardware": {"device": "toaster", "cores": 2}},
    "machine of as many threads": {"config": {**of()["config"], "threads": 1}},
    "dtype": {"target": {"dtype": "bfloat16", "parameters": 100}},
    "length": {"config": {**of()["config"], "decode": {"max_new_tokens": 24}}},
    "target": {"target": {"dtype": "float32", "parameters": 100, "fingerprint": "another"}},
    "tree": {"arms": {"none": arm("none"), "b": arm("b", drafter={"name": "b", "growth": {"depth": 3}})}},
}


@pytest.mark.parametrize("aspect", ALTERED)
def test_rows_that_were_not_measured_alike_are_not_compared(tmp_path, aspect):
    tree = {"name": "a", "growth": {"depth": 6}}
    first = of("a") | {"arms": {"none": arm("none"), "a": arm("a", drafter=tree)}}
    second = of("b") | {"arms": {"none": arm("none"), "b": arm("b", drafter={**tree, "name": "b"})}}
    named = aspect.partition(" ")[0]  # counts are the same on every machine
    test = {"metric": "speed_up" if named == "machine" else "tau", "of": "a", "over": "b", "is": "more"}
    alike = Evidence(SPEC, entries(tmp_path / "alike", first, second))
    assert compare(test, alike).effect is not None
    apart = Evidence(SPEC, entries(tmp_path / "apart", first, {**second, **ALTERED[aspect]}))
    found = compare(test, apart)
    assert found.effect is None and found.reason == f"rows that differ in {named} are not compared"
    verdict = judge_study("s", {**SPEC, "claims": [{**CLAIM, "tests": [test]}]}, apart.entries)[0]
    assert verdict.verdict == claims.NOT_RUN and named in verdict.summary
    if aspect in ("tree", "dtype", "length"):
        apart.study = {**SPEC, "varies": [aspect]}
        assert compare(test, apart).effect is not None, "the study is about that difference"


CLAIM = {"says": "x", "source": "x", "published": "x"}


def test_rows_of_another_study_answer_no_claim(tmp_path):
    test = {"metric": "tau", "of": "a", "over": "b", "is": "more"}
    spec = {**SPEC, "claims": [{**CLAIM, "tests": [test]}]}
    found = entries(tmp_path, of("a", "b"))
    assert judge_study("s", spec, found)[0].verdict != claims.NOT_RUN
    assert judge_study("t", spec, found)[0].verdict == claims.NOT_RUN


def test_needs_are_read_from_the_rows(tmp_path):
    def weights(tokens):
        return {"history": [{"tokens": 1}], "tokens_seen": tokens, "parameters": 1, "steps": 1, "hours": 0.0,
                "data": {"unique_tokens": 1}, "machine": {"device": "toaster", "cores": 1}}  # fmt: skip

    header = of("a", "b") | {"target": {"dtype": "float32", "parameters": 100, "vocabulary": 500, "device": "cpu"}}
    header["arms"] = {"none": arm("none"), "a": arm("a", weights=weights(100)), "b": arm("b", weights=weights(200))}
    for needs, message in (
        ({"device": "cuda"}, ["a GPU"]),
        ({"vocabulary": 501}, ["a target with 501 ids"]),
        ({"vocabulary": 500}, []),
        ({"billions": 7}, ["a target of 7 billion parameters"]),
        ({"trained": 150}, ["drafters trained on 0.00015 M tokens"]),
        ({"trained": 100}, []),
        ({"alike": True}, ["drafters trained on as many tokens each"]),
        ({"pretrained": "a"}, ["a pretrained draft model as a"]),
        ({"pretrained": "none"}, []),
        ({"project": "batched decoding"}, ["batched decoding"]),
    ):
        assert studies.unmet(needs, header, cuda=False) == message
        test = {"metric": "tau", "of": "a", "over": "b", "is": "more"}
        spec = {**SPEC, "claims": [{**CLAIM, "needs": needs, "tests": [test]}]}
        found = entries(tmp_path / str(needs), copy.deepcopy(header))
        verdict = judge_study("s", spec, found)[0]
        assert (verdict.verdict == claims.NOT_TESTABLE) == bool(message)
        assert not message or ("needs " + message[0] in verdict.summary and "Measured nevertheless" in verdict.summary)
    assert studies.unmet({"device": "cuda"}, None, cuda=True) == []


def test_measurements_are_compared_from_five_repetitions_on(tmp_path):
    test = {"measured": "memory.peak", "of": "a", "over": "b", "is": "less"}
    found = entries(tmp_path, of("a", "b"))
    cell = Block(found[0].path.parent, {"study": "s", **of("a", "b")})
    for repetition in range(5):
        assert compare(test, Evidence(SPEC, cells.collect(blocks.below(tmp_path)))).effect is None
        for name, peak in (("a", 90.0), ("b", 100.0)):
            cell.write(Measurement(name, "memory", repetition, {"peak": peak + repetition / 10, "kv": 1.0}))
    found = compare(test, Evidence(SPEC, cells.collect(blocks.below(tmp_path))))
    assert found.effect is not None and found.effect.value == pytest.approx(90.2 / 100.2) and found.effect.high < 1
    assert claims.judge(test, found) == claims.REPRODUCED


def test_temperatures_are_compared_where_a_study_is_about_them(tmp_path):
    warm = of("a") | {"config": {**of()["config"], "sampler": {"temperature": 1.0}}}
    test = {"metric": "tau", "of": "a", "at": {"temperature": 1.0}, "over_at": {}, "is": "less"}
    known = Evidence(SPEC, entries(tmp_path, of("a"), warm))
    assert compare(test, known).reason == "rows that differ in temperature are not compared"
    known.study = {**SPEC, "varies": ["temperature"]}
    assert compare(test, known).effect is not None


def test_a_training_that_starts_from_other_weights_is_another_one(home, monkeypatch):
    spec = {"run": ["drafter=eagle2"], "train": ["train.start=start/${model.name}"], "seeds": [0]}
    monkeypatch.setattr(storage, "PROJECT", home)
    (home / "start" / "smollm2-135m").mkdir(parents=True)
    names = []
    for content in ("one", "two", "one"):
        (home / "start" / "smollm2-135m" / WEIGHTS).write_text(content)
        names.append(training_of(Member("a", 0, "a@0", spec), {**SPEC, "arms": {"a": spec}}, [])[0])
    assert names[0] == names[2] != names[1]
