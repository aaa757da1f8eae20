"""The shipped studies: every table and figure of the sources has one, and each says what the commands understand."""

import json
import re
from collections import defaultdict
from functools import cache, partial
from types import SimpleNamespace

import pytest
from conftest import ROOT, make, tiny
from filelock import FileLock
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specbench import study
from specbench.common import storage
from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError
from specbench.config import train_spec, validation
from specbench.config.cli import composed
from specbench.config.run_spec import from_config
from specbench.engine import weights
from specbench.evaluation import study_runs, study_training
from specbench.records import identity, studies, trainings
from specbench.records.blocks import LOCKS
from specbench.records.cell_options import CellOptions
from specbench.records.trainings import Member, training_of, weights_folder
from specbench.reporting import published
from specbench.reporting.beside import assigned, matching
from specbench.reporting.evidence import EXACT, TIMED
from specbench.study import checked as study_options
from specbench.training.parameters import check

STUDIES = studies.load()
MODEL = "smollm2-135m"

LISTED = {  # numbers of tables and of figures
    "Beagle": ([1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    "CORAL": ([1, 2, 3, 4, 5, 6], [2, 6]),
    "EAGLE": ([1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 9, 10]),
    "MoA": ([2, 3, 4, 5, 7, 8, 9, 10], [4]),
    "Leviathan": ([2, 3], [3]),
}
NAMED = {"Medusa, ablation", "HASS, alignment steps", "HASS, Top-K", "HASS, loss ablation", "HASS, speed-up"}
# What papers claim of what, study by study: arms, and the metric that decides. None: the project lacks what it takes.
CLAIMED = [
    ("beagle_table1", "speed_up", "beagle", "eagle2"),
    ("beagle_table1", "parameters", "beagle", "eagle2"),
    ("beagle_table1", "memory.peak", "beagle", "eagle2"),
    ("beagle_table1", "tau", "medusa", "eagle2"),
    ("beagle_table1", "tau", "medusa", 1.95),
    ("beagle_table1", "speed_up", "medusa", 1.75),
    ("beagle_table1", "speed_up", "vanilla", 1.15),
    ("beagle_table1", "speed_up", "self_speculation", 1.0),
    ("beagle_table1", "tau", "self_speculation", "eagle2"),
    ("beagle_figure3", "late_alpha", "beagle", "eagle2"),
    ("beagle_figure4", "tau", "k3", "k1"),
    ("beagle_figure5", "tau", "late_4", "k5_longer"),
    ("beagle_figure5", "tau", "late_4", "late_uniform"),
    ("beagle_figure5", "tau", "k5", "k1"),
    ("beagle_figure11", "speed_up", "dynamic", "dynamic_concat"),
    ("beagle_training", "training.peak", "beagle_5", "beagle_1"),
    ("beagle_training", "training.peak", "hass_3", "hass_1"),
    ("coral_table1", "draft_cost", "chain", "draft_cost_by_parameters"),
    ("coral_table2", "tau", "coral_router", "coral"),
    ("coral_table2", "speed_up", "coral_router", "coral"),
    ("coral_table2", "draft_ms", "coral_router", "coral"),
    ("coral_table2", "tau", "eagle2", {"temperature": 1}),
    ("coral_table3", "tau", "coral_3", "hass_3"),
    ("coral_table3", "tau", "hass_3", "hass_1"),
    ("coral_table3", "tau", "coral_2", "hass_2"),
    ("coral_table3", "tau", "coral_4", "hass_4"),
    ("coral_table3", "tau", "coral_1", "hass_1"),
    ("coral_table4", "speed_up", "n16_top2", "n8_top1"),
    ("eagle_table1", "alpha0", "chain", "alpha1"),
    ("eagle_table1", "alpha1", "chain", "alpha2"),
    ("eagle_table5", "tau", "static", "chain"),
    ("eagle_table5", "speed_up", "static", "chain"),
    ("eagle_table5", "tau", "dynamic", "static"),
    ("eagle_table5", "tau", "dynamic_26", "static"),
    ("eagle_table6", "tau", "answers", "text"),
    ("eagle_table7", "speed_up", "eagle1", {"batch": 4}),
    ("eagle_figure1", "speed_up", "eagle1", "medusa"),
    ("eagle_figure1", "speed_up", "eagle1", "lookahead"),
    ("eagle_figure10", "tau", "shifted", "unshifted"),
    ("eagle_figure10", "tau", "unshifted", "feature"),
    ("eagle_figure10", "tau", "feature", "token"),
    ("hass", "tau", "hass", "eagle2"),
    ("hass", "late_alpha", "hass_chain", "eagle2_chain"),
    ("hass_steps", "tau", "n3", "n1"),
    ("hass_steps", "tau", "n4", "n3"),
    ("hass_steps", "tau", "top10", "n3"),
    ("hass_steps", "tau", "top5", "bild"),
    ("leviathan", "alpha", "gamma5", {"dataset": "cnndm", "temperature": 1}),
    ("leviathan", "alpha", "bigram", "unigram"),
    ("moa_table2", "tau", "moa", "eagle2"),
    ("moa_table2", "speed_up", "moa", "eagle2"),
    ("moa_table2", "speed_up", "ouroboros", "independent_large"),
    ("moa_table5", "tau", "tli0_lsa", "tli0_states"),
    ("moa_table5", "speed_up", "tli0_lsa", "tli0_states"),
    ("moa_table5", "tau", "tli1", "tli0"),
    ("moa_table5", "tau", "eagle_deep", "eagle"),
    ("moa_table5", "tau", "tli1_states", "tli1_bare"),
    ("moa_table5", "tau", "tli3", "tli1"),
    ("moa_table5", "speed_up", "tli3", "tli1"),
    ("moa_table3", "tokens_per_s", "moa", "eagle2"),
    ("moa_table3", "target_calls", "moa", "eagle2"),
    ("moa_table3_4g", "tokens_per_s", "moa", "independent"),
    ("moa_table4", "same_share", "moa", "eagle2"),
    ("moa_table7", "bytes_per_token", "moa", "eagle2"),
    ("bench", "lossless", "vanilla", 0.999),
    ("vocabulary", "speed_up", "eagle2_32768", "eagle2"),
    ("spec_bench", "tau", "token_recycling", "prompt_lookup"),
    ("spec_bench", "speed_up", "prompt_lookup", "token_recycling"),
    ("retrieval", "speed_up", "prompt_lookup", 1.3),
]


def test_every_table_and_figure_has_a_study():
    there = {source for study in STUDIES.values() for source in study["source"]}
    wanted = {f"{paper}, Table {number}" for paper, (tables, _) in LISTED.items() for number in tables}
    wanted |= {f"{paper}, Figure {number}" for paper, (_, figures) in LISTED.items() for number in figures}
    assert not (wanted | NAMED) - there
    assert {path.stem for path in (ROOT / "conf" / "study").glob("*.yaml")} == set(STUDIES)


@pytest.mark.parametrize(("name", "metric", "of", "against"), CLAIMED)
def test_what_papers_claim_is_tested_or_waits_for_the_project(name, metric, of, against):
    named = STUDIES[name]["claims"]
    tests = [t for claim in named for t in claim["tests"] if t["of"] == of and t.get("metric", t.get("measured")) == metric]
    assert against in [t.get(key) for t in tests for key in ("over", "than", "over_metric", "at")]


# Options of the commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_the_command_reads_what_reports_read(name):
    """Hydra resolves what is between braces; a report leaves it as it stands."""
    config = composed("study", [f"study={name}"])
    validation.check(config, study.Options)
    read = OmegaConf.to_container(config.study, resolve=True)
    trained = [(a["train"], read["arms"][n]["train"]) for n, a in STUDIES[name]["arms"].items() if "train" in a]
    assert all([o.replace("${model.name}", MODEL) for o in plain] == resolved for plain, resolved in trained)
    cells = [[o.replace("${model.name}", MODEL) for o in overrides] for overrides in studies.cell_runs(STUDIES[name])]
    assert list(read["arms"]) == list(STUDIES[name]["arms"]) and studies.cell_runs(read) == cells
    assert read.get("claims") == STUDIES[name].get("claims") and read.get("shows") == STUDIES[name].get("shows")


def keys(overrides):
    return {o.lstrip("+~").split("=")[0] for o in overrides}


@pytest.mark.parametrize("name", STUDIES)
def test_cells_and_arms_are_configurations_of_a_run(name):
    """Arms and cells say nothing of the same options, so that each needs to be tried but once."""
    one = STUDIES[name]
    cells = {tuple(overrides) for overrides in studies.cell_runs(one)}
    runs = {tuple(arm["run"]) for arm in one["arms"].values()}
    weighted = {(*arm["run"], *arm.get("train", []), arm.get("weights")) for arm in one["arms"].values()}
    assert len(cells) == len(one["cells"]) and len(weighted) == len(one["arms"])
    assert not set().union(*map(keys, cells)) & set().union(*map(keys, runs))
    first = studies.cell_runs(one)[0]
    assert any(o.startswith("dataset=") for o in first), "the first cell's dataset is the study's"
    for overrides in cells:
        spec = _held(*overrides, *one["arms"][next(iter(one["arms"]))]["run"])
        assert CellOptions.of(overrides).folder == spec.cell_folder.name, "the plan looks elsewhere for the cell's rows"
    beside = [o for o in first if not keys([o]) & {"data.limit", "decode.max_new_tokens"}]  # no arm meets these
    for overrides in runs:
        _held(*beside, *overrides)


@cache  # studies have many in common
def _held(*overrides):
    return from_config(composed("run", list(overrides)))


TRAININGS = dict(
    training_of(Member(label, 0, label, arm), one, [])
    for one in STUDIES.values()
    for label, arm in one["arms"].items()
    if "train" in arm
)


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_are_configurations_of_a_training(name, tmp_path):
    config = composed("train", [*TRAININGS[name], f"train.out={tmp_path}"])
    train_spec.from_config(config)


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith("trial_")])
def test_every_trial_changes_its_base_and_can_be_trained(name):
    found = []
    for label, arm in STUDIES[name]["arms"].items():
        config = composed("train", training_of(Member(label, 0, label, arm), STUDIES[name], [])[1])
        made = instantiate(config.drafter, weights=None)
        made.bind(tiny(num_hidden_layers=30))
        check(made, instantiate(config.train.settings))
        found.append(OmegaConf.to_container(config))
    assert next(iter(STUDIES[name]["arms"])) == "base" and found[0] not in found[1:], "nothing is changed"


@pytest.mark.parametrize(("arm", "trained"), [("independent", "independent"), ("ouroboros", "independent_large")])
def test_trained_weights_are_the_drafters_or_its_draft_models(arm, trained, tmp_path):
    one = STUDIES["moa_table2"]
    member = Member(arm, 1, f"{arm}@1", one["arms"][arm])
    (side,) = study_runs.prepare(0, one["cells"][0], [member], [], one, tmp_path).arms
    shared = weights_folder(Member("", 1, "", one["arms"][trained]), one, [])
    made = side.made[0]
    assert getattr(made, "base", made).weights == str(shared)
    assert str(shared) in str(side.spec.drafter), "the header does not say which weights they are"


def test_trained_arms_train_briefly():
    """But for those that are to have seen as much as a drafter that is shipped, and those of a GPU."""
    equal = ("beagle_table1", "moa_table2", "moa_table3", "moa_table3_4g", "moa_table3_lan", "moa_table4", "equal_footing")
    for name, one in STUDIES.items():
        for label, arm in one["arms"].items():
            if "train" in arm and name not in equal and arm.get("needs", {}).get("device") != "cuda":
                recipe = composed("train", arm["train"]).train
                rows = recipe.settings.steps * recipe.batch
                assert rows <= 2900, f"{name}: {label}"


def folder_of(name, arm, **changes):
    one = STUDIES[name]
    return weights_folder(Member(arm, 0, f"{arm}@0", one["arms"][arm] | changes), one, [])


def test_another_objective_is_another_training(monkeypatch):
    before = {drafter: folder_of("beagle_figure3", drafter) for drafter in ("beagle", "eagle2")}
    monkeypatch.setitem(identity.OBJECTIVES, "beagle", identity.OBJECTIVES["beagle"] + 1)
    assert folder_of("beagle_figure3", "beagle") != before["beagle"]
    assert folder_of("beagle_figure3", "eagle2") == before["eagle2"]


def test_studies_share_the_trainings_of_one_recipe():
    assert folder_of("beagle_figure3", "beagle") == folder_of("beagle_figure4", "k5") == folder_of("beagle_figure5", "k5")
    assert folder_of("beagle_figure3", "beagle_longer") == folder_of("beagle_figure5", "k5_longer")
    assert folder_of("beagle_figure3", "eagle2") == folder_of("eagle_figure10", "shifted")
    for other in ("moa_table3", "moa_table3_4g", "moa_table3_lan", "moa_table4"):
        assert all(folder_of("moa_table2", arm) == folder_of(other, arm) for arm in ("eagle2", "independent"))
    assert folder_of("beagle_figure6", "batch_2") == folder_of("beagle_figure3", "beagle")
    assert composed("train", []).model.name == trainings.DEFAULT_MODEL.removeprefix("model=")
    arms = STUDIES["beagle_figure3"]["arms"]
    named = weights_folder(
        Member("eagle2", 0, "", arms["eagle2"]), STUDIES["beagle_figure3"], ["model=smollm2-135m", "threads=1"]
    )
    assert named == folder_of("beagle_figure3", "eagle2")
    reordered = ["++drafter.window=5", "drafter=beagle", "tree=chain"]
    assert folder_of("beagle_figure3", "beagle", run=reordered) == folder_of("beagle_figure3", "beagle")


@pytest.mark.parametrize("name", STUDIES)
def test_the_study_command_names_trainings_as_the_report_does(name):
    read = study_options(composed("study", [f"study={name}"]))["study"]
    for member in trainings.members(read, None, read["arms"]):
        named = training_of(member, read, ["model=smollm2-135m"])
        assert named is None or named[0] in trainings.current_trainings(member.name, STUDIES[name], "smollm2-135m")


def test_a_training_that_goes_on_is_named_by_where_it_starts():
    one = STUDIES["beagle_figure5"]
    name, overrides = training_of(Member("late_2", 1, "late_2@1", one["arms"]["late_2"]), one, [])
    start = weights_folder(Member("k5", 1, "k5@1", one["arms"]["k5"]), one, [])
    assert f"train.start={start}" in overrides, "with the same seed"
    other = {**one, "arms": {**one["arms"], "k5": {**one["arms"]["k5"], "train": ["train=short", "train.batch=4"]}}}
    assert training_of(Member("late_2", 1, "late_2@1", one["arms"]["late_2"]), other, [])[0] != name


@pytest.mark.parametrize("outcome", ["done", "failed", "unfinished"])
def test_where_a_training_starts_is_trained_first_even_if_only_the_other_is_named(monkeypatch, outcome):
    arms = {
        "a": {"run": ["drafter=eagle2"], "train": ["train=short"]},
        "b": {"run": ["drafter=hass"], "start": "a", "train": ["train=short"]},
    }
    one, there, asked = {"arms": arms}, set(), []

    def train(name, overrides, folder, budget):
        asked.append(name.split("-")[0])
        there.update([folder] if outcome == "done" else [])
        return outcome != "failed"

    monkeypatch.setattr(study_training, "_train", train)
    monkeypatch.setattr(study_training, "lacks", lambda name, _: None if trainings.folder_of(name) in there else "weights")
    members = trainings.members(one, None, ["b"])
    done = study_training.train_missing("s", list(members), one, [], Budget(None))
    found = {"done": set(), "failed": set(done.failed), "unfinished": set(done.unfinished)}
    assert found[outcome] == (set() if outcome == "done" else {"a@0", "b@0"})
    assert asked == (["eagle2", "hass"] if outcome == "done" else ["eagle2"]), "nothing goes on from absent weights"


def test_every_arm_is_trained_with_the_first_seed_before_any_is_with_the_next(monkeypatch):
    arms = {
        "a": {"run": ["drafter=eagle2"], "seeds": [0, 1], "train": ["train=short"]},
        "b": {"run": ["drafter=hass"], "seeds": [0, 1], "start": "a", "train": ["train=short"]},
    }
    one, there, asked = {"arms": arms}, set(), []

    def train(name, overrides, folder, budget):
        asked.append((name.split("-")[0], next(o[-1] for o in overrides if "settings.seed" in o)))
        there.add(folder)
        return True

    monkeypatch.setattr(study_training, "_train", train)
    monkeypatch.setattr(study_training, "lacks", lambda name, _: None if trainings.folder_of(name) in there else "weights")
    study_training.train_missing("s", list(trainings.members(one, None, ["b", "a"])), one, [], Budget(None))
    assert asked == [("eagle2", "0"), ("hass", "0"), ("eagle2", "1"), ("hass", "1")]


def test_weights_of_a_recipe_that_was_edited_since_are_trained_anew(monkeypatch, tmp_path):
    arms = {"a": {"run": ["drafter=eagle2"], "train": ["train=short"]}}
    monkeypatch.setattr(trainings, "studies_folder", lambda: tmp_path)
    name, overrides = training_of(Member("a", 0, "a@0", arms["a"]), {"arms": arms}, [])
    job = train_spec.from_config(composed("train", [*overrides, f"train.out={tmp_path}"]))
    begun = []
    started = SimpleNamespace(Popen=lambda command, **_: begun.append(command[-1]) or Done(), TimeoutExpired=TimeoutError)
    monkeypatch.setattr(study_training, "subprocess", started)
    for lr, lacking, option in ((job.settings.lr, None, None), (0.5, "weights", "train.overwrite=true")):
        recipe = {**job.recipe, "settings": {**job.recipe["settings"], "lr": lr}}
        made = {
            "drafter": job.drafter,
            "recipe": json.loads(json.dumps(recipe)),
            "target": "tiny",
            "target_fingerprint": "x",
        }
        weights.save(make("eagle2", tiny()), tmp_path / name, made)
        assert study_training.lacks(name, overrides) == lacking
        study_training.train_missing("s", [Member("a", 0, "a@0", arms["a"])], {"arms": arms}, [], Budget(None))
        assert begun == ([] if option is None else [option])


class Done:
    """A process that ended well."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, timeout):
        return 0


def test_what_another_process_trains_is_waited_for_last_and_not_trained_twice(monkeypatch, tmp_path):
    arms = {
        "a": {"run": ["drafter=eagle2"], "train": ["train=short"]},
        "b": {"run": ["drafter=hass"], "start": "a", "train": ["train=short"]},
        "c": {"run": ["drafter=medusa"], "train": ["train=short"]},
    }
    one, there, asked = {"arms": arms}, set(), []
    monkeypatch.setattr(trainings, "studies_folder", lambda: tmp_path)
    of_a = weights_folder(Member("a", 0, "a@0", arms["a"]), one, [])
    (tmp_path / LOCKS).mkdir()
    other = FileLock(tmp_path / LOCKS / f"{of_a.name}.lock")
    other.acquire()

    def train(name, overrides, folder, budget):
        asked.append(name.split("-")[0])
        there.update({folder, of_a})
        other.release()  # the other process is done by now
        return True

    monkeypatch.setattr(study_training, "_train", train)
    monkeypatch.setattr(study_training, "lacks", lambda name, _: None if trainings.folder_of(name) in there else "weights")
    members = list(trainings.members(one, None, ["a", "b", "c"]))
    done = study_training.train_missing("s", members, one, [], Budget(None))
    assert asked == ["medusa", "hass"] and not done.failed | done.unfinished

    there.clear()
    with other:
        done = study_training.train_missing("s", members[:2], one, [], Budget(0.5))
    assert asked == ["medusa", "hass"] and done.unfinished == {"a@0", "b@0"}, "the time was over before"


# What is planned -------------------------------------------------------------------------------------------------------


def cells_of(one, test, side, timed):
    """Numbers of the cells on which one side of a test is judged, by data set."""
    cells = studies.cell_options(one)
    at = test.get("at", {}) if side == "at" else test.get("over_at", test.get("at", {}))
    sets = at.get("dataset", cells[0].dataset)
    for dataset in sets if isinstance(sets, list) else [sets]:
        yield (
            dataset,
            [
                number
                for number, options in enumerate(cells)
                if options.dataset == dataset
                and options.temperature == at.get("temperature", 0)
                and not (timed and options.replayed)
            ],
        )


@pytest.mark.parametrize("name", STUDIES)
def test_every_claim_has_cells_of_enough_questions_on_a_machine_that_can_test_it(name):
    one = STUDIES[name]
    cells = studies.cell_options(one)
    for claim in one.get("claims", []):
        needs = studies.claim_needs(one, claim)
        for test in claim["tests"]:
            metrics = {test.get("metric"), test.get("over_metric", test.get("metric"))}
            if "measured" in test or metrics <= set(EXACT):
                continue
            for side in ("at", "over_at"):
                for dataset, numbers in cells_of(one, test, side, bool(metrics & set(TIMED))):
                    fit = [n for n in numbers if set(studies.cell_needs(one, n)) <= set(needs)]
                    sizes = [cells[n].questions for n in fit]
                    assert max(sizes, default=0) >= 20, f"{claim['says']}: {dataset}, {sizes}"


@pytest.mark.parametrize(("cuda", "cells", "numbers"), [(False, None, [0]), (True, None, [0, 1, 2]), (False, [2], [2])])
def test_cells_and_arms_whose_needs_are_not_met_are_left_out_unless_named(cuda, cells, numbers):
    gpu = {"needs": {"device": "cuda"}}
    one = {
        "cells": [["dataset=mtbench"], {"run": ["dataset=gsm8k"], **gpu}, {"run": ["dataset=alpaca"], **gpu}],
        "arms": {"a": {"run": ["drafter=suffix"]}, "b": {"run": ["drafter=eagle2"], **gpu}},
    }
    chosen = study_runs.choose_cells(one, cells, cuda)
    assert chosen == numbers
    _, chosen = study_runs.choose_arms(one, None, "s", cuda)
    assert chosen == (["a", "b"] if cuda else ["a"])
    assert study_runs.choose_arms(one, ["b"], "s", cuda)[1] == ["b"]
    assert studies.measuring_cell({**one, "cells": one["cells"][::-1]}) == 2


def test_arms_that_nobody_trained_are_left_out_and_named(monkeypatch, tmp_path):
    """Those without weights of their own, and those that the study or the command line gives some, are not."""
    monkeypatch.setattr(storage, "PROJECT", tmp_path)
    runs = {"a": "eagle3", "b": "hydra", "c": "eagle1", "d": "suffix", "e": "rest", "f": "hybrid", "g": "eagle2_router"}
    one = {"arms": {name: {"run": [f"drafter={drafter}", "tree=fitted"]} for name, drafter in runs.items()}}
    one["arms"] |= {
        "trained": {"run": ["drafter=mtp"], "train": ["train=short"]},
        "same": {"run": ["drafter=mtp"], "weights": "trained"},
        "given": {"run": ["drafter=mtp", "drafter.weights=x"]},
    }
    absent = partial(study_runs.untrained, one, list(one["arms"]), "m")
    assert absent({}, []) == ["a", "b", "c", "e", "f", "g"]
    assert absent({"eagle1": "x"}, []) == ["a", "b", "e", "f", "g"]
    assert absent({}, ["checkpoint=x"]) == []
    for name in ("hydra", "eagle2"):
        (tmp_path / "drafters" / "weights" / "m" / name).mkdir(parents=True)
        (tmp_path / "drafters" / "weights" / "m" / name / "model.safetensors").touch()
    assert absent({}, []) == ["a", "e", "g"]
    line = study_runs.untrained_line(["a", "e"])
    assert line == "arms left out, whose weights are not there: a, e; make train makes them, arms=[a,e] asks for them"
    assert study_runs.untrained_line([]) == ""


def test_what_is_left_out_is_one_line_and_nothing_left_is_an_error():
    line = "cells left out, which need a GPU or what this project lacks: 1, 2; cells=[1,2] decodes them anyway"
    assert study_runs.left_out("cells", range(3), [0]) == line
    assert study_runs.left_out("cells", range(3), [0, 1, 2]) == ""
    with pytest.raises(SpecBenchError, match=r"left out, .*: a; arms=\[a\] decodes them anyway"):
        study_runs.left_out("arms", ["a"], [])


def test_an_arm_starts_from_one_that_is_trained_before_it():
    arms = {"b": {"run": ["drafter=eagle2"], "start": "a", "train": []}, "a": {"run": ["drafter=eagle2"], "train": []}}
    one = {"title": "x", "source": ["x"], "cells": [["dataset=mtbench"]], "arms": arms}
    with pytest.raises(SpecBenchError, match="arm b starts from a: both must be trained, that one listed before"):
        studies.check(one, "s")
    studies.check({**one, "arms": dict([*arms.items()][::-1])}, "s")


# What stands beside ----------------------------------------------------------------------------------------------------

PUBLISHED = published.load(ROOT / "results" / "published")
TABLES = dict(list(PUBLISHED.groupby(["paper", "table"], sort=False)))
SHOWN = [(name, shown) for name, one in STUDIES.items() for shown in one.get("shows", [])]


@pytest.mark.parametrize(("name", "shown"), SHOWN)
def test_shown_numbers_are_published_and_no_arm_stands_twice_in_a_column(name, shown):
    """Whichever target is measured, one that the table has or another one."""
    table = TABLES[shown["paper"], shown["table"]]
    assert all(len(matching(table, key)) for key in shown["arms"]), name
    assert shown.get("beside", "") in {"", *table["target"]}, name
    for target in ("mine", *set(table["target"])):
        beside = defaultdict(set)
        for index, arm in assigned(table, shown, [target]).items():
            cell = table.loc[index]
            beside[arm, cell.column, cell.dataset, cell.temperature].add(cell.row)
        assert all(len(rows) == 1 for rows in beside.values()), f"{name} {target}"


@pytest.mark.parametrize("name", STUDIES)
def test_numbers_that_a_claim_quotes_from_a_table_stand_there(name):
    """As printed. Differences have a sign before them, numbers of the running text `(text)` behind."""
    found = quotes(name)
    assert all(numbers <= printed for _, numbers, printed in found), found


def test_most_claims_are_on_tables_whose_numbers_are_here():
    assert sum(bool(numbers) for name in STUDIES for _, numbers, _ in quotes(name)) > 60


def quotes(name):
    """Of a study's claims on tables that are here: the claim, the numbers that it quotes, and those of the tables."""
    found = []
    for claim in STUDIES[name].get("claims", []):
        for paper, which, numbers in re.findall(r"(\w+), (Table|Figure)s? ([\d, and]+)", claim["source"]):
            tables = [(paper.lower(), f"{which} {number}") for number in re.findall(r"\d+", numbers)]
            tables += [("slides", f"{paper} {table}") for _, table in tables]
            printed = {value for key in tables if key in TABLES for value in TABLES[key]["number"]}
            quoted = re.findall(r"(?<![+\w.])\d+\.\d+(?![\d%x]* \(text\))", claim["published"])
            if printed and paper in claim["source"].split("; ")[0]:
                found.append((claim["says"], set(map(float, quoted)), printed))
    return found


SPEEDS = ("speed_up", "tokens_per_s")


def test_speeds_are_judged_on_a_gpu():
    """The papers' are: a CPU is busy with a pass of 60 tokens where a GPU waits for its memory."""
    for name, one in STUDIES.items():
        for claim in one.get("claims", []):
            needs = {**one.get("needs", {}), **claim.get("needs", {})}
            timed = any(test.get("metric") in SPEEDS for test in claim["tests"])
            ours = claim["source"] == "this project's goal"
            assert not timed or "device" in needs or ours, f"{name}: {claim['says']}"


@pytest.mark.parametrize(
    ("tokens", "alike"),
    [
        ((100, 120, 104, 117), True),
        ((100, 120, 120, 130), False),
        ((100, 104, 107, 108), True),  # 5.4% more
        ((100, 104, 108, 108), False),  # 5.9% more
    ],
)
def test_arms_are_trained_alike_over_their_seeds(tokens, alike):
    """A seed shuffles the rows, and so the tokens of as many steps differ from seed to seed."""
    trained = zip(("a@0", "a@1", "b@0", "b@1"), tokens, strict=True)
    header = {
        "target": {"parameters": 1, "vocabulary": 1},
        "arms": {label: {"of": label[0], "weights": {"history": [{}], "tokens_seen": n}} for label, n in trained},
    }
    assert (studies.unmet({"alike": True}, header, cuda=False) == []) == alike
    assert studies.unmet({"trained": 101}, header, cuda=False), "the least trained seed counts"
    assert studies.unmet({"pretrained": "a"}, header, cuda=False) == ["a pretrained draft model as a"]


def test_a_claim_without_a_test_says_what_it_waits_for():
    one = {**STUDIES["eagle_table7"], "claims": [{"says": "x", "source": "x", "published": "x", "tests": []}]}
    with pytest.raises(SpecBenchError, match=r"study s: 'x' has no test; say in needs\.project"):
        studies.check(one, "s")
    studies.check({**one, "needs": {"project": "more"}}, "s")


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ({"none": {"run": ["drafter=suffix"]}}, "arm none is the baseline"),
        (
            {"a": {"run": ["drafter=suffix", "sampler.temperature=1"]}},
            "arm a sets sampler.temperature, which all arms share",
        ),
        ({"a": {"run": ["drafter=suffix", "+decode.seed=1"]}}, "arm a sets decode.seed"),
        ({"a": {"run": ["drafter=suffix", "dataset=gsm8k"]}}, "arm a sets dataset"),
        ({"a": {"run": ["drafter=suffix", "replay=true"]}}, "arm a sets replay"),
    ],
)
def test_what_an_arm_cannot_have_is_refused(arms, message):
    study = {"title": "x", "source": ["here"], "cells": [[]], "arms": arms}
    with pytest.raises(SpecBenchError, match=message):
        studies.check(study, "x")
    studies.check({**study, "arms": {"a": {"run": ["drafter=suffix", "++drafter.nodes=4", "tree=chain"]}}}, "x")
