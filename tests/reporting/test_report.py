"""The report: golden tables from committed rows, every rate against a count written out, bad folders, size, a browser."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import numpy as np
import pytest
from command_line import call
from conftest import ROOT
from fixtures import block, block_path, random_row, settings, whole
from test_overview import bench

from specbench.common.errors import SpecBenchError
from specbench.evaluation import trace
from specbench.records import blocks
from specbench.records.blocks import NAME
from specbench.records.metrics import RATES, sum_rows
from specbench.records.rows import CellFailure, Failure, Measurement, Row
from specbench.records.statistics import contrast, interval
from specbench.reporting import bundle, foreign_results, freshness, overview, tables
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.groups import groups

GOLDEN = ROOT / "tests" / "golden"  # two plain cells cut to two questions, the same as a study's cell, the tables they give
HOSTILE = '<img src=x onerror="document.title=\'owned\'"></script><script>document.title="owned"</script>&amp;'


def fill(folder, drafters=("eagle2", "vanilla"), questions=6, dataset="d", seed=0, options=None):
    """Random but consistent cells; returns all rows. said: of a drafter's configuration, by drafter."""
    rng = np.random.default_rng(seed)
    made = []
    for drafter in drafters:
        header = settings(drafter, dataset=dataset)
        header["arms"][drafter]["drafter"] |= (options or {}).get(drafter, {})
        cell = block(folder, header, f"{dataset}-{drafter}")
        for q in range(questions):
            for who in ("none", drafter):
                row, _ = random_row(rng, who, str(q))
                cell.write(row)
                made.append(row)
    return made


def measure(folder, names=("hass-1", "hass-2"), repetitions=5):
    """A cell of drafters whose drafting, training and target passes were measured beside their rows."""
    header = settings(*names, dataset="mtbench", study="costs")
    for steps, name in enumerate(names, 1):
        header["arms"][name]["drafter"] = {"name": "hass", "steps": steps}
    cell = block(folder, header, "mtbench-costs")
    rng = np.random.default_rng(0)
    for who in ("none", *names):
        cell.write(random_row(rng, who)[0])
    for r in range(repetitions):
        cell.write(Measurement("none", "target_pass", r, {"ms_1": 3.0 + r, "ms_8": 5.0 + r, "ms_16": 9.0}))
        for steps, name in enumerate(names, 1):
            shares = {"head": 0.5, "network": 0.3, "rest": 0.2}
            cell.write(Measurement(name, "drafting", r, {"ms": 8.0 + steps + r, **shares}))
            cell.write(Measurement(name, "training", r, {"peak": steps * 2.0**28 + r, "seconds": 1.0 * steps + r / 10}))


def report(folder, **more) -> Report:
    return Report(Sources(folder, **more))


def test_golden_tables(tmp_path):
    """To make them anew, for a reason to be named in the commit: run this test with `--basetemp=FOLDER`, copy them back.

    They come from `rows`, plain runs, and from `studied`, a cell of the study that `studies/pair.yaml` declares.
    """
    shutil.copytree(GOLDEN / "rows", tmp_path / "rows")
    shutil.copytree(GOLDEN / "studied", tmp_path / "rows", dirs_exist_ok=True)
    report(tmp_path / "rows", studies=GOLDEN / "studies").write()
    for expected in (GOLDEN / "tables").iterdir():
        assert (tmp_path / "rows" / "tables" / expected.name).read_text() == expected.read_text(), expected


@pytest.mark.parametrize("seed", range(5))
def test_rates_equal_counts_over_raw_cycles(seed):
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, question=str(i % 4), turn=i // 4)[0] for i in range(8)]
    base = [random_row(rng, "none", str(i % 4), turn=i // 4)[0] for i in range(8)]
    sums = sum_rows(rows, base).pooled
    cycles = [(a, d) for r in rows for a, d in zip(r.accepted, r.drafted, strict=True)]
    assert RATES["tau"](sums) == pytest.approx(sum(a + 1 for a, _ in cycles) / len(cycles))
    for depth in range(4):
        tried = [a for a, d in cycles if a >= depth and d > depth]
        if tried:
            assert RATES[f"alpha{depth}"](sums) == pytest.approx(sum(a > depth for a in tried) / len(tried))
    late = [(a > i) for a, d in cycles for i in range(1, d) if a >= i]
    assert RATES["late_alpha"](sums) == pytest.approx(sum(late) / len(late))
    assert RATES["tau"](sums) == pytest.approx(1 + np.mean([a for a, _ in cycles]))  # the identity
    speed = sum(len(r.tokens) - 1 for r in rows) / sum(r.decode_s for r in rows)
    plain = sum(len(r.tokens) - 1 for r in base) / sum(r.decode_s for r in base)
    assert RATES["speed_up"](sums) == pytest.approx(speed / plain)
    assert RATES["draft_ms"](sums) == pytest.approx(1000 * sum(r.draft_s for r in rows) / len(cycles))


def test_a_difference_is_called_only_if_its_interval_excludes_none():
    rng = np.random.default_rng(0)
    rows = [random_row(rng, question=str(i))[0] for i in range(30)]
    better = [Row(**{**vars(r), "decode_s": r.decode_s * float(rng.uniform(0.5, 0.7))}) for r in rows]
    a, b = sum_rows(better), sum_rows(rows)
    assert tables.direction(contrast(RATES["tokens_per_s"], a, b, ratio=True), 1.0, "faster", "slower") == "faster"
    assert tables.direction(contrast(RATES["tokens_per_s"], b, a, ratio=True), 1.0, "faster", "slower") == "slower"
    assert tables.direction(contrast(RATES["tau"], a, b), 0.0, "more", "less") == "not shown"
    assert contrast(RATES["tau"], a, sum_rows([])) is None
    assert interval(RATES["tau"], sum_rows([])) is None


# What can be wrong with a results folder -----------------------------------------------------------------------------


def test_a_row_cut_off_by_a_crash_is_left_out_and_said(tmp_path):
    fill(tmp_path)
    path = next(tmp_path.rglob(f"d-eagle2/{NAME}"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    found = report(tmp_path)
    assert len(found.problems) == 1 and "cut off" in found.problems[0] and "d-eagle2" in found.problems[0]
    assert found.write().exists() and "cut off" in (tmp_path / "README.md").read_text()
    assert path.read_bytes() == whole[:-20], "the report changed the rows"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["results=nowhere"], "no rows under"),
        (["format=latex"], "format=latex: must be 'terminal'"),
        (["import=nowhere.jsonl", "format=eagle"], "cannot read nowhere.jsonl: no such file"),
    ],
)
def test_bad_questions_are_one_clear_line(tmp_path, arguments, message):
    done = call(tmp_path, "report", *arguments)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and message in lines[0]


def test_two_cells_about_one_thing_are_both_shown_and_the_larger_one_counts(tmp_path):
    fill(tmp_path, ("eagle2",), dataset="mtbench")
    rng = np.random.default_rng(9)
    again = block(tmp_path, settings("eagle2", dataset="mtbench"), "mtbench-again")
    again.header["arms"]["eagle2"]["drafter"]["depth"] = 9
    for q in range(2):
        for who in ("none", "eagle2"):
            again.write(random_row(rng, who, str(q))[0])
    found = report(tmp_path)
    both = [e for e in found.main if e.name == "eagle2"]
    assert len(both) == 2
    shown = [e for e in found.view.timed(found.view.first) if e.name == "eagle2"]
    assert shown == [max(both, key=lambda e: e.summary.prompts)]


def test_failures_stand_first(tmp_path):
    fill(tmp_path, ("eagle2",))
    cell = block(tmp_path, settings("eagle2"), "d-eagle2")
    cell.write(Failure("eagle2", "lost", 0, "boom"))
    path = CellFailure.path(tmp_path / "m" / "d", "moa", {})
    CellFailure("m", "d", "moa", 0.0, "no weights").write(path)
    report(tmp_path).write()
    text = (tmp_path / "README.md").read_text()
    assert text.index("**FAILED** moa on d") < text.index("| drafter |")
    assert "eagle2 (1 FAILED)" in text
    assert "no weights" in (tmp_path / "report.html").read_text()
    path.write_text("{}")
    assert [p for p in report(tmp_path).problems if "remove it" in p and str(path) in p]


def many_rows(folder, questions):
    """Ten cells of a baseline and a drafter: twenty rows a question, each of 40 cycles."""
    rng = np.random.default_rng(0)
    for d in range(10):
        lines = [json.dumps(whole(settings(f"d{d}", dataset="mtbench"))) + "\n"]
        for q in range(questions):
            for who in ("none", f"d{d}"):
                drafted = np.zeros(40, int) if who == "none" else rng.integers(1, 7, 40)
                accepted = rng.integers(0, drafted + 1)
                row = Row(who, str(q), "c", 0, 9, [0] * int(1 + (accepted + 1).sum()), 0.1, float(rng.uniform(1, 2)))
                row.nodes, row.drafted, row.accepted = [60] * 40, drafted.tolist(), accepted.tolist()
                row.ranks = [[0] * a for a in row.accepted]
                row.draft_s = row.target_s = row.verify_s = row.rest_s = row.decode_s / 4
                lines.append(json.dumps(vars(row)) + "\n")
        block_path(folder / "m" / f"mtbench-d{d}").write_text("".join(lines))


def reported(folder):
    """Processor seconds and KiB at most of the command that makes a report, in a process of its own."""
    # VmHWM is the program's own peak; a child's ru_maxrss begins with what its parent held when it was forked
    program = (
        "import runpy; runpy.run_module('specbench.report', run_name='__main__');"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1]);"
        "print(__import__('time').process_time())"
    )
    command = [sys.executable, "-c", program, f"results={folder}"]
    alone = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=alone)
    *_, peak, seconds = done.stdout.splitlines()
    return float(seconds), int(peak)


def test_a_report_on_ten_times_as_many_rows_takes_no_more_than_its_share(tmp_path):
    """Ten thousand rows against one thousand: at most proportional time, and a gigabyte."""
    for questions in (50, 500):
        many_rows(tmp_path / str(questions), questions)
    few, _ = reported(tmp_path / "50")
    many, peak = reported(tmp_path / "500")
    assert many < 5 * few  # in fact about 2; what compares rows with rows would take up to 100 times as long
    assert peak < 2**20
    assert (tmp_path / "500" / "report.html").exists()


# Other harnesses -----------------------------------------------------------------------------------------------------


def answers(path, harness, scale=1.0):
    with path.open("w") as file:
        for q in range(5):
            choice = {"turns": ["a", "b"], "new_tokens": [20 + q, 30], "wall_time": [1.0 * scale, 2.0 * scale]}
            if harness == "spec-bench":
                choice |= {"decoding_steps": [8, 12], "accept_lengths": [2] * 20}
            else:
                choice |= {"idxs": [7, 11]}  # of the last cycle, from 0: 8 and 12 cycles
            file.write(json.dumps({"question_id": q, "model_id": "x", "choices": [choice]}) + "\n")


@pytest.mark.parametrize("harness", ["spec-bench", "eagle", "hass"])
def test_answers_of_other_harnesses_are_restated(tmp_path, harness):
    answers(tmp_path / "a.jsonl", harness)
    answers(tmp_path / "base.jsonl", harness, scale=2.0)
    totals = foreign_results.read(tmp_path / "a.jsonl", harness)
    assert RATES["tau"](totals.pooled) == pytest.approx((5 * 50 + 10) / (5 * 20))
    shown = foreign_results.markdown(tmp_path / "a.jsonl", harness, str(tmp_path / "base.jsonl"))
    assert "| 2.00 |" in shown and "2.60" in shown and "prefill included" in shown
    by_question = [(50 + q) / 20 for q in range(5)]
    assert f"({sum(by_question) / 5:.2f})" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no answers"),
        ("{\n", "line 1: not JSON"),
        ('{"question_id": 1, "choices": []}\n', "line 1: choices"),
        ('{"question_id": 1, "choices": [{"new_tokens": [3], "wall_time": [1]}]}\n', "idxs"),
        ('{"question_id": 1, "choices": [{"new_tokens": [3], "idxs": [1], "wall_time": [0]}]}\n', "cannot be"),
    ],
)
def test_damaged_answer_files_are_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(SpecBenchError, match=message):
        foreign_results.read(tmp_path / "a.jsonl", "eagle")


# The page ------------------------------------------------------------------------------------------------------------


def hostile(tmp_path) -> Path:
    """A report whose prompt, tokens, drafter and error try to get out of their places."""
    fill(tmp_path, ("eagle2", "vanilla"), dataset="mtbench")
    cell = next(tmp_path.rglob("mtbench-eagle2"))
    cycle = {
        "root": HOSTILE,
        "nodes": [[HOSTILE, 0, 0.5, 0.25], ["other", 0, 0.1, None], ["deep", 1, 0.9, 0.2]],
        "path": [1, 3],
        "bonus": HOSTILE,
        "ms": {"draft": 1.0, "target": 2.0, "verify": 0.1, "rest": 0.1},
    }
    second = {**cycle, "path": [], "bonus": "end"}
    found = {"question": HOSTILE, "drafter": "eagle2", "prompt": HOSTILE, "first": HOSTILE, "cycles": [cycle, second]}
    trace.write(blocks.trace_path(cell, "eagle2"), [found])
    CellFailure("m", "mtbench", HOSTILE, 0.0, HOSTILE).write(CellFailure.path(tmp_path / "m" / "mtbench", "x", {}))
    return report(tmp_path).write()


def test_the_page_is_one_file_and_escapes_what_models_write(tmp_path):
    text = hostile(tmp_path).read_text()
    assert "<img src=x" not in text and 'document.title="owned"</script>' not in text
    assert text.count("<script") == 2  # the data and the code
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith(("data:", "#")) for link in links), "the page asks the network"
    data = re.search(r'id="trace-data">(.*?)</script>', text, re.S)
    assert data is not None and json.loads(data.group(1))[0]["prompt"] == HOSTILE


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """
<script nonce="specbench">
const column = document.querySelector("table.sortable"), seen = {};
const first = () => parseFloat(column.tBodies[0].rows[0].cells[1].textContent);
column.tHead.rows[0].cells[1].click(); seen.descending = first();
column.tHead.rows[0].cells[1].click(); seen.ascending = first();
seen.tree = document.getElementById("tree").textContent;
seen.taken = [...document.querySelectorAll("#tree .taken > .token")].map(e => e.textContent);
seen.where = document.getElementById("where").textContent;
document.getElementById("next").click();
seen.next = document.getElementById("where").textContent;
seen.images = [...document.images].every(i => i.complete && i.naturalWidth > 0);
seen.stray = document.querySelectorAll("#tree img, #text img, #tree script").length;
seen.title = document.title;
const out = document.createElement("pre");
out.id = "probe"; out.textContent = JSON.stringify(seen); document.body.append(out);
</script></body>
"""


def browse(page: Path) -> str:
    """What a script in the page wrote into its element `probe`."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    where = [
        f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1280,900",
        "--virtual-time-budget=9999",
        "--dump-dom",
    ]
    done = subprocess.run([BROWSER, *flags, *where, page.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    return html.unescape(found.group(1))


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")


@needs_browser
def test_the_page_works_in_a_browser_and_runs_nothing_a_model_wrote(tmp_path):
    page = hostile(tmp_path)
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    seen = json.loads(browse(probed))
    assert seen["title"] == "SpecBench report" and seen["stray"] == 0
    assert seen["descending"] > seen["ascending"]
    shown = HOSTILE.replace(" ", "·")
    assert seen["taken"] == [shown, shown, "deep"] and "other" in seen["tree"]
    assert seen["where"].startswith("cycle 1 of 2: 2 of 3 draft tokens accepted")
    assert seen["next"].startswith("cycle 2 of 2: 0 of 3")
    assert seen["images"], "a figure does not show"


RULER = """
<script nonce="specbench">
const closed = document.documentElement.scrollHeight;
document.querySelectorAll("details").forEach(d => d.open = true);
const name = box => [...box.querySelectorAll("th")].map(th => th.textContent).join(", ");
const boxes = [...document.querySelectorAll(".scroll")];
const out = document.createElement("pre");
out.id = "probe";
out.textContent = JSON.stringify({
  closed, window: innerWidth, page: document.documentElement.scrollWidth, tables: boxes.length,
  cut: boxes.filter(b => b.scrollWidth > b.clientWidth + 1).map(name),
  answer: document.querySelector(".answer").getBoundingClientRect().bottom,
});
document.body.append(out);
parent.postMessage(out.textContent, "*");
</script></body>
"""
PHONE = """<!doctype html><iframe src="%s" width="390" height="844" style="border: 0"></iframe><pre id="probe"></pre>
<script>addEventListener("message", e => document.getElementById("probe").textContent = e.data);</script>
"""  # a window cannot be that narrow


@needs_browser
def test_nothing_is_hidden_on_a_wide_screen_and_a_phone_scrolls_tables_alone(tmp_path):
    """All shipped drafters with two trees each on all prompt sets, and the widest of the papers' tables, measured."""
    drafters = ["vanilla", "medusa", "eagle1", "eagle2", "hass", "coral", "coral_router", "eagle2_router", "beagle", "moa"]
    speeds = {name: 1.0 + i / 10 for i, name in enumerate([*drafters, *(f"{d}_fitted" for d in drafters)])}
    for i, dataset in enumerate(("mtbench", "gsm8k", "humaneval", "cnndm", "naturalquestions", "alpaca")):
        bench(tmp_path / "r" / "bench", speeds, study="bench", dataset=dataset, seed=i, questions=3)
        bench(tmp_path / "r" / "moa", {"moa": 1.1, "eagle2": 1.2}, study="moa", dataset=dataset, seed=i, questions=3)
    bench(tmp_path / "r" / "bench", speeds, study="bench", temperature=1.0, cell="decode-2", seed=9, questions=3)
    bench(tmp_path / "r" / "bench", speeds, study="bench", replay=True, cell="replay-1", seed=8, questions=16)
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "moa.yaml").write_text(
        "title: MoA\nsource: ['MoA, Table 2']\ncells: [[dataset=mtbench]]\nvaries: [dataset]\n"
        "arms: {moa: {run: [drafter=moa]}, eagle2: {run: [drafter=eagle2]}}\n"
        'shows: [{paper: moa, table: Table 2, arms: {"moa; tli=0": moa, "eagle2; epochs=30": eagle2}}]\n'
        "claims: [{says: MoA accepts more than EAGLE-2, source: 'MoA, Table 2', published: more,\n"
        "          tests: [{metric: tau, of: moa, over: eagle2, is: more},\n"
        "                  {metric: speed_up, of: moa, than: 1, is: less}]}]\n"
    )
    found = report(tmp_path / "r", studies=tmp_path / "studies")
    assert not found.problems and found.verdicts and found.insights["calibration"] and any(p.measured for p in found.papers)
    page = found.write()
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", RULER))
    (tmp_path / "phone.html").write_text(PHONE % probed.as_uri())
    wide, phone = json.loads(browse(probed)), json.loads(browse(tmp_path / "phone.html"))
    assert wide["tables"] > 20 and wide["cut"] == [] and wide["page"] <= 1280
    assert phone["window"] == 390 and phone["page"] <= 390, "the page itself scrolls sideways"
    assert phone["cut"], "no table is wide: the test tests nothing"
    assert wide["closed"] < 9000, "what nobody asked for is not folded"
    assert page.stat().st_size < 2 * 10**6 and len((tmp_path / "r" / "README.md").read_text().splitlines()) < 300
    assert wide["answer"] < 400 and phone["answer"] < 900, "the answer is not on the first screen"


def test_a_trace_holds_the_trees_the_loop_really_saw(target):
    from conftest import make

    from specbench.engine.sampling import Sampler
    from specbench.engine.verify import Lossless

    class Letters:
        tokenizer = type("T", (), {"decode": staticmethod(lambda ids: "".join(chr(48 + i) for i in ids))})

    drafter = make("eagle2", target)
    prompt = [1, 2, 3, 4]
    found = trace.trace(target, Letters(), drafter, prompt, Lossless(), Sampler())
    tokens = found["first"] + "".join(
        "".join(c["nodes"][n - 1][0] for n in c["path"]) + c["bonus"] for c in found["cycles"]
    )
    import torch

    ids, expected = list(prompt), ""
    with torch.inference_mode():
        for _ in tokens:
            logits = target.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            expected += chr(48 + ids[-1])
    assert tokens == expected
    for cycle in found["cycles"]:
        for text, parent, p, own in cycle["nodes"]:
            assert len(text) == 1 and 0 <= p <= 1 and own is not None and 0 <= own <= 1
            if parent:
                assert own <= cycle["nodes"][parent - 1][3] + 1e-3, "a path is likelier than its beginning"


def test_every_figure_is_drawn_from_what_is_there(tmp_path):
    chain = {"growth": {"_target_": "specbench.engine.policies.Chain", "gamma": 4}}
    fill(tmp_path, ("eagle2", "vanilla"), dataset="mtbench", options={"vanilla": chain})
    measure(tmp_path / "costs")
    found = report(tmp_path)
    weights = {"hass": {"history": [{"tokens": 9, "chain_tau": 1.5, "n_alpha": [0.4]}]}}
    drawn = bundle.figures.draw_all(found.view, found.entries, weights, tmp_path / "figures")
    shown = "speed_up cost step_alpha target_pass learning_curves"
    assert set(drawn) == set(shown.split())
    for name in drawn:
        for suffix in ("png", "svg"):
            assert (tmp_path / "figures" / f"{name}.{suffix}").stat().st_size > 2000
    nothing = bundle.figures.draw_all(overview.Overview([]), [], {}, tmp_path / "none")
    assert not nothing


def test_two_targets_in_one_folder_are_kept_apart(tmp_path):
    """Answer, curves and claims are about the target with most rows; the other one has a section of its own."""
    shutil.copytree(GOLDEN / "rows", tmp_path, dirs_exist_ok=True)
    alone = report(tmp_path)
    shutil.copytree(GOLDEN / "rows" / "smollm2-135m", tmp_path / "another")
    for path in (tmp_path / "another").rglob(NAME):
        header, *rows = path.read_text().splitlines(keepends=True)
        changed = json.loads(header)
        changed["config"]["model"]["name"] = "another"
        path.write_text(json.dumps(changed) + "\n" + "".join(rows[:-1]))  # a generation less each
    both = report(tmp_path)
    assert [group[-1].model for group in groups(both.main)] == ["smollm2-135m", "another"]
    assert both.answer == alone.answer and [view.entries[0].model for view in both.others] == ["another"]
    assert both.verdicts == alone.verdicts and not alone.target_note
    both.write()
    text = (tmp_path / "README.md").read_text()
    assert both.target_note == "Judged on smollm2-135m, where most was decoded; not on another."
    assert text.index("## Which drafter") < text.index("## Other prompts, targets") < text.index("## Which claims")
    assert (
        "eagle2_small (smollm2-135m) |" in (tmp_path / "tables" / "trained.md").read_text()
        and (tmp_path / "figures" / "speed_up.png").stat().st_size > 2000
    )


class Lines(list):
    """A terminal reporter that keeps what it is told."""

    write_line = list.append


def test_the_summary_of_a_test_run_says_where_a_report_is_older_than_its_rows(tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(GOLDEN / "rows", results)
    monkeypatch.setattr(conftest, "RESULTS", results)

    def warnings():
        lines = Lines()
        conftest.pytest_terminal_summary(lines)
        return [line for line in lines if "bad inputs" not in line]

    older = ["results/: the report is older than its rows (make report RESULTS=results)"]
    assert warnings() == older, "a report that does not say what it was made from"
    report(results).write()
    assert warnings() == []
    rows = sorted(results.rglob(NAME))
    os.utime(rows[0])
    shutil.copytree(rows[0].parent, results / "local" / "cell")
    assert warnings() == [], "neither the time of a file nor rows that the report leaves out make it older"
    whole = rows[0].read_bytes()
    rows[0].write_bytes(whole + whole.splitlines(keepends=True)[-1])
    assert warnings() == older
    rows[0].write_bytes(whole)
    assert warnings() == []
    shutil.copytree(rows[0].parent, results / "another")
    assert warnings() == older
    monkeypatch.setattr(freshness, "digest", lambda folder: 1 / 0)
    assert warnings() == ["results/: division by zero"], "a summary fails no test run"


def test_replays_of_one_machine_stand_beside_speeds_of_another(tmp_path):
    """They hold no seconds: where most was replayed says nothing of where the speeds were measured."""
    timed = settings("a", dataset="mtbench", study="bench")
    replayed = timed | {"replay": True, "hardware": {"device": "another", "cores": 8}}
    for number, (header, questions) in enumerate(((timed, 4), (replayed, 9))):
        cell = block(tmp_path / "m" / f"mtbench-{number}", header)
        for q in range(questions):
            for who in ("none", "a"):
                row, _ = random_row(np.random.default_rng(q), who, str(q))
                row.replayed = number == 1 and who == "a"
                cell.write(row)
    made = report(tmp_path)
    assert "times the speed of plain decoding" in made.answer
    assert made.view.timed(made.view.first) and not made.others
    assert [e for e in made.view.known(made.view.first) if e.replayed]
