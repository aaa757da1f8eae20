"""Rows that several studies need are decoded once."""

import json

from command_line import TWO, call, read_rows

from specbench.records import blocks

CELL = TWO.replace("  - [dataset=mtbench, data.limit=3]\n", "")
RENAMED = CELL.replace("  chain: {", "  no_tree: {").replace("over: chain", "over: no_tree")
GENERATIONS = 2 * 3  # turns of a question, drafters with the baseline


def study(home, tmp_path, name, *arguments, text=CELL):
    """A study of one replayed cell of six questions; what it said of copied rows."""
    folder = home / "conf"
    (folder / "study").mkdir(parents=True, exist_ok=True)
    (folder / "study" / f"{name}.yaml").write_text(text.replace("HOME", str(home)))
    done = call(home, "study", f"--config-dir={folder}", f"study={name}", f"results={tmp_path}", *arguments)
    assert done.returncode == 0, done.stderr
    return [line.split(": ")[1].split()[0] for line in done.stderr.splitlines() if "are those of other studies" in line]


def rows(folder):
    return [row for path in blocks.below(folder) for row in read_rows(path)[1]]


def counts(folder, **labels):
    """What was counted, by generation. labels: those of another study."""
    return {
        (labels.get(r.drafter, r.drafter), r.text, r.turn): (r.tokens, r.accepted, r.nodes, r.passes) for r in rows(folder)
    }


def test_a_study_copies_what_another_has_replayed(home, tmp_path):
    assert study(home, tmp_path, "first") == []
    assert study(home, tmp_path, "second", text=RENAMED) == [str(6 * GENERATIONS)]
    assert counts(tmp_path / "first", chain="no_tree") == counts(tmp_path / "second")
    (origin,), copies = blocks.below(tmp_path / "first"), blocks.below(tmp_path / "second")
    first = read_rows(origin)[0]
    for path in copies:
        header = read_rows(path)[0]
        assert header["study"] == "second" and {*header["arms"]} <= {"none", "eagle2", "no_tree"}
        assert all(header[name] == first[name] for name in ("commit", "versions", "hardware", "load", "decoding"))
    assert study(home, tmp_path, "second", text=RENAMED) == [], "what is there was copied again"


def test_only_rows_of_questions_and_arms_that_are_asked_are_copied(home, tmp_path):
    study(home, tmp_path, "first")
    assert study(home, tmp_path, "second", "data.limit=2", "arms=[chain]") == ["8"]
    assert {row.drafter for row in rows(tmp_path / "second")} == {"none", "chain"}
    assert study(home, tmp_path, "third", "decode.max_new_tokens=10") == [], "answers of another length"
    assert study(home, tmp_path, "fourth", "rerun=all") == [], "all was to be measured again"
    assert len(rows(tmp_path / "fourth")) == 6 * GENERATIONS


def test_rows_that_replay_another_answer_are_not_copied(home, tmp_path):
    """As another kind of machine may give one, where two tokens are equally likely."""
    study(home, tmp_path, "first", "data.limit=1")
    (path,) = blocks.below(tmp_path / "first")
    header, *records = map(json.loads, path.read_text().splitlines())
    for record in records:
        if record["kind"] == "prompt" and record["drafter"] == "chain" and record["turn"] == 1:
            record["tokens"][-1] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *records)))
    assert study(home, tmp_path, "second", "data.limit=1") == [str(GENERATIONS - 1)]
    assert len(counts(tmp_path / "second")) == GENERATIONS
