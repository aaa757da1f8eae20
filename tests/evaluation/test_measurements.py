"""What is measured beside rows: where seconds go, on a clock that only chosen functions move; resuming; a whole study."""

import copy
import os
import subprocess
import sys
import time
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import kill_after_rows, start, study
from conftest import DRAFTERS, ROOT, TRAINED, make, tiny
from fixtures import block, ledger, random_row, settings
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from drafters.none import NoDrafter
from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError
from specbench.config import run_spec
from specbench.config.cli import composed
from specbench.engine.backends import packed_linear
from specbench.engine.verify import Lossless
from specbench.evaluation import costs, isolated, measurements
from specbench.evaluation.runner import BoundDrafter
from specbench.records import metrics, studies
from specbench.records.blocks import below, read_block
from specbench.records.rows import Measurement, Row
from specbench.reporting import cells, command_output, console
from specbench.reporting.bundle import Report, Sources
from specbench.tuning import target_cost

PROMPTS = [[3, 4, 5, 6], [7, 8, 9]]
TOKENS = 12


def bound(name, target, *overrides):
    if name == "none":
        drafter = NoDrafter()
        drafter.bind(target)
    else:
        drafter = make(name, target, *overrides)
    return BoundDrafter(name, drafter, Lossless())


def state(target, drafter):
    """What stands on these objects themselves, functions that hide their class's among it."""
    inner = getattr(drafter, "base", drafter)
    owners = [target, target.head, drafter, inner, *getattr(inner, "modules", list)()]
    wrapped = ("forward", "run", "score", "network", "target_logits")
    return [(id(owner), sorted(vars(owner)), [vars(owner).get(name) for name in wrapped]) for owner in owners]


class Ticking:
    """A clock that stands still unless a function that was made to take seconds runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def slow(self, monkeypatch, owner, name, seconds):
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, timed)


@pytest.fixture
def ticking(monkeypatch):
    """A chain of three from an EAGLE head: each call of target, head, network and `propose` takes its own seconds."""
    clock, target = Ticking(), tiny()
    side = bound("eagle2", target, "tree=chain", "tree.gamma=3")
    monkeypatch.setattr(costs, "Clock", lambda device: clock)
    for owner, name, seconds in ((target, "run", 7), (target.head, "forward", 3), (side.drafter, "network", 5)):
        clock.slow(monkeypatch, owner, name, seconds)
    clock.slow(monkeypatch, side.drafter, "propose", 2)
    return target, side


def test_drafting_goes_to_head_network_and_rest(ticking):
    found = costs.drafting(*ticking, PROMPTS, TOKENS)
    parts = {part: found[part] * found["ms"] for part in ("head", "network", "rest")}
    assert sum(parts.values()) == pytest.approx(found["ms"])
    assert parts["head"] == pytest.approx(3 * 3000), "the target's own pass over its head is no drafting"
    assert parts["rest"] == pytest.approx(2000)
    assert 2 * 5000 < parts["network"] < 3 * 5000  # two expansions, and an observation of all but the last cycle


def test_overhead_is_what_no_forward_takes(ticking):
    found = costs.overhead(*ticking, PROMPTS, TOKENS)
    assert found["ms_per_cycle"] == pytest.approx(2000)
    assert 2 / (2 + 9 + 10 + 15) < found["share"] < 2 / (2 + 9 + 10 + 7)


def test_no_pass_of_a_lean_target_is_overhead(monkeypatch):
    clock, target = Ticking(), tiny()
    target.optimize_for_inference()
    clock.slow(monkeypatch, target.fused, "score", 7)
    monkeypatch.setattr(costs, "Clock", lambda device: clock)
    assert costs.overhead(target, bound("none", target), PROMPTS, TOKENS)["share"] == 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_measuring_changes_nothing_of_what_it_measures(name):
    target = tiny()
    side = bound(name, target)
    answer = costs._answer(target, side, PROMPTS[0], TOKENS)
    before = state(target, side.drafter)
    if name != "none":
        found = costs.drafting(target, side, PROMPTS, TOKENS)
        assert all(0 <= found[part] <= 1 for part in ("head", "network", "rest")) and found["ms"] > 0
        if name in TRAINED:
            assert found["head"] > 0 and found["network"] > 0, "a drafter's own functions were not found"
    assert 0 < costs.overhead(target, side, PROMPTS, TOKENS)["share"] < 1
    assert state(target, side.drafter) == before
    assert costs._answer(target, side, PROMPTS[0], TOKENS) == answer


@pytest.mark.parametrize("name", TRAINED)
def test_a_network_is_found_where_a_lean_forward_runs_past_its_module(name):
    target = tiny()
    side = bound(name, target)
    side.drafter.optimize_for_inference()
    assert costs.drafting(target, side, PROMPTS, TOKENS)["network"] > 0


def test_a_target_pass_is_timed_by_its_nodes(monkeypatch):
    clock, target = Ticking(), tiny()
    target.fused = None  # whose passes are `run`
    monkeypatch.setattr(target_cost, "Clock", lambda device: clock)
    run = target.run

    def timed(tokens, *rest):
        clock.now += tokens.shape[1] / 1000
        return run(tokens, *rest)

    monkeypatch.setattr(target, "run", timed)
    assert target_cost.target_pass(target, PROMPTS[0]) == pytest.approx({f"ms_{n}": n for n in target_cost.NODES})


@pytest.mark.parametrize("name", ["none", "vanilla", "prompt_lookup"])
def test_transformers_gives_the_same_answers_whatever_its_configuration_says(name):
    target = tiny()
    side = bound(name, target)
    answer = costs._answer(target, side, PROMPTS[0], TOKENS)
    target.model.generation_config.update(eos_token_id=answer[3], max_new_tokens=2, repetition_penalty=2.0)
    own = target.model.generation_config
    before = copy.deepcopy(own.to_dict())
    found = costs.against_transformers(target, side, PROMPTS, TOKENS)
    assert found["identical"] == 1 and found["ratio"] == pytest.approx(found["ours"] / found["theirs"])
    assert target.model.generation_config is own and own.to_dict() == before
    assert name != "vanilla" or side.drafter.lm.model.generation_config.num_assistant_tokens != 4


OTHERS = [("vanilla", "tree=eagle2"), ("eagle2",), ("none",), ("suffix",), ("ouroboros",)]
LOOKUPS = [("prompt_lookup", "drafter.rule=latest"), ("prompt_lookup", "drafter.matches=2")]


def test_only_draft_models_in_chains_and_its_own_prompt_lookup_have_a_counterpart_in_transformers():
    target = tiny()
    assert list(costs.assistance(bound("vanilla", target))) == ["assistant_model"]
    options = costs.assistance(bound("prompt_lookup", target, "drafter.length=7", "drafter.max_ngram=4"))
    assert options == {"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 4}
    assert not any(costs.assistance(bound(name, target, *more)) for name, *more in [*OTHERS, *LOOKUPS])


def test_prompt_lookup_drafts_what_transformers_drafts(monkeypatch):
    """Behind the same text the same, cycle by cycle of one answer; Transformers' first draft is the prompt's own."""
    target, ours, theirs = tiny(), {}, {}
    target.stop_ids = ()
    side = bound("prompt_lookup", target, "drafter.length=4")
    propose, candidates = side.drafter.propose, PromptLookupCandidateGenerator.get_candidates

    def proposing(*args):
        tree = propose(*args)
        ours[tuple(side.drafter.text)] = tree.tokens[1:].tolist()
        return tree

    def found(self, ids, **more):
        whole = candidates(self, ids, **more)
        theirs[tuple(ids[0].tolist())] = whole[0][0, ids.shape[1] :].tolist()
        return whole

    side.drafter.propose = proposing
    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", found)
    prompt = [3, 14, 15, 9, 26, 5] * 3
    assert costs.against_transformers(target, side, [prompt], 60)["identical"] == 1
    both = [text for text in ours.keys() & theirs.keys() if len(text) + 1 < len(prompt) + 60]  # it leaves room for a bonus
    assert all(ours[text] == theirs[text] for text in both)
    assert len(both) > 0.8 * len(theirs) and sum(map(bool, theirs.values())) > 10


def test_a_training_step_updates_what_is_trained():
    target = tiny()
    drafter = make("hass", target)
    own = [p for p in drafter.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in own]
    found = costs.training(target, drafter)
    assert found["parameters"] == sum(p.numel() for p in own) and found["seconds"] > 0 and found["peak"] >= 0
    assert found["tokens_per_s"] == pytest.approx(8 * 256 / found["seconds"])
    assert all(not torch.equal(a, b) for a, b in zip(own, before, strict=True))


# So many times over, in turn -------------------------------------------------------------------------------------------


ARMS = settings("a", "b@0", "b@1")


def side(label, **description):
    return SimpleNamespace(label=label, description=description)


def taken(monkeypatch, folder, repetitions, broken=(), budget=None, header=ARMS):
    """Take a quantity called drafting of three arms, one of them with two seeds; what was taken, in order."""
    order = []

    def take(setting, arm):
        order.append(arm.label)
        if arm.label in broken:
            raise ValueError("boom")
        return {"ms": float(len(order))}

    monkeypatch.setitem(measurements.QUANTITIES, "drafting", measurements.Quantity(take, lambda arm: arm.label != "none"))
    sides = [side("none"), side("a"), side("b@0", of="b"), side("b@1", of="b")]
    known = ledger(folder, header)
    return measurements.measure({"drafting": repetitions}, known, None, sides, budget or Budget()), order


def test_arms_are_measured_in_turn_and_what_is_there_is_not_measured_again(tmp_path, monkeypatch):
    assert taken(monkeypatch, tmp_path, 2) == ((0, 0), ["a", "b@0"] * 2)
    assert taken(monkeypatch, tmp_path, 3) == ((0, 0), ["a", "b@0"])
    found = [m for path in below(tmp_path) for m in read_block(path)[1]]
    assert sorted((m.repetition, m.drafter) for m in found) == [(r, n) for r in range(3) for n in ("a", "b@0")]
    assert taken(monkeypatch, tmp_path, 3) == ((0, 0), [])


def test_what_another_kind_of_machine_measured_is_measured_again(tmp_path, monkeypatch):
    taken(monkeypatch, tmp_path, 2, header=ARMS | {"hardware": {"device": "fridge", "cores": 1}})
    assert taken(monkeypatch, tmp_path, 1) == ((0, 0), ["a", "b@0"])
    assert taken(monkeypatch, tmp_path, 1, header=ARMS | {"commit": "another"}) == ((0, 0), [])


def test_nothing_is_measured_when_time_is_up(tmp_path, monkeypatch):
    assert taken(monkeypatch, tmp_path, 2, budget=Budget(0.0)) == ((0, 4), []) and not list(tmp_path.iterdir())


def test_an_arm_that_cannot_be_measured_costs_itself_alone(tmp_path, monkeypatch, capsys):
    assert taken(monkeypatch, tmp_path, 3, broken=["a"]) == ((1, 0), ["a", "b@0", "b@0", "b@0"])
    message = [x for x in capsys.readouterr().err.splitlines() if x.startswith("specbench: ")]
    assert len(message) == 1 and message[0].startswith("specbench: drafting of a not measured: ValueError: boom")


def test_repetitions_of_what_varies_decode_other_prompts():
    load = measurements.Workload(None, [[0]], 8, None, [[i] for i in range(10)])
    chosen = [[prompt[0] for prompt in load.of(repetition).prompts] for repetition in range(4)]
    assert chosen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [2, 3, 4, 5]]
    assert measurements.Workload(None, [[0]], 8, None).of(3).prompts == [[0]]


def test_studies_name_the_quantities_that_there_are():
    assert set(typing.get_args(studies.Measured)) == set(measurements.QUANTITIES)


def test_decoding_beside_work_is_measured_and_the_work_ends(monkeypatch):
    started = []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    target = tiny()
    found = costs.beside_work(target, bound("none", target), [[5, 6, 7]], 8)
    assert found["ratio"] == pytest.approx(found["beside"] / found["alone"]) and found["beside"] > 0
    assert len(started) == 2 and all(process.returncode is not None for process in started)  # one warms up


# A study ---------------------------------------------------------------------------------------------------------------

COSTS = """\
title: What it costs
source: [nowhere]
varies: [tree]
cells:
  - [dataset=mtbench, data.limit=1, replay=true]
  - [dataset=mtbench, data.limit=1]
  - [dataset=mtbench, data.limit=2]
arms:
  eagle2: {run: [drafter=eagle2, drafter.weights=HOME/weights/eagle2]}
  chain: {run: [drafter=eagle2, tree=chain, drafter.weights=HOME/weights/eagle2]}
measure: {drafting: 5, overhead: 1, target_pass: 2, generate: 1, busy: 1}
claims:
  - {says: a tree takes time, source: nowhere, published: more,
     tests: [{measured: drafting.ms, of: eagle2, over: chain, is: more}]}
  - {says: a pass takes time, source: nowhere, published: more,
     tests: [{measured: target_pass.ms_1, of: none, than: 0.000001, is: more}]}
  - {says: drafting takes time, source: nowhere, published: more,
     tests: [{measured: drafting.ms, of: eagle2, than: 0.000001, is: more}]}
"""


def measured(*paths):
    """What these blocks measured, how often of whom."""
    found = [r for path in paths for r in read_block(path)[1] if isinstance(r, Measurement)]
    assert len({r.key for r in found}) == len(found)
    counts: dict[tuple[str, str], int] = {}
    for r in found:
        counts[r.what, r.drafter] = counts.get((r.what, r.drafter), 0) + 1
    return counts


def test_a_study_measures_in_one_cell_and_is_judged_on_it(home, tmp_path):
    output = study(home, COSTS, "costs", f"results={tmp_path}")
    output = " ".join(output.split())  # as the terminal had it, lines were broken
    assert "time of drafting a cycle of eagle2 over chain: " in output
    assert "reproduced: drafting takes time" in output
    assert "not run: a pass takes time" in output and "2 repetitions, where 5 make an interval" in output
    (replayed,) = below(tmp_path / "costs" / "tiny" / "mtbench-greedy-12-replayed")
    first, second = below(tmp_path / "costs" / "tiny" / "mtbench-greedy-12")
    assert [sum(isinstance(r, Row) for r in read_block(path)[1]) for path in (replayed, first, second)] == [6, 6, 6]
    assert measured(first) == {
        **{("drafting", arm): 5 for arm in ("eagle2", "chain")},
        **{("overhead", arm): 1 for arm in ("none", "eagle2", "chain")},
        ("target_pass", "none"): 2,
        ("generate", "none"): 1,
        ("busy", "none"): 1,
        ("bandwidth", "none"): 1,
    }
    assert measured(second) == measured(replayed) == {}


def test_a_killed_study_goes_on_with_what_was_not_measured(home, tmp_path):
    lines = COSTS[: COSTS.index("measure:")].splitlines(keepends=True)
    text = "".join(x for x in lines if not any(dropped in x for dropped in ("replay", "limit=2", "chain")))
    text += "measure: {drafting: 3, memory: 1, training: 1}\n"
    (home / "conf" / "study").mkdir(parents=True, exist_ok=True)
    (home / "conf" / "study" / "killed.yaml").write_text(text.replace("HOME", str(home)))
    own = f"--config-dir={home / 'conf'}", "study=killed", f"results={tmp_path}", "memory=1"
    question, wanted = 1 + 2 * 2 + 1, 2 + 1 + 3 + 1  # with header and end
    path, before = kill_after_rows(start(home, "study", *own), tmp_path, question + 2)
    assert 3 <= sum(measured(path).values()) < wanted
    study(home, text, "killed", f"results={tmp_path}", "memory=1")
    assert path.read_bytes() == before
    assert measured(*below(tmp_path)) == {  # each once: what was there was not measured again
        ("memory", "none"): 1,
        ("bandwidth", "none"): 1,
        ("memory", "eagle2"): 1,
        ("drafting", "eagle2"): 3,
        ("training", "eagle2"): 1,
    }
    records = [r for path in below(tmp_path) for r in read_block(path)[1]]
    found = {(r.what, r.drafter): r.values for r in records if isinstance(r, Measurement)}
    assert found["memory", "none"]["peak"] >= found["memory", "none"]["loaded"] > 2**20
    assert found["training", "eagle2"]["peak"] > 2**20 and found["training", "eagle2"]["tokens_per_s"] > 0


def test_a_measuring_process_that_is_killed_is_one_line():
    with pytest.raises(SpecBenchError, match="was killed while it measured; is there enough memory"):
        isolated.call(os._exit, 9)


def test_a_killed_process_takes_the_one_that_measures_with_it(tmp_path):
    place = tmp_path / "pid"
    work = f"(open({str(place)!r}, 'w').write(str(__import__('os').getpid())), __import__('time').sleep(600))"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"from specbench.evaluation import isolated; isolated.call(eval, {work!r})"], cwd=ROOT
    )
    assert until(lambda: place.exists() and place.read_text())
    child = int(place.read_text())
    os.kill(child, 0)  # it is there
    parent.kill()
    parent.wait()
    assert until(lambda: not alive(child)), "it waits for ever"


def test_a_process_that_measures_takes_the_products_that_were_timed_here(home):
    words = [f"model.path={home / 'model'}", "model.name=tiny", "model.wheel=null", "model.dtype=float32", "threads=1"]
    spec = run_spec.from_config(composed("run", [*words, "drafter=suffix"]))
    timed: packed_linear.Timed = {}
    loaded = isolated.loaded(spec, spec.make_drafter(), timed)
    assert loaded.packing.timed is timed and timed
    other = {key: tuple(not pays for pays in found) for key, found in timed.items()}
    before = dict(other)
    isolated.loaded(spec, spec.make_drafter(), other)
    assert other == before, "it was timed again"


def until(true):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not true():
        time.sleep(0.05)
    return true()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # nobody may collect it here


# A busy machine --------------------------------------------------------------------------------------------------------


def rows(speeds, others=None, replayed=False, link=None):
    """A baseline's rows of ten cycles each at these speeds."""
    found = []
    for i, speed in enumerate(speeds):
        row = Row("none", str(i), "c", 0, 5, [1] * 11, 0.5, 10 / speed, [0] * 10, [0] * 10, [0] * 10, [[]] * 10)
        row.others, row.replayed, row.link = others, replayed, link
        found.append(row)
    return found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (rows([10, 10, 10, 10], others=0.4), None),
        (rows([10, 10, 10, 10], others=0.6), "other processes kept 0.6 of its 2 cores"),
        (rows([10, 10, 10, 10], others=0.6, replayed=True), None),
        (rows([10, 10, 10, 10], others=1.6, link={"trips": 10}), None),  # the server works, as it should
        (rows([10, 10, 12.5, 12.5], others=1.6, link={"trips": 10}), "1.25 times as fast in one half"),
        (rows([10, 10, 11.9, 11.9]), None),
        (rows([10, 10, 12.5, 12.5]), "1.25 times as fast in one half"),
        (rows([12.5, 12.5, 10, 10]), "1.25 times as fast in one half"),
        (rows([12.5, 10, 10, 12.5]), None),
        (rows([10, 13]), None),  # two generations are no halves
        ([], None),
    ],
)
def test_a_busy_machine_is_told_from_its_rows(given, message):
    found = metrics.busy(given, 2)
    assert (found is None) == (message is None)
    assert message is None or (message in found and found.startswith("The machine was busy: "))


def test_other_drafters_speeds_are_no_drift():
    mixed = rows([10] * 4)
    for number, row in enumerate(rows([10, 10, 40, 40])):
        row.drafter = "eagle2"
        mixed.insert(2 * number, row)
    assert metrics.busy(mixed, 2) is None


def test_a_busy_machine_is_named_under_the_table_of_its_cell(tmp_path, capsys, monkeypatch):
    for dataset, others in (("calm", 0.1), ("disturbed", 1.5)):
        cell = block(tmp_path, settings("eagle2", dataset=dataset), dataset)
        for q in range(3):
            for who in ("none", "eagle2"):
                row, _ = random_row(np.random.default_rng(q), who, str(q))
                row.others = others
                cell.write(row)
    entries = cells.collect(below(tmp_path), tmp_path)
    assert {e.dataset: bool(e.busy) for e in entries} == {"calm": False, "disturbed": True}
    console.show(entries)
    monkeypatch.setattr("specbench.reporting.figures.draw_all", lambda *_: {})
    report = Report(Sources(tmp_path))
    report.write()
    page, readme = (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()
    for text in (capsys.readouterr().out, command_output.entries_markdown(entries)):
        assert text.count("The machine was busy") == 1
        assert text.index("calm") < text.index("disturbed") < text.index("The machine was busy")
    tables_beside = "".join(path.read_text() for path in (tmp_path / "tables").glob("*.md"))
    for text in (page, readme + tables_beside):
        assert "The machine was busy" in text
