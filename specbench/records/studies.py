"""Studies: one table or figure of a paper as an experiment, described in `conf/study/<name>.yaml`.

A study lists its arms with their training and decoding, its requirements, the published tables it reproduces and the
claims it tests. Its arms decode the same prompts in turn, in one process with one baseline; a claim compares arms of its
own study only.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Gt, Interval, MinLen
from pydantic import AfterValidator, StringConstraints, with_config
from typing_extensions import TypedDict

from specbench.common.environment import installed
from specbench.common.errors import SpecBenchError
from specbench.common.io import STRICT, read_yaml, readable
from specbench.common.storage import PROJECT
from specbench.common.types import Count, Name, Repetitions, Seed, Temperature, Text
from specbench.records import figures
from specbench.records.cell_options import CellOptions
from specbench.records.metrics import BASELINE, METRICS
from specbench.records.schema import all_tokens

FOLDER = PROJECT / "conf" / "study"
OWN = ("drafter", "tree", "verify", "checkpoint")  # options in which drafters of one cell may differ
ON_DEMAND = 9  # as a priority: planned only where the study is named

Override = Annotated[str, StringConstraints(pattern=r"^[+~]{0,2}[\w/@.]+(=.*)?$")]  # as on the command line
Selector = Annotated[str, StringConstraints(pattern=r"^\w*(; \w+=[^;]+)*$")]  # of published numbers
PLACE = ("dataset", "temperature", "batch", "quantised", "adapted", "cut_after")  # name one of a study's cells, see `At`
# See `specbench.evaluation.measurements`.
Measured = Literal[
    "memory", "training", "drafting", "overhead", "target_pass", "clients", "generate", "busy", "bandwidth", "quality"
]  # fmt: skip
Quantised = Literal["int8", "int4"]
Aspect = Literal["tree", "dataset", "temperature", "length", "dtype", "prompts", "batch", "target"]


class StudyArm(TypedDict):
    """One drafter configuration of a study.

    run: overrides for `specbench.run`. train: overrides for `specbench.train` besides the drafter's options in `run`;
    without it existing weights are used. start: the arm, listed before, from whose trained weights this training goes on.
    weights: the arm whose trained weights this one uses. seeds: of training. needs: as a study has them, of this arm alone.
    adapted: it drafts for a target with an adapter alone, or (false) for one without; by default for either.
    """

    run: Annotated[list[Override], MinLen(1)]
    train: NotRequired[list[Override]]
    start: NotRequired[Name]
    weights: NotRequired[Name]
    seeds: NotRequired[Annotated[list[Seed], MinLen(1)]]
    needs: NotRequired["Needs"]
    adapted: NotRequired[bool]


class Needs(TypedDict, total=False):
    """Requirements of a study or claim.

    vocabulary: minimum of the target's ids. billions: minimum of its parameters. trained: minimum of training tokens of
    every trained arm. alike: all trained arms saw equally many tokens (within 5%, averaged over seeds). pretrained: an arm
    that needs weights trained elsewhere. package: of the Python package index, to run it. project: something that this
    project lacks.
    """

    device: Literal["cuda", "cpu"]
    vocabulary: Annotated[int, Gt(0)]
    billions: Annotated[float, Gt(0)]
    trained: Annotated[float, Gt(0)]
    alike: Literal[True]
    pretrained: Name
    package: Text
    project: Text


class StudyCell(TypedDict):
    """A cell with requirements of its own: a machine that does not meet them leaves it out. run: overrides."""

    run: list[Override]
    needs: Needs


class At(TypedDict, total=False):
    """One of a study's cells; by default greedy, one sequence at a time, of the original target, else as the first one.

    adapted: folder name of the target's adapter (`model.adapter`); by default the one that the arm drafts for, if any.
    cut_after: tokens after which the link to the server breaks (`link.cut_after`).

    dataset: several: the mean over them. category: of its prompts; `over_at` then means all other categories.
    """

    dataset: Name | Annotated[list[Name], MinLen(2)]
    category: Name
    temperature: Annotated[Temperature, Gt(0)]
    batch: Count
    quantised: Quantised
    adapted: Name
    cut_after: Count


# `memory.peak` of a measurement, or one of its values over another: `target_pass.ms_8/ms_1`.
MeasuredValue = Annotated[str, StringConstraints(pattern=r"^\w+(\.\w+)+(/\w+)?$")]
# "is" is a keyword, hence the call.
Test = TypedDict(
    "Test",
    {
        "metric": NotRequired[Literal[METRICS]],  # type: ignore[valid-type]
        "measured": NotRequired[MeasuredValue],
        "of": Name,
        "at": NotRequired[At],
        "over": NotRequired[Name],
        "over_at": NotRequired[At],
        "over_metric": NotRequired[Literal[METRICS]],  # type: ignore[valid-type]
        "than": NotRequired[Annotated[float, Gt(0)]],
        "is": NotRequired[Literal["more", "less"]],
        "by": NotRequired[float],
        "within": NotRequired[Annotated[float, Gt(0)]],
    },
)


def _check_test(test: Test) -> Test:
    if ("metric" in test) == ("measured" in test):
        raise ValueError("a test is about a `metric` of rows, or about something `measured` beside them")
    if ("is" in test) == ("within" in test):
        raise ValueError("a test expects a direction (`is`) or an interval (`within`)")
    if not {"over", "over_at", "over_metric", "than"} & set(test):
        others = "another arm (`over`), cell (`over_at`), metric (`over_metric`) or number (`than`)"
        raise ValueError(f"a test compares: with {others}")
    if isinstance(test.get("over_at", {}).get("dataset"), list):
        raise ValueError("`over_at` names one data set")
    if "category" in test.get("over_at", {}):
        raise ValueError("`over_at` names no category: it stands for all others than the one of `at`")
    return test


def is_difference(test: Mapping[str, Any]) -> bool:
    """Is the effect of a test a difference? Otherwise it is a ratio."""
    return "metric" in test and (test["metric"] in ("tau", "solved", "rouge_l", "answer_kl") or "alpha" in test["metric"])


class Claim(TypedDict):
    """A paper's statement, the published numbers and its tests; none where the project cannot test it."""

    says: Text
    source: Text
    published: Text
    needs: NotRequired[Needs]
    tests: list[Annotated[Test, AfterValidator(_check_test)]]


class Shown(TypedDict):
    """A published table that the study reproduces. paper, table: as in `results/published/*.csv`.

    arms: which published numbers -> the arm whose value stands beside them. A key is a published drafter and, where a table
    has several rows of it, parts of its variant or other columns: `eagle1; tree=chain`. The key with most parts counts.
    beside: a published target beside whose numbers those of a target stand that the table does not have; by default the
    first that fits.
    """

    paper: Text
    table: Text
    arms: Mapping[Selector, Name]
    beside: NotRequired[Name]


@with_config(STRICT)
class Study(TypedDict):
    """One `conf/study/*.yaml`.

    cells: for each the overrides for `specbench.run` (prompts, number of questions, length, temperature, `replay`), see
    `cell_runs`. varies: aspects in which compared arms may differ. priority: 1 is measured first, default 5, see
    `ON_DEMAND`. ranks: the metric by which the report orders its arms. measure: quantity -> repetitions, see `measured_in`.
    """

    title: Text
    source: Annotated[list[Text], MinLen(1)]
    needs: NotRequired[Needs]
    arms: Annotated[Mapping[Name, StudyArm], MinLen(1)]
    cells: Annotated[list[list[Override] | StudyCell], MinLen(1)]
    varies: NotRequired[list[Aspect]]
    priority: NotRequired[Annotated[int, Interval(ge=1, le=9)]]
    ranks: NotRequired[Literal[METRICS]]  # type: ignore[valid-type]
    measure: NotRequired[Mapping[Measured, Repetitions]]
    shows: NotRequired[list[Shown]]
    figures: NotRequired[list[figures.Figure]]
    claims: NotRequired[list[Claim]]


def check(study: Study, name: str) -> Study:
    """Check that arms named in a study exist and are complete. Raises `SpecBenchError`."""
    arms = study["arms"]
    if BASELINE in arms:
        raise SpecBenchError(f"study {name}: arm {BASELINE} is the baseline, which every cell has; call it otherwise")
    named = [a["weights"] for a in arms.values() if "weights" in a]
    named += [arm for shown in study.get("shows", []) for arm in shown["arms"].values()]
    for claim in study.get("claims", []):
        if not claim["tests"] and "project" not in {**study.get("needs", {}), **claim.get("needs", {})}:
            raise SpecBenchError(f"study {name}: {claim['says']!r} has no test; say in needs.project what it waits for")
        named += compared_arms(claim)
    for arm in named:
        if arm not in arms and arm != BASELINE:
            raise SpecBenchError(f"study {name}: no arm is called {arm}; there are {', '.join(arms)}")
    figures.check(study.get("figures", []), study, name)
    trained: set[str] = set()
    for label, one in arms.items():
        _check_options(f"study {name}: arm {label}", one)
        if "start" in one and ("train" not in one or one["start"] not in trained):
            raise SpecBenchError(
                f"study {name}: arm {label} starts from {one['start']}: both must be trained, that one listed before"
            )
        if one.get("weights") and "train" not in arms[one["weights"]]:
            raise SpecBenchError(f"study {name}: arm {label} takes the weights of {one['weights']}, which is not trained")
        trained |= {label} if "train" in one else set()
        if not any(o.startswith("drafter=") for o in one["run"]):
            raise SpecBenchError(f"study {name}: arm {label} names no drafter; begin its `run` with drafter=NAME")
    return study


def _check_options(where: str, arm: StudyArm) -> None:
    """Raises `SpecBenchError` for options that would be ignored, since all arms of a cell share them."""
    for override in arm["run"]:
        option = re.split(r"[=@]", override.lstrip("+~"))[0]
        if re.split(r"[./]", option)[0] not in (*OWN, "endpoint"):
            own = ", ".join(OWN)
            raise SpecBenchError(f"{where} sets {option}, which all arms share; set it in `cells` (an arm's own: {own})")


def read(path: Path) -> Study:
    """Read one file. Raises `SpecBenchError`."""
    study: Study = read_yaml(path, Study)
    return check(study, path.stem)


def load(folder: Path = FOLDER, problems: list[str] | None = None) -> dict[str, Study]:
    """All studies by name. problems: see `specbench.common.io.readable`."""
    return {path.stem: study for path, study in readable(sorted(folder.glob("*.yaml")), read, problems)}


def unmet(
    needs: Mapping[str, Any], header: Mapping[str, Any] | None, cuda: bool, arms: Collection[str] | None = None
) -> list[str]:
    """The requirements that are not met, in words.

    Args:
        header: of the cell that is judged; None if nothing was run. cuda: is there a GPU, if nothing was run?
        arms: whose training counts; None: all of the cell.
    """
    missing = [needs["project"]] if "project" in needs else []
    if header is not None:
        cuda = str(header["target"].get("device", "")).startswith("cuda")
    if needs.get("device") == "cuda" and not cuda:
        missing.append("a GPU")
    if needs.get("device") == "cpu" and cuda:
        missing.append("a target on a CPU")
    if header is None:
        return missing
    if header["target"].get("vocabulary", 0) < needs.get("vocabulary", 0):
        missing.append(f"a target with {needs['vocabulary']:,} ids")
    if header["target"]["parameters"] < 0.8e9 * needs.get("billions", 0):
        missing.append(f"a target of {needs['billions']:g} billion parameters")
    return missing + _unmet_by_training(needs, header, arms)


def _unmet_by_training(needs: Mapping[str, Any], header: Mapping[str, Any], arms: Collection[str] | None) -> list[str]:
    """The requirements of the arms' training that are not met, in words."""
    missing = []
    seen: dict[str, list[int]] = {}  # arm -> training tokens of each of its seeds
    for label, arm in header["arms"].items():
        name = arm.get("of", label)
        if arm["weights"].get("history") and (arms is None or name in arms):
            seen.setdefault(name, []).append(all_tokens(arm["weights"]))
    means = [sum(tokens) / len(tokens) for tokens in seen.values()]
    if seen and min(map(min, seen.values())) < needs.get("trained", 0):
        missing.append(f"drafters trained on {needs['trained'] / 1e6:g} M tokens")
    if needs.get("alike") and means and round(max(means) / min(means), 2) > 1.05:  # to whole percent
        missing.append("drafters trained on as many tokens each")
    if needs.get("pretrained") in seen:
        missing.append(f"a pretrained draft model as {needs['pretrained']}")
    return missing


def arms_here(study: Study, cuda: bool) -> list[str]:
    """The arms whose needs are met. cuda: is there a GPU?"""
    absent = {name for names in absent_packages(study, study["arms"]).values() for name in names}
    return [n for n, arm in study["arms"].items() if n not in absent and not unmet(arm.get("needs", {}), None, cuda)]


def absent_packages(study: Study, names: Iterable[str]) -> dict[str, list[str]]:
    """Packages that are not installed -> those of the named arms that need them."""
    absent: dict[str, list[str]] = {}
    for name in names:
        package = study["arms"][name].get("needs", {}).get("package")
        if package is not None and not installed(package):
            absent.setdefault(package, []).append(name)
    return absent


def compared_arms(claim: Mapping[str, Any]) -> list[str]:
    """The arms that a claim's tests name."""
    return [test[side] for test in claim["tests"] for side in ("of", "over") if side in test]


def claim_needs(study: Study, claim: Claim) -> dict[str, Any]:
    """What a claim's verdict needs: what the study, the claim and the arms of its tests do."""
    needs: dict[str, Any] = dict(study.get("needs", {}))
    for name in compared_arms(claim):
        needs |= study["arms"][name].get("needs", {}) if name in study["arms"] else {}
    return needs | claim.get("needs", {})


def takes_part(arm: StudyArm, adapter: str | None) -> bool:
    """Does an arm draft for the target of a cell? adapter: that target's, if it has one."""
    return arm.get("adapted") in (None, adapter is not None)


def cell_runs(study: Study) -> list[list[Override]]:
    """The overrides of every cell."""
    return [cell if isinstance(cell, list) else cell["run"] for cell in study["cells"]]


def cell_options(study: Study) -> list[CellOptions]:
    """What the overrides of every cell say."""
    return [CellOptions.of(words) for words in cell_runs(study)]


def cell_needs(study: Study, number: int) -> dict[str, Any]:
    """The requirements of a cell, the study's included."""
    cell = study["cells"][number]
    return {**study.get("needs", {}), **({} if isinstance(cell, list) else cell["needs"])}


def measuring_cell(study: Study, dataset: str | None = None) -> int:
    """Index of the cell in which `measure` takes place: the first one that is not replayed, if possible without needs.

    dataset: of the cells of this data set, in which peak memory is measured.
    """
    options = enumerate(cell_options(study))
    timed = [number for number, one in options if not one.replayed and dataset in (None, one.dataset)]
    return min(timed, key=lambda number: isinstance(study["cells"][number], dict), default=0)


def measured_in(study: Study, number: int) -> dict[str, int]:
    """What of `measure` takes place in a cell, with repetitions: in other data sets' cells peak memory alone."""
    first, one = number == measuring_cell(study), cell_options(study)[number]
    own = not one.replayed and number == measuring_cell(study, one.dataset)
    return {str(q): n for q, n in study.get("measure", {}).items() if first or (own and q == "memory")}
