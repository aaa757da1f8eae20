"""The journal of a layer search: refused where it is damaged, continued where it was cut off, written by one at a time."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from drafters.self_speculation import alternate
from specbench.common.errors import SpecBenchError
from specbench.tuning import layer_search

LINE = {"attention": [1], "mlp": [], "speed": 1.25}
DAMAGE = {
    "no JSON": b"{",
    "binary": b"\xff\x00",
    "a list": b"[]",
    "another format": b'{"op_code": 0, "worker_id": "x", "study_name": "skip", "directions": [2]}',
    "a key less": json.dumps({k: v for k, v in LINE.items() if k != "speed"}).encode(),
    "a key more": json.dumps(LINE | {"x": 1}).encode(),
    "another type": json.dumps(LINE | {"mlp": "1"}).encode(),
    "no number": json.dumps(LINE | {"speed": float("nan")}).encode(),
    "huge": json.dumps(LINE | {"speed": 1e300}).encode(),
    "a layer that there is not": json.dumps(LINE | {"mlp": [4]}).encode(),
    "a layer that stays": json.dumps(LINE | {"attention": [0]}).encode(),
}


def search(journal, trials=5):
    asked = []

    def speed(skipped):
        asked.append(skipped)
        return 1.0 + len(skipped.attention)

    return layer_search.best(5, speed, alternate(5), trials, journal), asked


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_journal_is_refused_in_one_line_and_kept(tmp_path, kind):
    journal = tmp_path / "search.jsonl"
    journal.write_bytes(json.dumps(LINE).encode() + b"\n" + DAMAGE[kind] + b"\n")
    before = journal.read_bytes()
    with pytest.raises(SpecBenchError, match="remove") as caught:
        search(journal)
    assert str(caught.value).startswith(f"{journal} line 2") and "\n" not in str(caught.value)
    assert journal.read_bytes() == before


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_search_continues_behind_its_last_whole_line(tmp_path, cut):
    journal = tmp_path / "search.jsonl"
    search(journal)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-cut])
    kept = journal.read_bytes().count(b"\n")
    _, again = search(journal)
    lines = journal.read_bytes().splitlines()
    assert len(lines) == 5 and lines[:kept] == whole.splitlines()[:kept]
    assert len(again) <= 5 - kept


def test_searches_side_by_side_do_not_double_the_trials(tmp_path):
    journal = tmp_path / "search.jsonl"
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: search(journal, 30), range(2))
    assert len(journal.read_bytes().splitlines()) == 30
    assert one[0] == other[0] and not (one[1] and other[1]), "both tried sets"
