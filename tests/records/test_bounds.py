"""Reading a file of rows ends at once and takes a few times its size, whatever lies under its name."""

import json
import os
from dataclasses import asdict

import numpy as np
import pytest
from fixtures import block_path, random_row, settings, whole

from specbench.common import hashing, io
from specbench.common.errors import SpecBenchError
from specbench.records.blocks import read_block, scan
from specbench.reporting import cells, freshness

ROW = {"kind": "prompt", **asdict(random_row(np.random.default_rng(0))[0])}
KINDS = {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_left_out_with_a_line(tmp_path, kind):
    rows, odd = (block_path(tmp_path / "m" / "cell", number) for number in range(2))
    rows.write_text(json.dumps(whole(settings("eagle2"))) + "\n" + json.dumps(ROW) + "\n")
    KINDS[kind](odd)
    (problem,) = cells.find(tmp_path).problems
    assert str(odd) in problem
    assert len(freshness.digest(tmp_path)) == 64
    for read in (io.read_json, read_block, lambda path: scan(path, "none"), hashing.of_file):
        with pytest.raises(SpecBenchError, match=r"not a regular file|is a directory"):
            read(odd)


HUGE = {
    "wrong items": (
        {"tokens": ["a"] * 300_000},
        r"tokens.0: input should be a valid integer, not 'a'; correct or remove it$",
    ),
    "wrong lists": (
        {"ranks": [["a"]] * 300_000},
        r"ranks.0.0: input should be a valid integer, not 'a'; correct or remove it$",
    ),
    "wrong tuples": ({"confidence": [[]] * 300_000}, r"confidence.0"),
    "unknown keys": ({str(i): 1 for i in range(300_000)}, "more than 16 MB or 262,144 keys in one value"),
    "length": ({"category": "x" * (io.MAX_LINE + 1)}, "more than 16 MB or 262,144 keys in one value"),
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_huge_line_is_refused_at_its_first_problem(tmp_path, kind):
    change, message = HUGE[kind]
    path = block_path(tmp_path)
    path.write_text(json.dumps(whole(settings("eagle2"))) + "\n" + json.dumps(ROW | change) + "\n")
    with pytest.raises(SpecBenchError, match=message):
        read_block(path)


def test_a_huge_file_is_not_read(tmp_path):
    path = block_path(tmp_path)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    for read in (read_block, lambda path: scan(path, "none"), io.read_json):
        with pytest.raises(SpecBenchError, match="is larger than"):
            read(path)
