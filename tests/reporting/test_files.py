"""Files of others: whatever is wrong with one ends in one line that names it, and the report goes on with the rest."""

import csv
import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from battery import counting
from conftest import ROOT
from fixtures import SETTINGS, arm, block_path, random_row, whole
from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from test_report import fill

from specbench import report
from specbench.common import io
from specbench.common.errors import SpecBenchError
from specbench.records import studies
from specbench.records.blocks import below, read_block
from specbench.records.metrics import BASELINE
from specbench.records.rows import CellFailure, Failure, Measurement
from specbench.records.schema import Provenance, Trace
from specbench.reporting import cells, command_output, figures, foreign_results, overview, published, tables, trainings
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.groups import groups

HEADER = whole(SETTINGS)
ROW = asdict(random_row(np.random.default_rng(0))[0])
FAILURE = asdict(Failure("eagle2", "q", 0, "boom"))


def refusal(read, *arguments) -> str | None:
    """What is said against a file, one line; None where it is read."""
    with counting(arguments):
        try:
            read(*arguments)
        except SpecBenchError as error:
            message = str(error)
            assert message and len(message.splitlines()) == 1, message
            return message
    return None


def write(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


# Shapes --------------------------------------------------------------------------------------------------------------


def test_a_class_without_a_configuration_of_its_own_is_strict_too(tmp_path):
    path = tmp_path / "x.failed.json"
    good = asdict(CellFailure("m", "d", "x", 0.0, "boom"))
    for change, message in (
        ({"error": 1}, "error: input should be a valid string, not 1"),
        ({"more": 1}, "more: unexpected"),
    ):
        path.write_text(json.dumps(good | change))
        assert message in (refusal(CellFailure.read, path) or "")
    path.write_text(json.dumps(good))
    assert CellFailure.read(path).error == "boom"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\x00\xff\x80", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[" * 9999, "not JSON"),
        (b"[]", "should be an object"),
        (b"null", "should be an object"),
    ],
)
def test_damaged_json_is_one_line(tmp_path, data, message):
    (tmp_path / "x.json").write_bytes(data)
    assert message in (refusal(io.read_json, tmp_path / "x.json") or "")


@pytest.mark.parametrize(
    "text", ["a: [", "a: \x01", "2024-99-99", "- !!python/object:os.system x", "[" * 1500, "{a: 1}: 2"]
)
def test_damaged_yaml_is_one_line(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    assert "x.yaml" in (refusal(io.read_yaml, tmp_path / "x.yaml", dict[str, int]) or "")


def test_what_is_no_text_is_named_with_its_line(tmp_path):
    (tmp_path / "x").write_bytes(b"one\ntwo \xff\n")
    assert "line 2 is not UTF-8" in (refusal(io.read_text, tmp_path / "x") or "")
    assert "is a directory" in (refusal(io.read_text, tmp_path) or "")
    assert "null byte" in (refusal(io.read_text, Path("a\0b")) or "")


def test_everything_committed_is_read():
    rows = [*below(ROOT / "results"), *below(ROOT / "tests" / "golden")]
    assert len(rows) > 30
    for path in rows:
        written = [json.loads(line) for line in path.read_text().split("\n") if line]
        header, found = read_block(path)
        assert header["config"] == written[0]["config"] and len(found) == len(written) - 1, path
        some = slice(None, None, 25)  # all are read; writing each again takes most of the time
        again = json.loads(json.dumps([asdict(r) for r in found[some]]))
        assert [r | line for r, line in zip(again, written[1:][some], strict=True)] == again, path
    weights = list(ROOT.glob("drafters/weights/**/provenance.json"))
    assert weights and all(io.read_json(p, Provenance)["history"] for p in weights)
    traces = list(ROOT.glob("results/**/trace-*.json"))
    assert traces and all(io.read_json(p, list[Trace]) for p in traces)


# Rows ----------------------------------------------------------------------------------------------------------------


def test_a_line_separator_inside_a_row_ends_no_line(tmp_path):
    rows = [{**ROW, "category": "a\u2028b\x85c"}, {**ROW, "question": "next"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in (HEADER, *rows)), encoding="utf-8")
    assert [asdict(r) for r in read_block(path)[1]] == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": [a + 1 for a in ROW["accepted"]]}, "tokens are not"),
        ({"nodes": [1]}, "as many each"),
        ({"passes": ROW["passes"] + [1]}, "passes has one entry a cycle"),
        ({"passes": ROW["passes"][:-1]}, "passes has one entry a cycle"),
        ({"passes": [-1 for _ in ROW["accepted"]]}, "passes.0"),
        ({"audit": {"verdict": "fine"}}, "verdict is one of"),
        ({"audit": {}}, "verdict is one of"),
        ({"decode_s": float("nan")}, "prompt.decode_s: input should be a finite number"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_where_it_is_read(tmp_path, change, message):
    path = write(tmp_path / "rows.jsonl", HEADER, ROW, ROW | change)
    assert "rows.jsonl line 3" in (refusal(read_block, path) or "") and message in (refusal(read_block, path) or "")


def test_a_row_from_before_draft_passes_were_counted_does_not_know_them(tmp_path):
    old = {name: value for name, value in ROW.items() if name != "passes"}
    _, (found, again) = read_block(write(tmp_path / "rows.jsonl", HEADER, old, ROW))
    assert found.passes == [] and found.draft_passes is None
    assert again.passes == ROW["passes"] and again.draft_passes == sum(ROW["passes"])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**20, -(10**400), 2**63, 0, -1])
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["header", "prompt", "error", "none", "eagle2", "\x1b[2J", "[/bold]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value, at=()):
    """Every place in a record, so that each of its values can be replaced."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))


def put(record, at, value):
    if not at:
        return value
    return {**record, at[0]: put(record[at[0]], at[1:], value)}


TRAINED = {
    "parameters": 9, "tokens_seen": 9, "steps": 9, "hours": 0.1, "data": {"unique_tokens": 9},
    "machine": {"device": "toaster", "cores": 1}, "history": [{"tokens": 9, "chain_tau": 1.5, "n_alpha": [0.4]}],
}  # fmt: skip
FITTED = {
    "choice": {"depth": 2, "top_k": 2, "nodes": 4, "tau": 1.5, "speedup": 1.1},
    "costs": {"target": {"1": 0.5}},
}
OWN = arm(
    weights=TRAINED | {"calibration": "x"}, bytes=5, contents={"model.safetensors": "ab", "skip.json": "cd"}, sequence="x",
    tree={"_target_": "x.Rate"}, verify={"_target_": "x.Lossless"}, fitted=FITTED,
)  # fmt: skip
CONFIG = HEADER["config"] | {
    "model": {"name": "m", "max_context": 64, "forward": "lean"}, "decode": {"max_new_tokens": 9, "seed": 0},
    "link": {"name": "lan", "to": None, "delay_ms": 1.0}, "threads": 1, "backend": "eager",
}  # fmt: skip
RECORDS = [
    HEADER
    | {
        "arms": {"none": arm("none", bytes=0), "eagle2": OWN},
        "config": CONFIG,
        "study": "s",
        "replay": False,
        "target": HEADER["target"] | {"bytes": 5, "fingerprint": "f", "chat": "c"},
        "hardware": HEADER["hardware"] | {"threads": 1},
    },
    ROW | {"confidence": [[3, 1, 0.5]]},
    FAILURE,
    asdict(Measurement("eagle2", "memory", 0, {"peak": 9.0, "kv": 1.0})),
]
PLACES = [(i, at) for i, record in enumerate(RECORDS) for at in places(record)]


@examples(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(place=st.sampled_from(PLACES), value=json_values)
def test_any_value_in_any_field_is_shown_or_refused(tmp_path, place, value):
    """And what is read, every table can show."""
    which, at = place
    records = [put(r, at, value) if i == which else r for i, r in enumerate(RECORDS)]
    base = asdict(random_row(np.random.default_rng(1), BASELINE, question="q")[0])
    path = block_path(tmp_path / "m" / "d-greedy")
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in (*records, base)), errors="surrogatepass")
    problems: list[str] = []
    entries = cells.collect([path], tmp_path, problems)
    assert not (entries and problems)
    assert all(len(p.splitlines()) == 1 and p.startswith(str(path)) for p in problems)
    for group in groups(entries):
        assert overview.numbers(group).lines and tables.memory_lines(group) is not None
        overview.versus(group), overview.times(group), [tables.alphas(e) for e in group]
    trainings.cost_lines(entries)
    command_output.entries_markdown(entries, problems)


def damages(seed: int, whole: bytes):
    """Ways in which a file breaks."""
    draw = random.Random(seed)
    at = draw.randrange(1, len(whole) - 1)
    yield whole[:at] + b"\n"  # cut, and the newline of something else after it
    yield whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :]  # no UTF-8 any more
    yield whole[:at] + draw.randbytes(40) + b"\n" + whole[at:]
    yield draw.randbytes(200) + b"\n"
    yield b""
    yield b"\0" * len(whole) + b"\n"
    yield b"null\n" + whole
    yield whole + b"[]\n"
    yield whole.replace(b'"turn": ', b'"turn": "first", "more": ', 1)
    yield whole.replace(b'"decode_s": ', b'"decode_s": NaN, "more": ', 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_broken_row_file_is_said_and_the_rest_reported(tmp_path, seed):
    shutil.copytree(ROOT / "tests" / "golden" / "rows", tmp_path / "rows")
    broken, intact = below(tmp_path / "rows")
    whole = broken.read_bytes()
    kept = len(cells.collect([intact]))
    for damaged in damages(seed, whole):
        broken.write_bytes(damaged)
        found = cells.find(tmp_path / "rows")
        assert len(found.problems) == 1 and found.problems[0].startswith(str(broken)), damaged[:80]
        assert len(found.problems[0].splitlines()) == 1 and len(found.entries) == kept


@pytest.mark.parametrize("seed", range(20))
def test_a_row_file_cut_anywhere_keeps_its_whole_rows(tmp_path, seed):
    path = write(tmp_path / "rows.jsonl", HEADER, *(ROW | {"question": str(q)} for q in range(3)))
    whole = path.read_bytes()
    path.write_bytes(whole[: random.Random(seed).randrange(len(whole))])
    lines = path.read_bytes().count(b"\n")
    problems: list[str] = []
    cells.collect([path], tmp_path, problems)
    assert len(problems) == (not path.read_bytes().endswith(b"\n"))
    if lines:
        assert len(read_block(path)[1]) == lines - 1
    else:
        assert "is empty" in problems[0]


# The report ----------------------------------------------------------------------------------------------------------


def spoil_everything(folder: Path) -> list[Path]:
    """One broken file of every kind beside good rows."""
    cell = next(folder.rglob("mtbench-eagle2"))
    empty, spoiled = block_path(cell.parent / "empty"), block_path(cell)
    empty.write_bytes(b"")
    spoiled.write_bytes(b"\x00\xff\n")
    lost = [cell.parent / "x.failed.json", cell / "trace-eagle2.json"]
    lost[0].write_text("[]")
    lost[1].write_text('[{"question": "q", "drafter": "x", "prompt": "", "first": "", "cycles": [{"path": [1]}]}]')
    return [empty, spoiled, *lost]


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes most of a report's time."""
    monkeypatch.setattr(figures, "draw_all", lambda *_: {})


def report_output(capsys, *overrides: str) -> str:
    """What the report's command prints, run in this process."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        report.main.__wrapped__(compose("report", list(overrides)))
    return capsys.readouterr().out


def test_every_format_says_on_top_what_is_broken_and_goes_on(tmp_path, capsys, no_figures):
    fill(tmp_path, ("eagle2", "vanilla"), questions=2, dataset="mtbench")
    broken = spoil_everything(tmp_path)
    printed = report_output(capsys, f"results={tmp_path}")
    top = printed[: printed.index("eagle2")]
    page, readme = (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()
    shown = report_output(capsys, f"results={tmp_path}", "format=markdown")
    for path in broken:
        assert f"LEFT OUT {path}" in printed
        assert f"LEFT OUT {path}" in page
        assert f"**LEFT OUT** {path}" in readme
        assert (f"**LEFT OUT** {path}" in shown) == (path.suffix == ".jsonl" or path.name.endswith(".failed.json"))
    assert "LEFT OUT" in top
    for text in (readme, shown):
        assert text.index("**LEFT OUT**") < text.index("| drafter |") < text.index("| eagle2 |")
    assert page.index("LEFT OUT") < page.index("<td>eagle2</td>")


def test_a_folder_with_nothing_readable_is_one_line(tmp_path):
    block_path(tmp_path / "m" / "d-greedy").write_bytes(b"")
    assert ".jsonl is empty" in (refusal(Report, Sources(tmp_path)) or "")


def test_studies_whose_claims_are_judged_can_be_chosen_on_the_command_line(tmp_path, capsys, no_figures):
    fill(tmp_path, ("eagle2",), questions=2, dataset="mtbench")
    report_output(capsys, f"results={tmp_path}", "studies=[beagle_table1]")
    with (tmp_path / "tables" / "claims.csv").open() as file:
        sources = [line["source"] for line in csv.DictReader(file)]
    assert any(s.startswith("Beagle, ") for s in sources) and not any(s.startswith("HASS") for s in sources)


def test_broken_studies_and_published_numbers_are_left_out(tmp_path):
    fill(tmp_path / "r", ("eagle2",), questions=2, dataset="mtbench")
    shutil.copytree(ROOT / "conf" / "study", tmp_path / "study")
    shutil.copytree(ROOT / "results" / "published", tmp_path / "published")
    (tmp_path / "study" / "moa_table2.yaml").write_text("claims:\n  - says: [")
    (tmp_path / "published" / "moa.csv").write_bytes(b"\xff")
    found = Report(Sources(tmp_path / "r", published=tmp_path / "published", studies=tmp_path / "study"))
    assert "moa_table2.yaml" in found.problems[0] and "moa.csv" in found.problems[1]
    assert all("shows moa" in p and p.endswith("not among the published numbers") for p in found.problems[2:])
    assert len(found.verdicts) > 10 and {p.paper for p in found.papers} == {
        "beagle",
        "coral",
        "eagle",
        "slides",
        "spec-bench",
    }


TEST = {"metric": "tau", "of": "a", "over": "b", "is": "more"}
STUDY = {
    "title": "t",
    "source": ["s"],
    "cells": [["dataset=mtbench"]],
    "arms": {"a": {"run": ["drafter=eagle2"]}, "b": {"run": ["drafter=hass"]}},
}


@pytest.mark.parametrize(
    "test",
    [
        TEST | {"metric": "beauty"},
        TEST | {"measured": "memory.peak"},
        TEST | {"is": "mor"},
        TEST | {"within": 0.1},
        TEST | {"than": "two"},
        TEST | {"at": {"temperature": 0}},
        TEST | {"over_at": {"category": "coding"}},
        {"metric": "tau", "of": "a", "over": "b"},
        {"metric": "tau", "of": "a", "is": "more"},
        {"of": "a", "over": "b", "is": "more"},
        {"measured": "memory", "of": "a", "over": "b", "is": "more"},
        TEST | {"off": "a"},
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(tmp_path, test):
    path = tmp_path / "x.yaml"

    def wrong(*tests):
        claim = {"says": "a", "source": "b", "published": "d", "tests": tests}
        path.write_text(json.dumps({**STUDY, "claims": [claim]}))
        return refusal(studies.read, path)

    assert f"{path}: claims.0.tests.1" in (wrong(TEST, test) or "")
    assert wrong(TEST) is None


def test_broken_provenances_are_left_out_of_the_held_out_table(tmp_path):
    for name, text in (("good", json.dumps(TRAINED)), ("bad", '{"history": [1]}'), ("foreign", '{"checkpoint": "x"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "provenance.json").write_text(text)
    problems: list[str] = []
    (line,) = trainings.held_out_lines(tmp_path, problems)
    assert line[0] == "good" and len(problems) == 1 and "bad" in problems[0]


@pytest.mark.parametrize("field", ["new_tokens", "idxs", "wall_time"])
@pytest.mark.parametrize("value", [None, "x", 3, ["x"], [None], [1.5, "x"], [float("nan")], [-1], {}])
def test_wrong_types_in_answers_of_others_are_one_line(tmp_path, field, value):
    choice = {"new_tokens": [3], "idxs": [1], "wall_time": [1.0]}
    path = write(tmp_path / "a.jsonl", {"question_id": 1, "choices": [choice | {field: value}]})
    assert f"a.jsonl line 1: choices.0.{field}" in (refusal(foreign_results.read, path, "eagle") or "")


def test_published_numbers_that_are_no_table_are_one_line(tmp_path):
    path, heading = tmp_path / "x.csv", ",".join(published.FIELDS).encode()
    for data in (b"", b"\xff", heading + b'\n"', heading + b"\n\0\n", heading + b'\n"a" b\n'):
        path.write_bytes(data)
        assert str(path) in (refusal(published.load, tmp_path) or ""), data
