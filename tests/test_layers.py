"""Who may import whom, and that every configuration composes and instantiates."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import DRAFTERS, ROOT, composed, configuration
from hydra.utils import instantiate

PACKAGES = (  # each imports only from itself and from those above it; commands import from all of them
    "specbench.common",
    "specbench.records",
    "specbench.data",
    "specbench.engine",
    "specbench.remote",
    "drafters",
    "specbench.training",
    "specbench.tuning",
    "specbench.config",
    "specbench.evaluation",
    "specbench.reporting",
    "specbench.gpu_day",
)
COMMANDS = {f"specbench.{p.stem}" for p in (ROOT / "specbench").glob("*.py") if not p.stem.startswith("_")}


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from running(node)


def imports(path: Path) -> set[str]:
    found = set()
    for node in running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{a.name}" for a in node.names} | {node.module or ""} - {"specbench"}
    return found


def modules(folder: str) -> dict[str, set[str]]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {p.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): imports(p) for p in paths}


def of(names: set[str], *packages: str) -> set[str]:
    return {n for n in names if any(n == p or n.startswith(p + ".") for p in packages)}


def test_packages_import_only_from_those_above_them():
    everything = modules("specbench") | modules("drafters")
    for place, package in enumerate(PACKAGES):
        below = {*PACKAGES[place + 1 :], *COMMANDS}
        for module in of(set(everything), package):
            assert not of(everything[module], *below), module


def test_every_package_is_in_the_list():
    folders = {f"specbench.{p.parent.name}" for p in (ROOT / "specbench").glob("*/__init__.py")}
    assert folders == {*PACKAGES} - {"drafters"}


def test_specbench_never_imports_a_drafter():
    assert not {m: i for m, names in modules("specbench").items() if (i := of(names, "drafters"))}


def test_only_configuration_and_commands_know_hydra():
    everything = modules("specbench") | modules("drafters")
    known = {m for m, names in everything.items() if of(names, "hydra", "omegaconf")}
    assert "specbench.config.run_spec" in known
    assert known <= of(set(everything), "specbench.config") | COMMANDS


@pytest.mark.parametrize("module", ["records.blocks", "records.identity", "records.studies", "reporting.bundle", "report"])
def test_rows_and_reports_need_no_tensors(module):
    """As they are imported: what is imported only for its types does not run."""
    code = f"import sys, specbench.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert f"specbench.{module}" in loaded
    assert not of(loaded, "torch", "transformers", "drafters", "specbench.engine", "specbench.evaluation")


def test_commands_do_not_know_each_other():
    for command in COMMANDS:
        assert not of(modules("specbench")[command], *(COMMANDS - {command}))


def test_the_interface_of_the_engine_knows_nothing_and_only_what_runs_models_knows_transformers():
    for module, names in modules("specbench/engine").items():
        if module.endswith("interface"):
            assert not of(names, "specbench")
        run = ("target", "causal_lm", "language_model", "fused_llama", "fused_modules", "cache", "slots", "rows")
        if not module.endswith((*run, "pretrained", "loading")):
            assert not of(names, "transformers"), module


def test_what_drafters_share_knows_no_method():
    for module, names in modules("drafters").items():
        if module in ("drafters.layers", "drafters.losses", "drafters.base", "drafters.distillation"):
            assert not of(names, "drafters") - of(names, "drafters.layers") - of(names, "drafters.losses"), module


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_composes_and_instantiates(drafter):
    config = configuration(drafter)
    assert config.drafter.name == drafter
    assert instantiate(config.drafter).name == drafter


@pytest.mark.parametrize(("group", "key"), [(g, g) for g in ("model", "dataset", "tree", "link")])
def test_every_choice_composes_and_instantiates(group, key):
    for choice in options(group):
        assert instantiate(composed("run", f"{group}={choice}")[key]) is not None


@pytest.mark.parametrize("recipe", options("train"))
def test_every_recipe_composes_and_instantiates(recipe):
    config = composed("train", f"train={recipe}")
    for part in ("settings", "corpus", "text"):
        assert instantiate(config.train[part]) is not None


def test_no_yaml_is_long():
    for path in (ROOT / "conf").rglob("*.yaml"):
        longest = 132 if path.parent.name == "study" else 70  # a study holds its paper's claims, too
        assert len(path.read_text().splitlines()) <= longest, path
