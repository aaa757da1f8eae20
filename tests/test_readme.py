"""What the README shows at its top, and that the files and commands it names exist."""

import re

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_the_first_thirty_lines_hold_claim_table_and_commands():
    top = "\n".join(README.splitlines()[:30])
    assert "| none |" in top and "make bench" in top and "make test" in top


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_linked_files_exist(name):
    assert (ROOT / name).exists()


def test_makefile_targets_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_no_path_or_host_of_a_workplace_is_committed():
    import subprocess

    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    forbidden = re.compile(r"(?<![\w.])/(work|root|home|tmp)/")
    for name in filter(None, files):
        if name.endswith((".py", ".md", ".yaml", ".toml", ".txt", "Makefile")) and name != "tests/test_readme.py":
            assert not forbidden.search((ROOT / name).read_text()), name
