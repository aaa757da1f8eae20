"""Evidence that accumulates: budgets, the plan of all studies, what is continued by another commit, and kills."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import TWO, arguments_of, call, environment, read_rows, run, start
from conftest import ROOT, tiny
from conftest import make as bound
from corpora import Numbers
from fixtures import settings

from specbench.common.budget import Budget, Pace, longest
from specbench.common.progress import span
from specbench.data.prompts import Question
from specbench.engine.decode import RunSettings
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.evaluation import plan, study_runs, workers
from specbench.evaluation.runner import Bench, BoundDrafter
from specbench.records import blocks, identity
from specbench.records.blocks import Ledger, read_block
from specbench.records.cell_options import CellOptions
from specbench.records.rows import QuestionEnd, Row

REPLAY = TWO.replace("  - [dataset=mtbench, data.limit=3]\n", "").replace(
    "data.limit=6", "data.limit=12, decode.max_new_tokens=12"
)


def replayed(home, tmp_path, name, *arguments, text=REPLAY):
    """A study of one replayed cell; what became of the command."""
    folder = home / "conf"
    (folder / "study").mkdir(parents=True, exist_ok=True)
    (folder / "study" / f"{name}.yaml").write_text(text.replace("HOME", str(home)))
    return call(home, "study", f"--config-dir={folder}", f"study={name}", f"results={tmp_path}", *arguments)


def planned(home, results, *names):
    return plan.all_tasks(plan.Scope(results, "tiny", folder=home / "conf" / "study"), names)


def rows_below(folder):
    return [(path, row) for path in blocks.below(folder) for row in read_rows(path)[1]]


# Budgets --------------------------------------------------------------------------------------------------------------


class Steps(Budget):
    """A budget that allows so many questions."""

    def __init__(self, count):
        super().__init__(1e9)
        self.count = count

    def allows(self, seconds):
        self.count -= 1
        return self.count >= 0


def test_whole_questions_are_decoded_as_long_as_they_fit(tmp_path):
    target = tiny()
    bound_drafters = [BoundDrafter(d, bound(d, target), Lossless()) for d in ("none", "eagle2")]
    questions = [Question(str(i), "c", (f"{i} 3 14 15", "9 26")) for i in range(5)]
    for allowed, done in ((2, 2), (1, 3), (9, 5)):
        bench = Bench(target, Numbers(), bound_drafters, Sampler(), RunSettings(max_new_tokens=8))
        ledger = Ledger(tmp_path, settings("eagle2"), "none", timed=True)
        bench.run(questions, ledger, Steps(allowed))
        whole = {
            (text, turn) for text, turn in ((r.text, r.turn) for _, r in rows_below(tmp_path) if r.drafter == "eagle2")
        }
        assert len(whole) == 2 * done, "a question was begun and not ended, or ended twice"
        assert ledger.pace() is not None, "what is left takes a time that this process knows by now"
    ends = [r for p in blocks.below(tmp_path) for r in read_block(p)[1] if isinstance(r, QuestionEnd)]
    assert len(ends) == 5 and all(end.generations == 4 and end.seconds > 0 for end in ends)
    assert ledger.pace() is not None and 0 < ledger.pace() < 60


def test_a_part_of_a_budget_is_of_what_is_left():
    assert 74 < Budget(100).part(0.75).left <= 75 and Budget().part(0.75).left is None
    assert Budget(60, started=time.monotonic() - 61).part(0.75).over, "a share of nothing"


def test_a_budget_is_over_when_its_time_is_or_when_no_question_fits(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = Budget(60, started=100.0)
    assert budget.allows(None) and budget.allows(60) and not budget.allows(61)
    now[0] = 159.0
    assert budget.allows(None) and not budget.allows(2)
    now[0] = 160.0
    assert not budget.allows(None) and not budget.allows(0)
    assert Budget().allows(1e12) and Budget().left is None
    pace = Pace()
    assert pace.of(2) is None, "the first question begins, however long others took"
    pace.add(4, 2.0)
    assert pace.of(2) == 1.0


@pytest.mark.parametrize("replay", [False, True])
def test_how_much_there_is_is_said_before_the_first_question(tmp_path, capsys, replay):
    target = tiny()
    bound_drafters = [BoundDrafter(d, bound(d, target), Lossless()) for d in ("none", "eagle2")]
    questions = [Question(str(i), "c", (f"{i} 3 14 15",)) for i in range(3)]
    bench = Bench(target, Numbers(), bound_drafters, Sampler(), RunSettings(max_new_tokens=8), replay)
    ledger = Ledger(tmp_path, settings("eagle2"), "none", timed=not replay)
    bench.run(questions[:1], ledger)
    capsys.readouterr()
    bench.run(questions, ledger)
    first = capsys.readouterr().err.splitlines()[0]
    match = re.fullmatch(r"plain, eagle2: 2 questions, about \d+ s at most \(8 tokens an answer\)", first)
    assert bool(match) != replay and len(first) <= 80
    bench.run(questions, ledger)
    assert "at most" not in capsys.readouterr().err, "nothing is missing"


def test_the_longest_that_decoding_can_take():
    pace = {"none": 0.5, "a": 0.25, "b": 2.0}
    missing = [[("none", 0), ("a", 0), ("a", 1)], [("b", 0)], []]
    assert longest(missing, pace, 10, Budget()) == 10 * (2 * 0.5 + 2 * 0.25) + 10 * (0.5 + 2.0)
    assert 0 < longest(missing, pace, 10, Budget(3.0)) <= 3.0 and longest(missing, pace, 10, Budget(0.0)) == 0
    assert [span(s) for s in (0.1, 89, 300, 5399, 9000)] == [
        "about 1 s",
        "about 89 s",
        "about 5 min",
        "about 90 min",
        "about 2.5 h",
    ]


def test_a_study_without_time_says_what_is_left_and_the_next_one_continues(home, tmp_path):
    first = replayed(home, tmp_path, "budgeted", "minutes=0.0001")
    assert first.returncode == 0 and "budgeted: 0 of 12 questions" in first.stdout, first.stderr
    assert not rows_below(tmp_path)
    again = replayed(home, tmp_path, "budgeted", "minutes=5")
    assert again.returncode == 0 and "of 12 questions" not in again.stdout, again.stderr
    assert len(rows_below(tmp_path)) == 12 * 2 * 3


def test_a_run_takes_minutes_too(home, tmp_path):
    message = run(home, "run", "drafter=prompt_lookup", "minutes=0.0001", f"results={tmp_path}")
    assert "prompt_lookup: 0 of 12 questions" in message and not rows_below(tmp_path)


@pytest.mark.parametrize("minutes", ["0", "-1", "soon", "nan", "true"])
@pytest.mark.parametrize("command", ["run", "study", "evidence"])
def test_minutes_that_are_none_are_one_line(home, command, minutes):
    more = {"run": ("drafter=none",), "study": ("study=bench",), "evidence": ()}[command]
    arguments = [*more, f"minutes={minutes}"]
    done = call(home, command, *arguments)
    line = [x for x in done.stderr.splitlines() if x.startswith("specbench: ")]
    assert done.returncode == 2 and len(line) == 1 and "minutes" in line[0] and "Traceback" not in done.stderr


# Continuing -----------------------------------------------------------------------------------------------------------


def test_another_commit_continues_what_one_began(home, tmp_path):
    """A study is measured in part, a docstring changes, another commit measures the rest: nothing is decoded twice."""
    clone, results = tmp_path / "clone", tmp_path / "results"
    subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(clone)], check=True)
    for path in subprocess.run(["git", "diff", "--name-only"], cwd=ROOT, capture_output=True, text=True).stdout.split():
        (ROOT / path).exists() and shutil.copy(ROOT / path, clone / path)
    part = replayed(home, results, "continued", "data.limit=3")
    assert part.returncode == 0, part.stderr
    commit_a_docstring(clone)
    arguments = arguments_of(home, "study", f"--config-dir={home / 'conf'}", "study=continued", f"results={results}")
    command = [sys.executable, "-m", "specbench.study", *arguments]
    whole = subprocess.run(
        command, cwd=clone, env=environment(home, PYTHONPATH=str(clone)), capture_output=True, text=True, timeout=300
    )
    assert whole.returncode == 0, whole.stderr[-3000:]
    first, second = blocks.below(results)
    assert read_block(first)[0]["commit"] != read_block(second)[0]["commit"]
    keys = [row.key for _, row in rows_below(results)]
    assert len(keys) == len(set(keys)) == 12 * 2 * 3
    (task,) = planned(home, results, "continued")
    assert (task.done, task.planned, task.open) == (12, 12, False)


def commit_a_docstring(clone: Path) -> None:
    path = clone / "specbench" / "evaluation" / "runner.py"
    path.write_text(path.read_text().replace('"""', '"""Said otherwise. ', 1))
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", *who, "commit", "--quiet", "-am", "x"], cwd=clone, check=True)


def test_two_processes_share_the_questions_of_a_replay(home, tmp_path):
    folder = home / "conf"
    (folder / "study").mkdir(parents=True, exist_ok=True)
    (folder / "study" / "shared.yaml").write_text(REPLAY.replace("HOME", str(home)))
    arguments = f"--config-dir={folder}", "study=shared", f"results={tmp_path}"
    both = [start(home, "study", *arguments) for _ in range(2)]
    assert [p.wait(timeout=400) for p in both] == [0, 0]
    found = rows_below(tmp_path)
    keys = [row.key for _, row in found]
    assert len(keys) == len(set(keys)) == 12 * 2 * 3, "a question was decoded by both"


def test_a_study_killed_at_five_moments_loses_and_doubles_nothing(home, tmp_path):
    folder = home / "conf"
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert replayed(home, undisturbed, "killed").returncode == 0
    moments, cut = random.Random(3), 0
    for _ in range(5):
        process = start(home, "study", f"--config-dir={folder}", "study=killed", f"results={killed}")
        time.sleep(moments.uniform(0.3, 2.5))
        cut += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert cut >= 2, "killed too late to show anything"
    assert replayed(home, killed, "killed").returncode == 0
    rows = [{r.key: (r.tokens, r.accepted, r.nodes, r.passes) for _, r in rows_below(f)} for f in (undisturbed, killed)]
    assert rows[0] == rows[1]
    keys = [row.key for _, row in rows_below(killed)]
    assert len(keys) == len(set(keys)), "a generation that was on disk was decoded again"


def test_a_damaged_block_is_named_and_the_others_are_untouched(home, tmp_path):
    assert replayed(home, tmp_path, "damaged", "data.limit=2").returncode == 0
    (good,) = blocks.below(tmp_path)
    bad = good.with_name("2020-01-01T000000-other-abcdef.jsonl")
    for content, message in (
        (good.read_bytes() + b"nonsense\n", "no record of a block"),
        (b"null\n", "line 1"),
        (b'{"kind": "header", "schema": 2}\n', "while this code reads blocks of schema 3"),
    ):
        bad.write_bytes(content)
        before = good.read_bytes()
        done = replayed(home, tmp_path, "damaged")
        line = [x for x in done.stderr.splitlines() if x.startswith("specbench: ")]
        assert done.returncode == 2 and len(line) == 1 and bad.name in line[0] and message in line[0], done.stderr
        assert good.read_bytes() == before and bad.read_bytes() == content


# The plan -------------------------------------------------------------------------------------------------------------


def test_cells_that_differ_in_their_prompts_alone_are_one_where_prompts_are_named():
    study = {"cells": [["dataset=a", "data.limit=4"], ["dataset=b", "data.limit=4"], ["dataset=a", "data.limit=8"]]}
    found = list(study_runs.cell_overrides(study, range(3), ["c"]))
    assert found == [(0, ["data.limit=4", "dataset=c"]), (2, ["data.limit=8", "dataset=c"])]


def test_a_cell_without_a_limit_is_complete_with_as_many_questions_as_mt_bench_has():
    for words, questions in (((), 80), (("data.limit=null",), 80), (("data.limit=24", "data.limit=7"), 7)):
        assert CellOptions.of(words).questions == questions


def test_the_plan_counts_whole_questions_of_all_arms_as_they_are_now(home, tmp_path):
    assert replayed(home, tmp_path, "counted", "data.limit=4").returncode == 0
    (task,) = planned(home, tmp_path, "counted")
    assert (task.kind, task.done, task.planned, task.open, task.stale) == ("replayed", 4, 12, True, ())
    assert task.seconds == pytest.approx(task.pace * 8 * 2 * 3)
    more = REPLAY.replace("arms:\n", "arms:\n  lookup: {run: [drafter=prompt_lookup]}\n")
    (home / "conf" / "study" / "counted.yaml").write_text(more.replace("HOME", str(home)))
    (task,) = planned(home, tmp_path, "counted")
    assert task.done == 0, "an arm that was added later has no row"
    assert task.generations == (8 * 3 + 12) * 2, "rows that are there are counted as left"
    assert replayed(home, tmp_path, "counted", "data.limit=4", text=more).returncode == 0
    (task,) = planned(home, tmp_path, "counted")
    assert task.done == 4
    labels = [{row.drafter for row in read_rows(path)[1] if isinstance(row, Row)} for path in blocks.below(tmp_path)]
    assert labels == [{"none", "eagle2", "chain"}, {"lookup"}], "rows that were there were decoded again"


def test_rows_of_another_training_than_the_planned_one_do_not_count(home, tmp_path):
    """As after a study's recipe has changed."""
    assert replayed(home, tmp_path, "counted", "data.limit=4").returncode == 0
    (path,) = blocks.below(tmp_path)
    (block,) = blocks.scan_all(path.parent, "none")
    assert len(plan._decoded([block], "chain", {})) == 8
    assert plan._decoded([block], "chain", {"chain": "eagle2-0123456789ab"}) == set()


def test_the_plan_counts_trainings_that_arms_wait_for_each_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    tasks = plan.all_tasks(plan.Scope(tmp_path / "results", "smollm2-135m"), ["eagle_figure10", "n_alpha"])
    # four inputs of the draft model, each in a chain and in a tree
    assert {(task.study, task.kind): task.trainings for task in tasks if not task.missing} == {
        ("eagle_figure10", "trained"): 4, ("eagle_figure10", "timed"): 4, ("n_alpha", "replayed"): 0,
    }  # fmt: skip


def test_rows_of_batches_by_an_earlier_engine_do_not_count(home, tmp_path):
    assert replayed(home, tmp_path, "counted", "data.limit=1").returncode == 0
    (path,) = blocks.below(tmp_path)
    header, rest = path.read_text().split("\n", 1)
    header = json.loads(header)
    header["config"]["batch"] = 2
    for batching, counted in ((identity.BATCHING, 1), (identity.BATCHING - 1, 0)):
        path.write_text(json.dumps({**header, "batching": batching}) + "\n" + rest)
        assert len(plan._blocks(path.parent)) == counted


def test_evidence_works_through_the_plan_and_names_what_is_broken(home, tmp_path, capfd):
    folder = home / "conf"
    (folder / "study").mkdir(parents=True, exist_ok=True)
    for name, text in (("sound", REPLAY), ("broken", REPLAY.replace("drafter=eagle2, tree=chain", "drafter=medusa"))):
        (folder / "study" / f"{name}.yaml").write_text(text.replace("HOME", str(home)))
    overrides = tuple(a for a in arguments_of(home, "study") if not a.startswith(("results=", "model.name=")))
    words = (f"--config-dir={folder}", *overrides, "model.name=tiny")
    asked = workers.Settings(plan.Scope(tmp_path, "smollm2-135m", words, folder / "study"), None, 300.0)
    tasks = plan.all_tasks(asked.scope, ["sound", "broken"])
    assert len(tasks) == 2 and all(task.open for task in tasks)
    broken = workers.work(tasks, asked, Budget(400))
    assert [task.study for task in broken] == ["broken"]
    assert "sound, cell 0: 0 of 12 questions so far" in capfd.readouterr().err
    done = {task.study: task.done for task in plan.all_tasks(asked.scope, ["sound", "broken"])}
    assert done == {"sound": 12, "broken": 0}


def test_timed_work_waits_for_a_busy_machine_and_refuses_one_that_stays_so(monkeypatch, capsys):
    readings = iter([])
    monkeypatch.setattr(workers, "_busy", lambda: next(readings))
    timed, other, endless = a_task("timed"), a_task("replayed"), Budget()
    assert workers._next([timed, other], [], 2, endless) is other and workers._next([timed], [other], 2, endless) is None
    assert workers._next([other], [timed], 2, endless) is None
    readings = iter([0.0])
    assert workers._next([timed], [], 2, endless) is timed and not capsys.readouterr().err
    readings = iter([1.2, 0.4, 0.1])
    assert workers._next([timed], [], 2, endless) is timed
    assert capsys.readouterr().err == "other processes keep 1.2 cores busy; waiting up to 5 minutes\n"
    readings = iter([1.2])
    assert workers._next([timed], [], 2, Budget(10)) is None, "nothing fits any more"
    monkeypatch.setattr(workers, "MAX_WAIT_S", 0.0)
    readings = iter([1.2])
    assert workers._next([timed], [], 2, endless) is None
    refused = "specbench: timed work left out: other processes keep 1.2 cores busy\n"
    assert capsys.readouterr().err == 2 * refused


def a_task(kind):
    return plan.Task("s", 0, kind, 5, ("dataset=mtbench",), 4, 0, True, 8, None)


def test_a_cell_whose_process_dies_by_a_signal_is_named_with_it(monkeypatch, capsys):
    task = a_task("replayed")
    dies = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
    monkeypatch.setattr(workers, "_start", lambda *_: subprocess.Popen(dies))
    assert workers.work([task], None, Budget(400)) == [task]
    assert "s, cell 0: its process was ended by SIGILL" in capsys.readouterr().err


def test_evidence_prints_its_plan_and_refuses_what_is_no_study(home):
    shown = call(home, "evidence", "plan=true", "studies=[hass,n_alpha]")
    assert shown.returncode == 0 and re.search(r"\| hass \| 0: mtbench-greedy-64-replayed \| replayed \|", shown.stdout)
    for word, message in (("studies=[hasss]", "there is no study hasss"), ("kind=fast", "must be 'replayed'")):
        done = call(home, "evidence", word)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_training_in_parts_is_the_training_in_one(home):
    from command_line import train

    steps = "train.settings.steps=8"
    run(home, "train", *train(home, "undivided", steps))
    parts = 0
    while not (home / "out" / "divided" / "model.safetensors").is_file():
        message = run(home, "train", *train(home, "divided", steps, "train.minutes=0.0001"))
        assert "the same command goes on there" in message or "weights in" in message
        parts += 1
    assert parts > 2
    one, other = ((home / "out" / name / "model.safetensors").read_bytes() for name in ("undivided", "divided"))
    assert one == other


def test_a_training_names_what_the_weights_that_it_began_with_had_cost(home):
    from command_line import train

    first, second = home / "out" / "first", home / "out" / "second"
    run(home, "train", *train(home, "first", "train.settings.steps=2"))
    before = json.loads((first / "provenance.json").read_text())
    assert before["tokens_before"] == before["hours_before"] == 0
    (first / "provenance.json").write_text(json.dumps(before | {"hours": 1.5, "hours_before": 0.25}))
    run(home, "train", *train(home, "second", "train.settings.steps=2", f"train.start={first}"))
    after = json.loads((second / "provenance.json").read_text())
    assert after["tokens_before"] == before["tokens_seen"] > 0 and after["hours_before"] == 1.75


def test_what_a_killed_command_had_started_ends_with_it(tmp_path):
    """Or a study that nobody waits for would go on beside the next one."""
    inner = "import subprocess, sys; from specbench.common.processes import dying_with_parent as d; "
    inner += "p = subprocess.Popen(['sleep', '60'], preexec_fn=d()); print(p.pid, flush=True); p.wait()"
    outer = subprocess.Popen([sys.executable, "-c", inner], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = Path("/proc") / outer.stdout.readline().strip()
    assert child.exists()
    outer.kill()
    outer.wait()
    deadline = time.monotonic() + 20
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2]


WORKING = """
from pathlib import Path
from types import SimpleNamespace
from specbench.evaluation import plan, workers
from specbench.common.budget import Budget
scope = plan.Scope(Path({results!r}), "smollm2-135m", {words!r}, Path({folder!r}))
workers.work([t for t in plan.all_tasks(scope, ["worked"]) if t.open], workers.Settings(scope, None, 300.0), Budget(400))
"""


def test_evidence_killed_in_the_middle_loses_and_doubles_nothing(home, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert replayed(home, undisturbed, "worked").returncode == 0
    words = tuple(a for a in arguments_of(home, "study") if not a.startswith(("results=", "model.name=")))
    words = (f"--config-dir={home / 'conf'}", *words, "model.name=tiny")
    program = WORKING.format(results=str(killed), words=words, folder=str(home / "conf" / "study"))
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment(home), stderr=subprocess.DEVNULL)
    while process.poll() is None and len(rows_below(killed)) < 6:
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert 6 <= len(rows_below(killed)) < 12 * 2 * 3, "it was killed in the middle"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(home), check=True, stderr=subprocess.DEVNULL)
    rows = [{r.key: (r.tokens, r.accepted, r.nodes, r.passes) for _, r in rows_below(f)} for f in (undisturbed, killed)]
    assert rows[0] == rows[1] and len(rows[0]) == 12 * 2 * 3
    keys = [row.key for _, row in rows_below(killed)]
    assert len(keys) == len(set(keys)), "a generation that was on disk was decoded again"
