"""The stages of a GPU day at toy size on a CPU, through `tools/gpu.sh`; what is packed, taken along and brought back."""

import gzip
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import arguments_of, read_rows, train
from conftest import ROOT, composed
from forked import FIXED, ForkedCommand
from hydra.utils import instantiate

from specbench.common.budget import UNFINISHED
from specbench.common.errors import SpecBenchError
from specbench.config.cli import expand_shorthands
from specbench.engine.verify import Simulated
from specbench.gpu_day import archives, needs, runner, stages
from specbench.gpu_day.__main__ import MINUTES, main
from specbench.gpu_day.stages import STAGES, Step
from specbench.records.blocks import NAME
from specbench.training.corpus import CorpusSettings, settle_precision


def options_of(home):
    """What every step of a dry run is told of the tests' tiny target, its prompts and its training text."""
    words = [*arguments_of(home, "study"), *train(home, "toy"), f"drafter.weights={home / 'weights' / 'eagle2'}"]
    own = ("results", "memory", "drafter=", "model.dtype", "train.name", "train.out", "train.settings.epochs", "decode")
    return [word for word in dict.fromkeys(words) if not word.startswith(own)]


def paths(folder):
    """Environment that keeps a stage's files in a test's folder, on the CPU."""
    return {
        "SPECBENCH_CACHE": str(folder / "cache"),
        "OUT": str(folder / "out"),
        "GPU_WORK": str(folder / "work"),
        "CUDA_VISIBLE_DEVICES": "",
    }


def came_back(folder, stage):
    """Where a dry run's archive is unpacked, and its steps, all of which succeeded."""
    assert archives.read(folder / "out", f"{stage}-dry", folder / "back")
    steps = [json.loads(line) for line in (folder / "back" / runner.LOG).read_text().splitlines()]
    logs = "\n".join(p.read_text()[-2000:] for p in (folder / "work").rglob("*.log"))
    assert all(step["code"] == 0 for step in steps), logs
    return folder / "back", [step["step"] for step in steps]


def typed(home, folder, stage, *more):
    """A stage's dry run as a user types it, in new interpreters; what came back, and what was said."""
    environment = {**os.environ, **FIXED, **paths(folder), "PYTHON": sys.executable}
    words = [str(ROOT / "tools" / "gpu.sh"), stage, "--dry", *options_of(home), *more]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return *came_back(folder, stage), done.stderr


@pytest.fixture
def dry(home, tmp_path, monkeypatch):
    """The same for a stage, its steps in forked processes, see `forked`."""
    for name, value in paths(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runner, "_call", forked_step)

    def run(stage):
        assert main([stage, "--dry", *options_of(home)]) == 0
        return came_back(tmp_path, stage)

    return run


def forked_step(step, work, options, minutes, deadline):
    """Instead of `runner._call`, without its time limits."""
    _, module, *words = step.command(options, minutes)
    done = ForkedCommand(module, words, ROOT, {**os.environ, **FIXED}, work / "logs").completed()
    (work / "logs" / f"{step.name}.log").write_text(done.stdout + done.stderr)
    return done.returncode


def blocks_below(folder):
    return [read_rows(path) for path in sorted(folder.rglob(NAME))]


def test_the_probe_answers_and_runs_the_tests_that_a_gpu_needs(home, tmp_path):
    back, steps, _ = typed(home, tmp_path, "probe")
    answers = {answer["name"]: answer for answer in map(json.loads, (back / "probe.jsonl").read_text().splitlines())}
    assert steps == ["probe", "tests-ids", "tests-captured", "tests-others"]
    assert {"machine", "copy", "read", "launch", "product", "attention, 60 nodes, cuDNN off"} <= answers.keys()
    assert answers["copy"]["gb_per_s"] > 0 and answers["launch"]["launch_us"] > 0
    assert answers["attention, 1 nodes, cuDNN off"]["lengths"] == 4
    assert "SKIPPED" in (back / "logs" / "tests-captured.log").read_text()
    _, again, said = typed(home, tmp_path, "probe")
    assert again == steps and "step 1" not in said, "what is done is not done again"


def test_bench7b_says_that_its_acceptance_is_assumed(dry):
    back, steps = dry("bench7b")
    assert {"speed-eager", "trace-eagle2-eager", "trace-eagle2-graphs"} <= set(steps)
    blocks = blocks_below(back / "results")
    assert blocks and all(header["simulated"] for header, _ in blocks)
    assert all(row.audit["verdict"] == "simulated acceptance" for _, rows in blocks for row in rows)
    assert "SIMULATED" in (back / "logs" / "speed-eager.log").read_text()
    assert any("bandwidth" in path.read_text() for path in (back / "results").rglob("*.jsonl"))
    found = json.loads((back / "traces" / "eagle2-eager.json").read_text())
    assert found["simulated"] and found["cycles"] == 5 and found["operators"] > 50 and found["ms"] > 0
    with gzip.open(back / "traces" / "eagle2-eager.trace.json.gz") as trace:
        assert json.load(trace)["traceEvents"]


def test_the_model_stage_compares_answers_in_each_precision(dry):
    back, steps = dry("model")
    assert steps == ["lossless-float32", "lossless-float16", "engine"]
    for dtype in ("float32", "float16"):
        ((header, rows),) = blocks_below(back / "results" / f"lossless-{dtype}")
        assert header["target"]["dtype"] == dtype and not header["simulated"]
        assert {row.audit["verdict"] for row in rows if row.audit} <= {"identical", "numerical tie"}
        assert any(row.drafter == "eagle2" for row in rows)


def test_the_train_stage_brings_weights_back(home, tmp_path):
    back, steps, _ = typed(home, tmp_path, "train", "train.settings.epochs=1")
    assert steps == ["train-eagle2"] and (back / "weights" / "eagle2" / "model.safetensors").stat().st_size > 1000


def test_the_memory_stage_measures_peaks_beside_both_targets(dry):
    back, steps = dry("memory")
    assert steps == ["memory-llama2-7b", "memory-llama3-8b"]
    for step in steps:
        text = "".join(path.read_text() for path in (back / "results" / step).rglob(NAME))
        assert text.count('"what": "memory"') == 2 and '"simulated": true' in text


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("toy", [False, True])
def test_options_of_every_step_are_there_and_nothing_is_written_to_results(stage, toy):
    """The whole stage, too, of which only a GPU runs the steps."""
    steps = STAGES[stage](Path("work"), toy)
    assert sum(step.minutes for step in steps) <= MINUTES and len({step.name for step in steps}) == len(steps)
    for step in steps:
        if step.kind == "plain":
            continue
        command = "train" if step.kind == "train" else "study" if step.module == "specbench.study" else "run"
        words = [w for w in step.words if "=" in w] + ([f"{step.budget}=1"] if step.budget else [])
        config = composed(command, *expand_shorthands(words))
        written = config.train.out if command == "train" else config.results if command == "study" else step.words[0]
        assert Path(written).parts[0] == "work"
        if step.kind == "random":
            assert config.model.weights == "random" and len(config.alpha) == 6


def test_the_assumed_acceptance_is_about_the_papers():
    """Expected tokens of a cycle whose tree has a first child at all six depths."""
    alpha = Simulated(json.loads(stages.ALPHA.partition("=")[2])).alpha
    assert sum(torch.tensor([1.0, *alpha]).cumprod(0)) == pytest.approx(4.0, abs=0.1)


def test_the_train_stage_reads_the_shipped_corpus():
    step = STAGES["train"](Path("work"), False)[0]
    settings: CorpusSettings = instantiate(composed("train", *step.words).train.corpus)
    packed = ROOT / needs.WEIGHTS
    header = json.loads((packed / "corpus.json").read_text())
    settled = settle_precision(settings, header["target_fingerprint"], torch.device("cpu"), packed)
    assert settled.digest(header["target_fingerprint"]) == header["corpus"]


def test_a_step_that_fails_or_hangs_does_not_keep_the_others_from_running(tmp_path, monkeypatch):
    steps = [
        Step("fails", "no_such_module", (), 1.0),
        Step("hangs", "timeit", ("-n1", "-r1", "import time; time.sleep(60)"), 0.02),
        Step("works", "timeit", ("-n1", "-r1", "1"), 1.0),
        Step("pauses", "timeit", ("-n1", "-r1", f"print('3 of 8 steps; {UNFINISHED}')"), 1.0, budget="minutes"),
    ]
    assert runner.run("probe", steps, tmp_path / "work", tmp_path / "out", [], 1.0) == 3
    assert runner.finished(tmp_path / "work") == {"works"}
    lines = [json.loads(line) for line in (tmp_path / "work" / runner.LOG).read_text().splitlines()]
    assert [line["code"] for line in lines][1:] == [runner.STOPPED, 0, runner.PAUSED] and lines[0]["code"] not in (0, 124)
    assert archives.read(tmp_path / "out", "probe", tmp_path / "back")
    assert runner.finished(tmp_path / "back") == {"works"}
    monkeypatch.setattr(runner, "_call", lambda step, *_: pytest.fail(step.name) if step.name == "works" else 0)
    assert runner.run("probe", steps, tmp_path / "back", tmp_path / "out", [], 1.0) == 0


def test_options_go_where_they_are_known():
    options = ["model.path=m", "train.batch=2", "data.root=d", "threads=1", "+model.shape={}"]
    taken = {kind: [o for o in options if stages.taken(o, kind)] for kind in ("plain", "train", "study", "random")}
    assert taken["plain"] == [] and taken["random"] == ["data.root=d", "threads=1"]
    assert taken["train"] == ["model.path=m", "train.batch=2", "threads=1", "+model.shape={}"]
    assert "train.batch=2" not in taken["study"] and "data.root=d" in taken["study"]


def test_results_come_back_in_few_small_files_and_the_largest_stays_if_there_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "FILE_BYTES", 6000)
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "deep").mkdir(parents=True)
    (work / "rows.jsonl").write_text("a row\n")
    (work / "deep" / "weights").write_bytes(os.urandom(20_000))
    (work / "deep" / "trace").write_bytes(os.urandom(30_000))
    assert archives.write(work, out, "model") == ["deep/trace"]
    assert len(list(out.iterdir())) == archives.FILES and all(p.stat().st_size <= 6000 for p in out.iterdir())
    assert archives.read(out, "model", tmp_path / "back")
    assert (tmp_path / "back" / "deep" / "weights").read_bytes() == (work / "deep" / "weights").read_bytes()
    (work / "deep" / "weights").unlink()
    archives.write(work, out, "model")
    assert not archives.read(out, "train", tmp_path / "none") and archives.read(out, "model", tmp_path / "again")
    (out / "model-results.tar.gz.0").write_bytes(b"cut")
    with pytest.raises(SpecBenchError, match="no whole archive"):
        archives.read(out, "model", tmp_path / "bad")


def fetched(versions, folder, python):
    """Instead of a download: a wheel that pip installs, in random bytes enough for two packages."""
    name = "toy_package-1.0"
    with tarfile.open(folder / "unused.tar", "w"):
        pass
    (folder / "unused.tar").unlink()
    import zipfile

    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_package.py", "VALUE = 7\n")
        wheel.writestr("ballast", os.urandom(3_000_000))
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    assert "transformers" in versions and "torch" not in versions and python == "3.12"


def test_packages_arrive_one_by_one_and_the_last_one_unpacks_them(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "PACKAGE_BYTES", 2_500_000)
    monkeypatch.setattr(needs, "download", fetched)
    folders = needs.pack("probe", tmp_path / "packed", None, "3.12")
    assert len(folders) >= 2 and all((folder / "gpu.sh").exists() for folder in folders)
    environment = {**os.environ, "GPU_HOME": str(tmp_path / "there"), "PYTHON": sys.executable}

    def take(folder):
        words = ["sh", str(folder / "gpu.sh"), "take", str(folder)]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    for folder in folders[:0:-1]:  # in any order
        assert "still missing" in take(folder).stdout
    (damaged := tmp_path / "damaged").mkdir()
    for path in folders[0].iterdir():
        (damaged / path.name).write_bytes(path.read_bytes()[:1000] if path.name.startswith("piece") else path.read_bytes())
    assert take(damaged).returncode != 0, "a damaged piece is refused"
    done = take(folders[0])
    assert done.returncode == 0 and "unpacked" in done.stdout, done.stderr
    there = tmp_path / "there"
    assert (there / "gpu-site" / "toy_package.py").exists() and (there / "tests" / "test_gpu.py").exists()
    assert "torch" in (there / "specbench.egg-info" / "requires.txt").read_text()
    assert not (there / "results").exists() and not (there / "drafters" / "weights").exists()
    done = subprocess.run(["tools/gpu.sh", "nothing"], cwd=there, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "name one of probe, bench7b" in done.stderr, done.stderr


def test_a_stage_takes_along_what_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "file_from_wheel", lambda wheel: tmp_path / wheel.package)
    cached = {stage: [name for _, name in needs.cached(stage)] for stage in STAGES}
    assert cached["probe"] == [] and len(cached["model"]) == 2 and len(cached["bench7b"]) == 1
    assert any(name.endswith(".gguf") for name in cached["train"])
    names = {stage: [name for _, name in needs.weights(stage)] for stage in STAGES}
    assert f"{needs.WEIGHTS}/eagle2/model.safetensors" in names["model"] and not names["memory"]
    assert set(names["train"]) == {f"{needs.WEIGHTS}/{name}" for name in needs.CORPUS}


def test_wheels_are_those_that_are_needed_and_not_there(tmp_path, monkeypatch):
    nvml = "nvidia-ml-py"  # begins like what comes with torch, and does not
    known = {"specbench": ["torch>=2", "a-b>=1", "c; sys_platform == 'nowhere'", "d[more]"], "a-b": ["e", "nvidia-x", nvml]}
    known |= {nvml: [], "d": ["f; extra == 'more'", "g; extra == 'other'"], "e": [], "f": ["a_b"]}
    monkeypatch.setattr(needs, "distribution", lambda name: SimpleNamespace(version=f"1.{name}", requires=known[name]))
    assert needs.closure(["specbench"], needs.THERE) == {name: f"1.{name}" for name in ("d", "f", "a-b", "e", nvml)}
    have = tmp_path / "have"
    have.write_text("E==1.0\nf\n# a comment\n")
    assert needs.closure(["specbench"], [*needs.THERE, *needs._names(have)]) == {
        "d": "1.d",
        "a-b": "1.a-b",
        nvml: f"1.{nvml}",
    }


def test_a_package_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="looking\nno such version")
    monkeypatch.setattr(needs.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SpecBenchError, match=r"no wheel of x==1 for Python 3.12 on Linux \(no such version\)"):
        needs.download({"x": "1"}, tmp_path, "3.12")
