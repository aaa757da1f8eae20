"""Other engines in this process: their files, what they are asked, beside plain decoding; missing packages."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import call
from conftest import ROOT, tiny
from fixtures import arm, block, random_row, settings
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from drafters.llama_cpp import LlamaCpp
from drafters.none import NoDrafter
from drafters.openvino import OpenVino
from specbench.common.errors import SpecBenchError
from specbench.data import gguf_files
from specbench.engine import peer
from specbench.engine.decode import Limits
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.evaluation import costs, measurements, study_runs
from specbench.evaluation.runner import BoundDrafter
from specbench.records import studies
from specbench.records.rows import Measurement
from specbench.remote.endpoint import Answer
from specbench.reporting import cells, console, engines, sections, tables

PROMPTS = [[3, 4, 5, 6], [7, 8, 9]]
ENGINES = {"openvino": OpenVino, "llama_cpp": LlamaCpp}


# Files ----------------------------------------------------------------------------------------------------------------


def write_gguf(path, table):
    """A file of one matrix and one vector, in float32."""
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", table)
    writer.add_tensor("output_norm.weight", table[0])
    gguf_files._write(writer)
    return path


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A file whose values bfloat16 would round, and float16, too, were they not rounded before."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return write_gguf(tmp_path / "tiny.gguf", np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32))


@pytest.mark.parametrize(
    ("precision", "kind", "exact"), [("F32", "F32", True), ("F16", "F16", True), ("Q8_0", "Q8_0", False)]
)
def test_a_copy_holds_the_targets_values_and_says_where_it_does_not(shipped, precision, kind, exact):
    made = gguf_files.in_precision(shipped, precision)
    assert (made.precision, made.exact) == (kind, exact)
    matrix, vector = gguf_files._read(made.path).tensors
    expected = torch.from_numpy(gguf_files.first_embedding(shipped).copy()).bfloat16().float().numpy()
    assert matrix.tensor_type.name == kind and vector.tensor_type == GGMLQuantizationType.F32
    assert np.array_equal(vector.data, expected)
    assert np.array_equal(gguf_files.first_embedding(made.path), expected) == exact
    assert gguf_files._read(made.path).fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]


def test_the_shipped_file_is_another_target(shipped):
    assert gguf_files.in_precision(shipped, None) == gguf_files.GgufFile(shipped, "Q4_1", False)


def test_a_value_that_float16_cannot_hold_makes_another_target(tmp_path, shipped):
    path = write_gguf(tmp_path / "small.gguf", np.full((4, 64), 1.0078125e-7, np.float32))
    assert gguf_files.in_precision(path, "F32").exact and not gguf_files.in_precision(path, "F16").exact


# What they are asked ----------------------------------------------------------------------------------------------------


class Pipeline:
    """OpenVINO GenAI's, as far as it is used."""

    def __init__(self, path, device, **options):
        self.made, self.asked = (path, device, options), []

    def generate(self, inputs, config):
        self.asked.append((inputs, config))
        return SimpleNamespace(tokens=[[5, 6]], perf_metrics=SimpleNamespace(get_ttft=lambda: SimpleNamespace(mean=0.0)))


class Llama:
    """llama-cpp-python's, as far as it is used; counts up without end."""

    def __init__(self, path, **options):
        self.made, self.resets = (path, options), 0

    def reset(self):
        self.resets += 1

    def close(self):
        pass

    def generate(self, prompt, temp):
        assert temp == 0
        while True:
            yield prompt[-1] + 1
            prompt = [prompt[-1] + 1]


@pytest.fixture
def fakes(monkeypatch):
    """The modules of both engines."""
    genai = {"LLMPipeline": Pipeline, "SchedulerConfig": SimpleNamespace, "GenerationConfig": SimpleNamespace}
    made = {
        "openvino": {"Tensor": lambda array: array},
        "openvino_genai": {**genai, "TokenizedInputs": lambda ids, mask: (ids.tolist(), mask.tolist())},
        "llama_cpp": {"Llama": Llama},
        "llama_cpp.llama_speculative": {"LlamaPromptLookupDecoding": lambda *sizes: sizes},
    }
    for name, members in made.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def test_openvino_decodes_greedily_in_float32_and_keeps_no_prompt(fakes, tmp_path):
    engine = OpenVino("openvino", None, lookup=5)
    engine.open(tmp_path / "m.gguf", 3, 64)
    path, device, options = engine.pipeline.made
    assert (path, device, options["INFERENCE_NUM_THREADS"]) == (str(tmp_path / "m.gguf"), "CPU", 3)
    assert options["prompt_lookup"] and not options["scheduler_config"].enable_prefix_caching
    assert options["INFERENCE_PRECISION_HINT"] == options["KV_CACHE_PRECISION"] == "f32"
    assert engine.answer([1, 2], "", Limits(9, (4,)), Sampler(), None).ids == [5, 6]
    (((ids, mask), config),) = engine.pipeline.asked
    assert ids == [[1, 2]] and mask == [[1, 1]]
    assert (config.max_new_tokens, config.do_sample, config.stop_token_ids, config.ignore_eos) == (9, False, {4}, False)
    assert (config.num_assistant_tokens, config.max_ngram_size) == (5, 3)
    assert engine.greedy([1], 2) == [5, 6] and engine.pipeline.asked[-1][1].ignore_eos


def test_openvino_chooses_its_own_arithmetic_where_it_may(fakes, tmp_path):
    engine = OpenVino("openvino", None, arithmetic="engine")
    engine.open(tmp_path, 1, 64)
    assert set(engine.pipeline.made[2]) == {"scheduler_config", "INFERENCE_NUM_THREADS"}
    engine.greedy([1], 2)
    assert not hasattr(engine.pipeline.asked[0][1], "num_assistant_tokens")


def test_llama_cpp_stops_at_the_cap_and_behind_a_stop_token(fakes, tmp_path):
    engine = LlamaCpp("llama_cpp", None, lookup=5)
    engine.open(tmp_path / "m.gguf", 3, 64)
    path, options = engine.model.made
    assert path == str(tmp_path / "m.gguf") and options["n_threads"] == options["n_threads_batch"] == 3
    assert options["draft_model"] == (3, 5) and options["type_k"] == options["type_v"] == 0
    assert options["logits_all"], "it would have room for the logits of 512 tokens"
    assert engine.greedy([7], 3) == [8, 9, 10] and engine.model.resets == 1
    answer = engine.answer([7], "", Limits(9, (9,)), Sampler(), None)
    assert answer.ids == [8, 9] and answer.pieces == 2 and 0 <= answer.first_s <= answer.first_s + answer.decode_s
    other = LlamaCpp("llama_cpp", None, arithmetic="engine")
    other.open(tmp_path, 1, 64)
    assert not {"draft_model", "type_k"} & set(other.model.made[1])


class Echo(peer.Peer):
    """An engine that answers as the target would, but for what `spoil` makes of it."""

    package, engine = "torch", "Echo"

    def open(self, path, threads, context):
        self.opened = path, threads, context

    def answer(self, prompt, text, limits, sampler, seed):
        return Answer(self.spoil(self.target.greedy(tuple(prompt), limits.max_new_tokens)[0, len(prompt) :].tolist()))


def test_a_peer_is_bound_to_the_model_of_its_file_alone(tmp_path, monkeypatch, shipped):
    target = tiny()
    table = target.embedding.weight.float().numpy()
    path = write_gguf(tmp_path / "own.gguf", np.concatenate([table, table], 1))
    monkeypatch.setattr(peer, "file_from_wheel", lambda wheel: path)
    engine = Echo("echo", "a wheel")
    with pytest.raises(SpecBenchError, match="another model than the target"):
        engine.bind(target)
    path = write_gguf(tmp_path / "same.gguf", table)
    engine = Echo("echo", "a wheel")
    engine.bind(target)
    assert engine.opened == (path, torch.get_num_threads(), target.max_context)
    found = {"engine": "Echo", "version": torch.__version__, "precision": "Q4_1", "exact": False, "lookup": 0}
    assert found.items() <= engine.found.items() and engine.contents["served"]
    with pytest.raises(SpecBenchError, match=r"set model\.device=cpu"):
        engine.bind(SimpleNamespace(device=torch.device("meta")))
    with pytest.raises(SpecBenchError, match="has no wheel"):
        Echo("echo", None).find_model()


# Beside plain decoding ------------------------------------------------------------------------------------------------


def beside(spoil):
    target, plain = tiny(), NoDrafter()
    plain.bind(target)
    engine = Echo("echo", None)
    engine.target, engine.spoil = target, spoil
    bound = BoundDrafter("none", plain, Lossless())
    load = measurements.Workload(target, PROMPTS, 12, bound)
    one = SimpleNamespace(
        bound=BoundDrafter("echo", engine, Lossless()), spec=SimpleNamespace(backend="eager"), label="echo"
    )
    return measurements.QUANTITIES, load, one


@pytest.mark.parametrize(
    ("spoil", "share"),
    [(list, 1.0), (lambda ids: [*ids[:-1], ids[-1] + 1], 0.0), (lambda ids: ids[:-1], 0.0)],
    ids=["same", "last id", "shorter"],
)
def test_answers_are_the_same_only_where_all_ids_are(spoil, share):
    quantities, load, one = beside(spoil)
    found = quantities["generate"].measure(load, one)
    assert found["identical"] == share
    assert found["ratio"] == pytest.approx(found["ours"] / found["theirs"])


def test_of_an_engine_nothing_is_measured_but_its_answers():
    quantities, _, one = beside(list)
    assert [name for name, quantity in quantities.items() if quantity.applies(one)] == ["generate"]


def test_the_floor_is_what_a_pass_reads_at_the_speed_of_reading(monkeypatch):
    target = tiny()
    now = iter(range(10**6))
    monkeypatch.setattr(costs, "Clock", lambda device: lambda: next(now))  # every read takes a second
    found = costs.bandwidth(target, PROMPTS, 12)
    config = target.config
    weights = sum(p.numel() for p in target.decoder.layers.parameters()) + target.head.weight.numel()
    rows, kv = (4 + 3) // 2 + 6, 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert found["bytes"] == 4 * (weights + rows * kv)
    assert found["gb_per_s"] == pytest.approx(found["bytes"] / 1e9) and found["ms"] == pytest.approx(1000)
    assert found["tokens_per_s"] == pytest.approx(1)
    monkeypatch.setattr(costs, "READ_BYTES", found["bytes"] // 4)  # no more is read, and it takes as long
    assert costs.bandwidth(target, PROMPTS, 12)["ms"] == pytest.approx(4000, rel=0.01)


# Packages that are not there -------------------------------------------------------------------------------------------

STUDY = {
    "arms": {
        "a": {"run": ["drafter=suffix"]},
        "b": {"run": ["drafter=openvino"], "needs": {"package": "no-such-package"}},
        "c": {"run": ["drafter=openvino"], "needs": {"package": "torch"}},
    }
}
LINE = r"without the package no-such-package: b; pip install -e '.\[peers\]' installs it"


def test_arms_without_their_package_are_left_out_by_a_line_and_refused_by_name():
    here = studies.arms_here(STUDY, cuda=False)
    assert here == ["a", "c"]
    nothing, line = study_runs.arms_left_out(STUDY, here)
    assert nothing == "" and line == "arms left out " + LINE.replace("\\", "")
    study_runs.require_packages(STUDY, ["a", "c"])
    with pytest.raises(SpecBenchError, match=LINE):
        study_runs.require_packages(STUDY, ["a", "b"])


TEXT = """\
title: Peers
source: [nowhere]
cells: [[dataset=mtbench, data.limit=1]]
arms:
  suffix: {run: [drafter=suffix]}
  absent: {run: [drafter=openvino], needs: {package: no-such-package}}
measure: {generate: 1}
"""


def test_a_study_without_a_peer_measures_the_rest(home, tmp_path):
    (home / "conf" / "study").mkdir(parents=True, exist_ok=True)
    (home / "conf" / "study" / "peers.yaml").write_text(TEXT)
    own = f"--config-dir={home / 'conf'}", "study=peers", f"results={tmp_path}"
    done = call(home, "study", *own)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no-such-package") == 1 and "pip install" in done.stderr
    done = call(home, "study", *own, "arms=[absent]")
    assert done.returncode == 2 and done.stderr.strip().count("\n") == 0 and "no-such-package" in done.stderr


@pytest.mark.parametrize("name", ENGINES)
def test_a_peer_that_is_not_installed_is_refused_in_one_line(name, monkeypatch):
    monkeypatch.setattr(peer, "installed", lambda package: None)
    with pytest.raises(SpecBenchError, match=rf"drafter={name} needs {ENGINES[name].package}: pip install -e '.\[peers\]'"):
        ENGINES[name](name, None).find_model()


def test_the_extra_names_the_packages_of_all_peers():
    (line,) = [x for x in (ROOT / "pyproject.toml").read_text().splitlines() if x.startswith("peers = ")]
    assert all(f'"{engine.package}>=' in line for engine in ENGINES.values())


# In the report --------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path):
    header = settings("int8")
    served = {
        "id": "m",
        "engine": "E",
        "version": "3",
        "precision": "Q8_0",
        "arithmetic": "engine",
        "exact": False,
        "lookup": 5,
    }
    header["arms"]["int8"] = arm("openvino", served=served)
    header["versions"]["transformers"] = "5"
    cell, rng = block(tmp_path, header), np.random.default_rng(0)
    for who in ("none", "int8"):
        cell.write(random_row(rng, who)[0])
    for r in range(3):
        cell.write(Measurement("none", "generate", r, {"ours": 30.0, "theirs": 20.0, "ratio": 1.5, "identical": 1.0}))
        cell.write(Measurement("int8", "generate", r, {"ours": 30.0, "theirs": 60.0, "ratio": 0.5, "identical": r / 4}))
        cell.write(
            Measurement("none", "bandwidth", r, {"bytes": 5e8, "gb_per_s": 25.0, "ms": 20.0 + r, "tokens_per_s": 50.0})
        )
    cell.write(Measurement("int8", "generate", 3, {"ours": 1.0}))  # of which a part is missing
    return cells.collect([cell.path])


def test_the_report_names_every_engine_its_weights_and_what_was_the_same(group):
    columns, lines = engines.table(group)
    assert sorted(lines) == [
        [
            "E 3",
            "Q8_0 (another target), its own arithmetic",
            "prompt lookup, 5 tokens",
            "60.0",
            "plain",
            "30.0",
            "0.50",
            "0%",
        ],
        ["Transformers 5", "float32", "its own plain", "20.0", "plain", "30.0", "1.50", "100%"],
        ["bandwidth floor", "500 MB a token at 25.0 GB/s", "20.0 ms a token", "50.0", "", "", "", ""],
    ]
    assert {len(line) for line in lines} == {len(columns)}
    assert any(getattr(part, "columns", None) == columns for part in sections._beside(group))
    assert console.caption(group, machine=True).endswith("reading the model takes 20.0 ms a token")


def test_without_measurements_there_is_no_table(group):
    assert engines.table([e for e in group if e.name == "none" and e.measured.clear() is None])[1] == []


def test_a_peers_rows_say_which_engine_answered():
    drafter, served = {"name": "openvino"}, {"engine": "E", "version": "3", "precision": "F16", "exact": True}
    assert tables._where(drafter, served) == "by E 3 (F16), timed in this process"
    assert tables._where(drafter, {**served, "exact": False}) == "by E 3 (F16, another target), timed in this process"
