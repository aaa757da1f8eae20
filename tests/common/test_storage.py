"""The atomic writer: links, full disks, scratch folders of killed processes; and that everything is written through it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from battery import file_size
from conftest import ROOT

from specbench.common import storage
from specbench.common.errors import SpecBenchError
from specbench.common.storage import atomic_path, write_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_is_replaced_and_what_it_leads_to_is_unchanged(tmp_path):
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_text("kept")
    link.symlink_to(other)
    write_file(link, "new")
    assert other.read_text() == "kept" and link.read_text() == "new" and not link.is_symlink()


def test_a_folder_that_leads_out_of_the_root_is_refused_and_a_linked_root_is_not(tmp_path):
    for name in ("disk", "elsewhere"):
        (tmp_path / name).mkdir()
    root = tmp_path / "results"
    root.symlink_to(tmp_path / "disk")
    write_file(root / "tables" / "x.md", "new", root)
    (root / "figures").symlink_to(tmp_path / "elsewhere")
    (root / "loop").symlink_to(root / "loop")
    for folder in ("figures", "figures/below", "tables/../figures", "tables/../../elsewhere", "loop"):
        with pytest.raises(SpecBenchError, match=r"symbolic link that leads out|File exists"):
            write_file(root / folder / "x.svg", "new", root)
    assert names(tmp_path / "elsewhere") == [] and names(tmp_path / "disk" / "tables") == ["x.md"]


def in_one_go(path: Path) -> None:
    write_file(path, bytes(5000))


def in_parts_by_a_library_that_loses_the_reason(path: Path) -> None:
    with atomic_path(path) as temporary:
        try:
            temporary.write_bytes(bytes(5000))
        except OSError as error:
            raise RuntimeError("encoder error -2") from error


@pytest.mark.parametrize("write", [in_one_go, in_parts_by_a_library_that_loses_the_reason])
def test_a_file_that_cannot_be_written_whole_stays_as_it_was_and_the_reason_is_given(tmp_path, write):
    path = tmp_path / "x.json"
    path.write_text("old")
    with file_size(4000), pytest.raises(SpecBenchError, match=rf"cannot write {path}: File too large; .*unchanged"):
        write(path)
    assert path.read_text() == "old" and names(tmp_path) == ["x.json"]
    write(path)
    assert path.read_bytes() == bytes(5000)


def test_what_stands_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path, reason in ((tmp_path / "file" / "x", "File exists|Not a directory"), (tmp_path / "folder", "Is a directory")):
        with pytest.raises(SpecBenchError, match=f"cannot write {path}: ({reason})"):
            write_file(path, "new")
    assert names(tmp_path) == ["file", "folder"]


def test_errors_of_other_causes_pass_and_leave_nothing(tmp_path):
    with pytest.raises(KeyError), atomic_path(tmp_path / "x"):
        raise KeyError("x")
    with pytest.raises(ConnectionResetError), atomic_path(tmp_path / "x"):
        raise ConnectionResetError(104, "Connection reset by peer")
    assert names(tmp_path) == []


WAIT = """
import sys, time
from pathlib import Path
from specbench.common.storage import atomic_path
with atomic_path(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_scratch_folders_of_killed_processes_are_removed_and_those_of_living_ones_are_not(tmp_path):
    command = [sys.executable, "-c", WAIT, str(tmp_path / ("x" * 255))]  # the longest name that there is
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as dead,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as living,
    ):
        for process in (dead, living):
            assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        found = names(tmp_path)
        foreign = [tmp_path / f"{storage.SCRATCH}0123456789ab-1-{age}" for age in ("old", "new")]
        for path in foreign:
            path.mkdir()
        os.utime(foreign[0], (time.time() - 2 * storage.ABANDONED_S,) * 2)
        (tmp_path / f"{storage.SCRATCH}of-a-user").mkdir()
        write_file(tmp_path / "y", "new")
        left = names(tmp_path)
        living.kill()
    assert sum(f"-{dead.pid}-" in name for name in found) == 1 and not any(f"-{dead.pid}-" in name for name in left)
    assert sum(f"-{living.pid}-" in name for name in left) == 1, "another process is writing"
    assert foreign[1].name in left and foreign[0].name not in left, "of another machine only the abandoned one"
    assert f"{storage.SCRATCH}of-a-user" in left


# Appended to (rows, journals, logs), scratch folders of their own, or inside `atomic_path`.
OTHERS = {
    "common/errors.py", "common/storage.py", "common/timing.py", "config/sweep.py", "data/download.py", "engine/weights.py",
    "gpu_day/probe.py", "gpu_day/runner.py",
    "records/blocks.py", "training/corpus.py", "training/export.py", "tuning/layer_search.py",
}  # fmt: skip
WRITES = re.compile(r'\.write_(text|bytes)\(|open\("[awx]b?"|\bsave_file\(|torch\.save\(|savefig\(|\.to_csv\(')
# the path that `atomic_path` gave, memory, or the corpus's own `write_text()`
WITHIN = re.compile(r"temporary|\bdrawn\b|\bdef write_text|workspace\.write_text\(\)")


def test_files_are_written_by_the_atomic_writer():
    found = {}
    for path in (ROOT / "specbench").rglob("*.py"):
        lines = [line.strip() for line in path.read_text().split("\n") if WRITES.search(line)]
        found[path.relative_to(ROOT / "specbench").as_posix()] = [line for line in lines if not WITHIN.search(line)]
    assert {name for name, lines in found.items() if lines} <= OTHERS, {
        n: x for n, x in found.items() if x and n not in OTHERS
    }
