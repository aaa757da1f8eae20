"""Users without a home folder, and home folders of users that there are not."""

import pytest

from specbench.common import storage
from specbench.common.errors import SpecBenchError, format_exception


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (None, r"^~/\.cache/specbench: there is no such home folder; set SPECBENCH_CACHE"),
        ("~nobody-here/x", r"^~nobody-here/x: there is no such home folder; set SPECBENCH_CACHE"),
    ],
)
def test_a_home_folder_that_is_missing_is_one_line(monkeypatch, cache, message):
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    if cache is None:
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id without an entry, without HOME
    else:
        monkeypatch.setenv("SPECBENCH_CACHE", cache)
    with pytest.raises(SpecBenchError, match=message):
        storage.cache_root()
    assert "its traceback is in" in format_exception(KeyError("x")), "written to the folder for temporary files"
