"""A training killed between any two of its files leaves a folder that is complete, or one that is refused and made anew."""

import json
import os

import pytest
from drafting import make, tiny
from test_fitted import made_up

from specbench.common.errors import SpecBenchError
from specbench.engine import weights
from specbench.tuning import acceptance
from specbench.tuning.train_stages import lacking

TARGET = tiny()
FILES = 3  # acceptance, provenance, weights


class Killed(BaseException):
    pass


def save(folder, seed):
    """What a training writes at its end. seed: makes its weights others than those before."""
    drafter = make("eagle2", TARGET)
    next(p for p in drafter.parameters() if p.requires_grad).data += seed
    provenance = {"target_fingerprint": TARGET.fingerprint(), "seed": seed, "recipe": {"follow": True}}
    weights.save(drafter, folder, provenance, lambda sha256: acceptance.write(folder, made_up(seed), sha256))


def killed_save(folder, seed, renames, monkeypatch):
    """The same, killed before the rename of this number."""
    replace, left = os.replace, iter(range(renames))

    def rename(*paths):
        if next(left, None) is None:
            raise Killed
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", rename)
        with pytest.raises(Killed):
            save(folder, seed)


@pytest.mark.parametrize("before", [False, True], ids=["new", "over others"])
@pytest.mark.parametrize("renames", range(FILES))
def test_weights_are_put_in_place_last_and_only_with_what_belongs_to_them(tmp_path, monkeypatch, renames, before):
    if before:
        save(tmp_path, 1)
        assert lacking(tmp_path) is None
    killed_save(tmp_path, 2, renames, monkeypatch)
    made = make("eagle2", TARGET)
    if renames == 2 or not before:
        assert lacking(tmp_path) == "weights"
        with pytest.raises(SpecBenchError, match="train them"):
            weights.load(made, tmp_path, TARGET.fingerprint())
    else:
        assert weights.load(made, tmp_path, TARGET.fingerprint())["seed"] == 1
        assert lacking(tmp_path) == ("acceptance" if renames else None)
    save(tmp_path, 2)
    assert lacking(tmp_path) is None and weights.load(made, tmp_path, TARGET.fingerprint())["seed"] == 2
    assert len(list(tmp_path.iterdir())) == FILES


def test_acceptance_alone_is_made_where_it_alone_is_wanted_and_missing(tmp_path):
    assert lacking(tmp_path) == "weights"
    save(tmp_path, 1)
    (tmp_path / acceptance.FILE).write_text("{}")
    assert lacking(tmp_path) == lacking(tmp_path, True) == "acceptance" and lacking(tmp_path, False) is None
    (tmp_path / acceptance.FILE).unlink()
    assert lacking(tmp_path) == "acceptance"


def test_a_provenance_without_a_digest_is_read_as_before(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "provenance.json"
    provenance = json.loads(path.read_text())
    del provenance["sha256"]
    path.write_text(json.dumps(provenance))
    assert weights.load(make("eagle2", TARGET), tmp_path, TARGET.fingerprint())["seed"] == 1
