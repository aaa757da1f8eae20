"""What a training must not write over unasked: weights that belong to the project, or that another recipe made."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.common.errors import SpecBenchError
from specbench.common.io import differing, read_json
from specbench.records import identity
from specbench.records.schema import PROVENANCE

UNDECIDED = {  # options that say where, when and how fast, not what comes out
    "train": (
        "name",
        "out",
        "minutes",
        "missing",
        "overwrite",
        "build",
        "until",
        "packed",
        "pack",
        "shard_target",
        "follow",
    ),
    "settings": ("checkpoint_minutes", "validate_minutes", "validation_answers"),
    "corpus": ("precision", "states", "shard", "rows", "reading"),
    "drafter": ("name", "weights", "vocabulary"),
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
    """Refuse to write over a file, unless it is an untracked one that the same recipe made.

    Args:
        path: where the training will write. recipe: `made_by` of this training; None: any untracked file may go.

    Raises:
        SpecBenchError: it would be lost.
    """
    if not path.exists():
        return
    hint = "write elsewhere with train.out=FOLDER, or allow it with train.overwrite=true"
    if tracked(path):
        raise SpecBenchError(f"{path} is under version control and would be overwritten; {hint}")
    if recipe is None:
        return
    origin = path.parent / PROVENANCE
    if not origin.exists():
        raise SpecBenchError(f"{path} has no {PROVENANCE} beside it that says who made it; {hint}")
    before: dict[str, Any] = read_json(origin)
    there = made_by(before.get("drafter") or {}, before.get("recipe") or {})
    if changed := list(differing(there, json.loads(json.dumps(recipe)))):
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise SpecBenchError(f"{path} was made with another {', '.join(changed[:SHOWN])}{more}; {hint}")


def made_by(drafter: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What decides about weights, of the options of a drafter and of `train`, as plain values."""
    parts = {"drafter": drafter, "train": recipe, **{name: recipe.get(name) or {} for name in ("settings", "corpus")}}
    found = {name: {k: v for k, v in part.items() if k not in UNDECIDED[name]} for name, part in parts.items()}
    found["train"] = {k: v for k, v in found["train"].items() if k not in found}
    return {name: identity.plain_options(part, drop_files=False) for name, part in found.items()}
