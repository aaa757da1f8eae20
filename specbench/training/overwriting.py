"""What a training must not overwrite unasked: files under version control, and weights that another recipe made."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.common.errors import SpecBenchError
from specbench.common.io import differing, read_json
from specbench.records import identity
from specbench.records.schema import PROVENANCE

NON_IDENTITY_OPTIONS: Mapping[str, frozenset[str]] = {  # that say where, when and how fast, not what comes out
    "train": frozenset({"name", "out", "minutes", "missing", "overwrite", "build", "until", "shard_target", "follow"})
    | {"packed", "pack"},
    "settings": frozenset({"checkpoint_minutes", "validate_minutes"})
    | {"validations", "validation_answers", "validation_trees"},
    "corpus": frozenset({"precision", "states", "layers", "shard", "rows", "reading"}),
    "drafter": frozenset({"name", "weights", "vocabulary"}),
}
SHOWN = 4  # differences that a message names


def tracked(path: Path) -> bool:
    """Is this file under version control? False outside a git checkout."""
    try:
        command = ["git", "ls-files", "--error-unmatch", path.name]
        return subprocess.run(command, cwd=path.parent, capture_output=True).returncode == 0
    except OSError:
        return False


def refuse_overwriting(path: Path, recipe: Mapping[str, Any] | None = None) -> None:
    """Raise `SpecBenchError` if a file is there, unless it is an untracked one that the same recipe made.

    recipe: `made_by` of this training; None: any untracked file may be overwritten.
    """
    if not path.exists():
        return
    hint = "write elsewhere with train.out=FOLDER, or allow it with train.overwrite=true"
    if tracked(path):
        raise SpecBenchError(f"{path} is under version control and would be overwritten; {hint}")
    if recipe is None:
        return
    provenance = path.parent / PROVENANCE
    if not provenance.exists():
        raise SpecBenchError(f"{path} has no {PROVENANCE} beside it that says who made it; {hint}")
    if changed := differences(provenance, recipe):
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise SpecBenchError(f"{path} was made with another {', '.join(changed[:SHOWN])}{more}; {hint}")


def differences(provenance: Path, recipe: Mapping[str, Any]) -> list[str]:
    """Names of the options that are not those by which weights were made. recipe: `made_by` of another training."""
    before: dict[str, Any] = read_json(provenance)
    earlier = made_by(before.get("drafter") or {}, before.get("recipe") or {})
    return list(differing(earlier, json.loads(json.dumps(recipe))))


def made_by(drafter: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a drafter and of `train` that determine weights, as plain values."""
    parts = {"drafter": drafter, "train": recipe, **{name: recipe.get(name) or {} for name in ("settings", "corpus")}}
    kept = {name: {k: v for k, v in part.items() if k not in NON_IDENTITY_OPTIONS[name]} for name, part in parts.items()}
    kept["train"] = {k: v for k, v in kept["train"].items() if k not in kept}
    return {name: identity.plain_options(part, drop_files=False) for name, part in kept.items()}
