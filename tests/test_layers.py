"""Who may import whom, and that every configuration composes and instantiates."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DRAFTERS, ROOT, composed, configuration
from hydra.utils import instantiate

WORDS = ("specbench.errors", "specbench.options")  # know nothing else in the project
FILES = ("specbench.files", "specbench.contents", "specbench.assets")  # know files, and no engine
READERS = tuple(f"specbench.engine.{name}" for name in ("pretrained", "weights", "target", "vocabulary"))
DOORS = {
    f"specbench.{door}" for door in ("run", "train", "export", "report", "study", "cost", "serve", "trials", "evidence")
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_specbench_never_imports_a_drafter():
    assert not {m: i for m, names in modules("specbench").items() if (i := of(names, "drafters"))}


def test_only_the_doors_and_hydras_own_callback_know_hydra():
    everything = modules("specbench") | modules("drafters")
    known = {m for m, names in everything.items() if of(names, "hydra", "omegaconf")}
    configuring = {m for m in everything if m.startswith("specbench.config.")}
    assert "specbench.config.run_spec" in known
    assert known <= configuring | DOORS | {
        "specbench.sweep",
        "specbench.door",  # what doors share
        "specbench.schema",  # to what they hold a configuration
    }


@pytest.mark.parametrize("module", ["arms", "cell", "bench", "apart", "price", "cost", "study", "measurements", "records"])
def test_what_takes_a_run_reads_no_configuration(module):
    mine = {m: names for m, names in modules("specbench").items() if of({m}, f"specbench.{module}")}
    assert mine and not {m for m, names in mine.items() if of(names, "hydra", "omegaconf")}


def test_records_know_no_engine_and_no_tensors():
    """As they are imported: what is imported only for its types does not run."""
    for module, names in modules("specbench/records").items():
        assert not of(names, "torch", "transformers", "drafters"), module
    code = "import sys, specbench.records.blocks, specbench.records.identity; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "specbench.records.rows" in loaded
    assert not of(loaded, "torch", "transformers", "hydra", "omegaconf", "specbench.engine", "specbench.bench")


def test_doors_do_not_know_each_other():
    for door in DOORS:
        assert not of(modules("specbench")[door], *(DOORS - {door}))


def test_the_words_know_nothing_and_files_no_engine():
    everything = modules("specbench")
    for word in WORDS:
        assert not of(everything[word], "specbench")
    for module in FILES:
        assert not of(everything[module], "specbench") - of(everything[module], *WORDS, *FILES), module


def test_engine_knows_only_itself_and_the_words_and_its_readers_know_files():
    for module, names in modules("specbench/engine").items():
        readable = FILES if module in READERS else ()
        inner = of(names, "specbench") - of(names, "specbench.engine", *WORDS, *readable)
        assert not inner, (module, inner)
        if module.endswith("interface"):
            assert not of(names, "specbench"), "the words know nothing else in the project"
        if not module.endswith(("target", "lean", "cache", "rows", "pretrained")):
            assert not of(names, "transformers"), f"{module}: only what runs models knows Transformers"


def test_drafters_know_the_engine_blocks_and_a_parent():
    for module, names in modules("drafters").items():
        assert not of(names, "specbench") - of(names, "specbench.engine", *WORDS), module
        if module in ("drafters.layers", "drafters.blocks", "drafters.teacher"):  # what drafters share
            assert not of(names, "drafters") - of(names, "drafters.layers"), module


@pytest.mark.parametrize("package", ["assets", "datasets"])
def test_assets_and_datasets_do_not_know_the_engine(package):
    assert not of(modules("specbench")[f"specbench.{package}"], "specbench.engine")


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
        longest = 104 if path.parent.name == "study" else 64  # a study holds its paper's claims, too
        assert len(path.read_text().splitlines()) <= longest, path
