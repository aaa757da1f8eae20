"""The shape of a drafter's network, as its weights were trained: recipes may make larger ones than `conf/drafter` does."""

from typing import Any

from hydra.utils import get_class

from specbench.common.errors import SpecBenchError, warn
from specbench.common.io import read_json
from specbench.common.storage import project_path
from specbench.config import validation
from specbench.records.schema import PROVENANCE


def take_shape(options: dict[str, Any]) -> None:
    """Set the options of a drafter that shape its network (`shape_options`) to those in the provenance of its weights.

    No others fit these weights. What agrees is left as it is, so that an arm's options stay those of its earlier rows. A
    provenance that cannot be read is left to `weights.load`, whose error names it.
    """
    drafter: Any = get_class(options["_target_"])
    path = project_path(options["weights"]) / PROVENANCE
    if not drafter.shape_options or not path.is_file():
        return
    try:
        trained = read_json(path).get("drafter") or {}
    except SpecBenchError:
        return
    declared = validation.options(drafter)
    for name in drafter.shape_options:
        now = options.get(name, declared[name].default)
        if name not in trained or trained[name] == now:
            continue
        validation.check_value(trained[name], declared[name], f"{path}: drafter.{name}")
        if name in options:
            warn(f"drafter.{name}={trained[name]}, as its weights in {path.parent} were trained, instead of {now}")
        options[name] = trained[name]
