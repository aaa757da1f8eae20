"""Every number that a configuration takes: at 0, 1, its smallest and largest value, and beyond."""

import functools
import time
from collections.abc import Iterator
from typing import Any

from battery import COUNT, leaves, numbers
from conftest import DRAFTERS, ROOT, composed
from hydra.utils import instantiate
from omegaconf import OmegaConf

import specbench.cost
import specbench.evidence
import specbench.run
import specbench.serve
import specbench.study
from specbench.common.errors import SpecBenchError
from specbench.config import validation
from specbench.config.train_spec import TrainOptions

BEYOND = (10**30, -(10**30), 1e30, float("nan"), float("inf"), "text")
COMMANDS: list[tuple[str, type, list[str]]] = [
    ("run", specbench.run.Options, [f"drafter={name}" for name in DRAFTERS]),
    ("run", specbench.run.Options, [f"tree={path.stem}" for path in sorted((ROOT / "conf" / "tree").glob("*.yaml"))]),
    ("train", TrainOptions, ["drafter=eagle2"]),
    ("study", specbench.study.Options, ["study=bench"]),
    ("cost", specbench.cost.Options, ["drafter=eagle2"]),
    ("serve", specbench.serve.Options, ["port=0"]),
    ("evidence", specbench.evidence.Options, ["minutes=1"]),
]


@functools.cache
def plain(command: str, override: str) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(composed(command, override), resolve=True)
    return config


def numeric() -> dict[tuple[str, str], Any]:
    """Every option with a number in it: its annotation, by path and annotation, so that drafters share what is alike."""
    return {
        (path, str(annotation)): annotation
        for command, options, overrides in COMMANDS
        for override in overrides
        for path, annotation in leaves(plain(command, override), options)
        if list(numbers(annotation))
    }


def refused(value: Any, annotation: Any, path: str) -> bool:
    """Is a value refused, by name and in one line?"""
    COUNT.tried += 1
    try:
        validation.check_value(value, validation.Option(annotation, required=True), path)
    except SpecBenchError as error:
        message = str(error)
    else:
        return False
    assert message.startswith(path) and len(message.splitlines()) == 1
    return True


def test_every_number_has_a_smallest_and_a_largest_value():
    options = numeric()
    assert len(options) > 120
    for (path, _), annotation in options.items():
        for number in numbers(annotation):
            for value in (*BEYOND, -1):
                assert refused(number.wrap(value), annotation, path), f"{path}={value}"
            for value in (0, 1, *number.ends):
                refused(number.wrap(value), annotation, path)
            assert not all(refused(number.wrap(value), annotation, path) for value in number.ends), path


def accepted_values(path: str, annotation: Any) -> Iterator[Any]:
    for number in numbers(annotation):
        for value in map(number.wrap, number.ends):
            if not refused(value, annotation, path):
                yield value


def changed() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Nodes with a class, each of their numbers, and the values at its ends; once for each class."""
    seen = set()
    for command, options, overrides in COMMANDS:
        for override in overrides:
            config = plain(command, override)
            for path, annotation in leaves(config, options):
                *parents, name = path.split(".")
                node = functools.reduce(lambda part, key: part.get(key) or {}, parents, config)
                if "_target_" in node and (node["_target_"], name) not in seen:
                    seen.add((node["_target_"], name))
                    yield from ((node, name, value) for value in accepted_values(path, annotation))


def problem(node: dict[str, Any], **value: Any) -> str | None:
    """What goes wrong, other than a refusal, when a node is instantiated with another value."""
    begun = time.monotonic()
    try:
        instantiate(node, **value)
    except Exception as error:
        if not any(isinstance(one, SpecBenchError) for one in (error, error.__cause__)):
            return repr(error)
    seconds = time.monotonic() - begun
    return f"{seconds:.1f} s" if seconds > 5 else None


def test_what_is_accepted_can_be_made():
    """Drafters, trees, settings: nothing fails in another way than with a message, or takes long."""
    tried = list(changed())
    wrong = [(node["_target_"], name, value, why) for node, name, value in tried if (why := problem(node, **{name: value}))]
    assert len(tried) > 150 and not wrong
