"""Home folders in paths, users without one, and home folders of users that there are not."""

from pathlib import Path

import pytest
from conftest import ROOT, composed

from specbench.common import storage
from specbench.common.errors import SpecBenchError, format_exception
from specbench.config import train_spec


def test_weights_are_written_where_they_are_read(monkeypatch, tmp_path):
    """Whatever the current folder is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for option, folder in (("new/eagle2", ROOT / "new/eagle2"), ("'~/w'", tmp_path / "home/w"), (str(tmp_path), tmp_path)):
        job = train_spec.from_config(composed("train", "drafter=eagle2", f"train.out={option}"))
        assert job.out == folder == storage.project_path(option.strip("'"))
    assert not Path("new").exists() and not Path("~").exists()


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (None, r"^~/\.cache/specbench: there is no such home folder; set SPECBENCH_CACHE"),
        ("~nobody-here/x", r"^~nobody-here/x: there is no such home folder; set SPECBENCH_CACHE"),
    ],
)
def test_a_home_folder_that_is_missing_is_one_line(monkeypatch, tmp_path, cache, message):
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    if cache is None:
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id without an entry, without HOME
    else:
        monkeypatch.setenv("SPECBENCH_CACHE", cache)
    with pytest.raises(SpecBenchError, match=message):
        storage.cache_root()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert f"its traceback is in {tmp_path}" in format_exception(KeyError("x")), "written to the folder for temporary files"
