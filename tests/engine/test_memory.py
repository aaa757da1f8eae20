"""What a target and its drafters take is said from shapes alone, near what a process really takes, and refused in time."""

import copy
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from command_line import call
from conftest import ARCHITECTURES, DRAFTERS, SIZES, composed, make, tiny
from hydra.utils import instantiate
from test_loading import said_in

from drafters.eagle import Eagle
from specbench.common import environment, timing
from specbench.common.errors import SpecBenchError
from specbench.data.download import converted_entry
from specbench.engine import memory
from specbench.engine.backends import forwards, packed_linear
from specbench.engine.checkpoints import Checkpoint
from specbench.engine.decode import Limits, decode
from specbench.engine.drafter import Outline
from specbench.engine.memory import MIN_HEADROOM, Estimate, NoRoom, Shape, estimate
from specbench.engine.policies import Dynamic
from specbench.engine.pretrained import config_of
from specbench.engine.sampling import Sampler
from specbench.engine.target import SPARE, Target
from specbench.engine.verify import Lossless
from specbench.evaluation import arms, isolated

CPU = torch.device("cpu")
GIB = 2**30
SMALL = {"model_type": "llama", "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8}
SMALL |= {"num_attention_heads": 10, "num_key_value_heads": 10, "vocab_size": 8000, "max_position_embeddings": 512}
SHAPED = ["llama2-7b", "llama3-8b", "qwen2.5-7b"]  # whose configurations carry a shape


def spec(model, *overrides):
    return instantiate(composed("run", f"model={model}", "model.device=cpu", *overrides).model)


def drafter(name, *overrides):
    return instantiate(composed("run", f"drafter={name}", "model.name=tiny", *overrides).drafter)  # as `make` has it


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free."""
    return lambda size: monkeypatch.setattr(environment, "free_memory", lambda device, everywhere=False: size)


@pytest.fixture
def nothing_loaded(monkeypatch):
    monkeypatch.setattr("specbench.engine.loading.model_folder", lambda *a: pytest.fail("fetched"))
    for name in ("load", "random"):
        monkeypatch.setattr(Target, name, lambda *a: pytest.fail("loaded"))


# Against what there is ------------------------------------------------------------------------------------------------


def decoded(shape, dtype, folder, prompt):
    """A target, its products made fast, an EAGLE head; some tokens behind a prompt."""
    target = Target.load(folder, dtype, CPU) if folder else Target.random(config_of(shape, "shape"), dtype, CPU)
    target.optimize_for_inference()
    made = Eagle("eagle2", Dynamic(3, 4, 12))
    made.bind(target)
    made.optimize_for_inference()
    for _ in decode(target, made, [3] * prompt, Limits(8), Lossless(), Sampler()):
        pass


def peak(shape, dtype, folder):
    """Bytes that all of it takes at most in this process, in which a small one has run before."""
    torch.set_num_threads(1)
    packed_linear._time = lambda weights, packs: (True,) * len(packed_linear.ROWS)
    decoded(
        {**shape, "hidden_size": 80, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}, dtype, None, 30
    )
    watched = timing.PeakMemory(CPU)
    watched.start()
    before = watched.bytes()
    decoded(shape, dtype, folder, shape["max_position_embeddings"] - 9)
    return watched.bytes() - before


def measured(shape, dtype, folder=None):
    return isolated.call(peak, shape, getattr(torch, dtype), folder)


def took(found):
    """What an estimate says of a process that has begun already, with all copies."""
    return found.needed - found.parts["headroom"] + found.copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_a_process_is_within_a_fifth_of_what_was_said(dtype):
    """Of 100 MB of weights and more: the target at random, an EAGLE head, caches, a prompt that fills the context."""
    found = estimate(config_of(SMALL, "shape"), getattr(torch, dtype), CPU, 512, [drafter("eagle2")], read=False)
    assert took(found) == pytest.approx(measured(SMALL, dtype), rel=0.2)
    assert bool(found.copies) == packed_linear.packable(torch.empty(0, dtype=getattr(torch, dtype)))


def test_so_it_is_of_a_target_that_is_read_from_files(tmp_path):
    """Files are mapped: what is converted of them lies in memory twice, which the kernel takes back."""
    config = config_of(SMALL, "shape")
    Target.random(config, torch.bfloat16, CPU).model.save_pretrained(tmp_path)
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    config = config_of({**SMALL, "dtype": "bfloat16"}, "shape")  # whose weights passes of few tokens read as they are
    found = estimate(config, torch.float32, CPU, 512, [drafter("eagle2")])
    assert 0.8 * took(found) < measured(SMALL, "float32", tmp_path) < 1.2 * (took(found) + files)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shapes_have_the_parameters_and_the_cache_of_the_target(architecture):
    target = tiny(architecture)
    found = estimate(target.model.config, torch.float32, CPU, 100)
    assert found.weights == sum(p.nbytes for p in target.model.parameters())
    target.reset(100 + SPARE)
    target.prefill(torch.tensor([3, 1, 4]))
    assert found.cache == target.cache.nbytes
    half = estimate(target.model.config, torch.bfloat16, CPU, 100)
    assert 2 * half.weights == found.weights and 2 * half.cache == found.cache


def test_tied_weights_count_once_but_are_copied_for_the_head():
    sizes = {"model_type": "llama", **SIZES}
    tied, untied = (
        estimate(config_of(sizes | {"tie_word_embeddings": tied}, "shape"), torch.float32, CPU, 100)
        for tied in (True, False)
    )
    assert untied.weights - tied.weights == 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    model = tiny().model
    decoder = 4 * sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n)
    head = model.lm_head.weight.nbytes
    joined = forwards.OPENVINO_COPIES * (decoder + head) if forwards.has_openvino() else decoder  # in one graph
    assert untied.copies == tied.copies == int(joined) + head
    lean = estimate(config_of(sizes, "shape"), torch.float32, CPU, 100, fused=False)
    assert lean.copies == 0 and estimate(config_of(sizes, "shape"), torch.float16, CPU, 100).copies == 0


def test_a_mixture_of_experts_takes_no_memory_to_be_weighed():
    found = estimate(config_of({"model_type": "mixtral"}, "shape"), torch.bfloat16, torch.device("cuda"), 4096)
    assert found.weights / 2e9 == pytest.approx(46.7, rel=0.01) and found.copies == found.loading == 0
    spread = estimate(
        config_of({"model_type": "mixtral"}, "shape"), torch.bfloat16, torch.device("cuda"), 4096, processes=4
    )
    assert spread.weights == found.weights // 4


# Drafters -------------------------------------------------------------------------------------------------------------


def held(made, target):
    """Parameters of a bound drafter that are not the target's."""
    shared = {id(p) for p in target.model.parameters()}
    own = made.parameters() if isinstance(made, torch.nn.Module) else []
    return sum(p.numel() for p in own if id(p) not in shared)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_drafters_outline_has_its_parameters_and_leaves_it_as_it_was(name, architecture):
    target, made = tiny(architecture), drafter(name)
    before = list(getattr(made, "_modules", ())), sorted(vars(made))
    outline = made.outline(Shape(target.model.config, torch.float32))
    assert outline.own == held(make(name, target), target)
    assert (list(getattr(made, "_modules", ())), sorted(vars(made))) == before
    assert outline.own or outline.row or not any(word in made.__class__.__module__ for word in ("eagle", "vanilla", "self"))


@pytest.mark.parametrize("options", [["+drafter.balanced_start=true"], ["drafter.vocabulary=20"]])
def test_options_that_read_the_target_are_outlined_as_well(options):
    shape = Shape(tiny().model.config, torch.float32)
    plain, other = drafter("eagle2").outline(shape), drafter("eagle2", *options).outline(shape)
    assert other.own - plain.own == (20 * SIZES["hidden_size"] if "vocabulary" in options[0] else 0)


def test_heads_of_their_own_and_a_whole_draft_model_count(home):
    shape = Shape(tiny().model.config, torch.float32)
    assert drafter("medusa", "+drafter.head_per_level=true").outline(shape).own == drafter("medusa").outline(
        shape
    ).own + 5 * (SIZES["vocab_size"] * SIZES["hidden_size"])
    whole = drafter("vanilla", f"drafter.path={home / 'model'}").outline(shape)
    assert whole.own == sum(p.numel() for p in tiny().model.parameters())
    assert whole.row == 2 * SIZES["num_hidden_layers"] * SIZES["hidden_size"], "at most as wide as the target"


def test_a_drafter_that_cannot_be_made_or_is_not_here_counts_nothing_and_is_refused_when_it_is_bound():
    config = tiny().model.config
    for odd in (drafter("moa", "drafter.tli=9"), drafter("vanilla", "drafter.path=nobody/nothing-here")):
        assert estimate(config, torch.float32, CPU, 100, [odd]).drafters == {}
    with pytest.raises(SpecBenchError, match="tli=9"):
        make("moa", tiny(), "drafter.tli=9")


def test_a_copy_of_a_drafter_does_not_copy_its_checkpoint():
    made = drafter("eagle2")
    made.checkpoint = Checkpoint("there", "there", lambda: {"fc.weight": torch.zeros(3)}, {}, {})
    assert copy.deepcopy(made).checkpoint is made.checkpoint


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(call):
    with pytest.raises(NoRoom) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and len(message) < 400, message
    return message


@pytest.mark.parametrize("weights", ["trained", "random"])
@pytest.mark.parametrize("model", SHAPED)
def test_a_shape_refuses_before_anything_is_fetched_or_loaded(model, weights, free, nothing_loaded):
    free(10 * 10**9)
    message = refused(lambda: spec(model, f"model.weights={weights}", "model.dtype=bfloat16").load())
    assert f"{model} needs about" in message and "in bfloat16 (weights" in message and "cpu has 10.0 GB free" in message


def test_llama2_7b_does_not_fit_in_24_gib_in_float32_and_does_in_bfloat16(free, nothing_loaded, monkeypatch):
    free(24 * GIB)
    beside = [drafter("eagle2")]
    asked = spec("llama2-7b", "model.weights=random", "model.dtype=float32")
    message = refused(lambda: asked.load(beside=beside))
    assert "(weights 27.0, " in message and "cache 4.4" in message and "eagle2 1.1" in message and "headroom" in message
    for option in ("model=", "model.dtype=bfloat16", "model.max_context below 4096", "larger machine"):
        assert option in message
    monkeypatch.setattr(Target, "random", lambda *a: (_ for _ in ()).throw(SpecBenchError("would be loaded")))
    with pytest.raises(SpecBenchError, match="would be loaded"):
        spec("llama2-7b", "model.weights=random", "model.dtype=bfloat16").load(beside=beside)


def test_the_default_target_fits_in_3_gb(free):
    """Its shape, and all that a study holds beside it."""
    llama = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    llama |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
    config = config_of(llama | {"tie_word_embeddings": True}, "shape")
    found = estimate(config, torch.float32, CPU, 4096, [drafter("eagle2"), drafter("medusa"), drafter("vanilla")])
    assert found.weights == 4 * 134_515_008
    assert found.needed + found.copies < 3 * 10**9


def test_a_folder_or_a_cached_folder_decides_whatever_billions_says(home, free, tmp_path, monkeypatch):
    free(2 * MIN_HEADROOM)
    asked = ("model.wheel=null", "model.dtype=float32", "+model.billions=900")
    target, _ = spec("smollm2-135m", f"model.path={home / 'model'}", *asked).load()
    assert target.layers == 3
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    wheel = spec("smollm2-135m").wheel
    entry = tmp_path / converted_entry("smollm2-135m", wheel)
    entry.parent.mkdir()
    entry.symlink_to(home / "model")
    assert spec("smollm2-135m", "model.dtype=float32", "+model.billions=900").load()[0].layers == 3
    assert converted_entry("smollm2-135m", replace(wheel, sha256="0" * 64)) != converted_entry("smollm2-135m", wheel)
    free(MIN_HEADROOM)
    assert "needs about 0.5 GB" in refused(spec("smollm2-135m", f"model.path={home / 'model'}", *asked).load)


def test_a_configuration_that_had_to_be_fetched_is_weighed_before_its_weights_are_read(home, free, monkeypatch, tmp_path):
    folder = shutil.copytree(home / "model", tmp_path / "model")
    said_in(folder / "config.json", intermediate_size=10**9)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specbench.engine.loading.model_folder", lambda *a: folder)
    monkeypatch.setattr(Target, "load", lambda *a: pytest.fail("loaded"))
    monkeypatch.setattr(Target, "random", lambda *a: pytest.fail("loaded"))
    free(10**10)
    for weights in ("trained", "random"):
        asked = spec("smollm2-135m", "+model.billions=0.1", "model.dtype=float32", f"model.weights={weights}")
        assert "weights 1152.0" in refused(asked.load)


def test_a_drafter_with_which_a_target_does_not_fit_does_not_rule_out_the_next_one(home, free, monkeypatch):
    free(MIN_HEADROOM + 10**6)
    run = SimpleNamespace(
        model=spec("smollm2-135m", f"model.path={home / 'model'}", "model.dtype=float32", "model.forward=plain"),
        link=SimpleNamespace(local=True),
        backend="eager",
        batch=1,
    )
    heavy = SimpleNamespace(name="heavy", outline=lambda target: Outline(10**9))
    message = refused(lambda: arms.load(run, [heavy]))
    assert "heavy 4.0" in message
    free(MIN_HEADROOM + 10**7)
    assert arms.load(run)[0].layers == 3


def test_a_run_that_cannot_fit_is_one_line_and_code_2(home):
    shape = "{model_type: llama, hidden_size: 65536, num_hidden_layers: 40, vocab_size: 61, num_attention_heads: 64}"
    asked = ("model.weights=random", f"+model.shape={shape}", "alpha=[0.5]", "model.path=null")
    done = call(home, "run", "drafter=eagle2", *asked)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("specbench: ")]
    assert "tiny needs about" in line and "eagle2" in line and "model.dtype=bfloat16" in line


def test_an_estimate_names_its_largest_parts():
    found = Estimate(27 * 10**9, cache=2 * 10**9, passes=10**7, drafters={"eagle2": 10**9, "medusa": 3 * 10**7})
    assert str(found) == "weights 27.0, headroom 3.0, cache 2.0, eagle2 1.0"
    assert Estimate(10**9).needed == 10**9 + MIN_HEADROOM
    assert Estimate(10**9, loading=10**9, cache=10**8).needed == Estimate(10**9, cache=10**9).needed


# Copies for fast products ---------------------------------------------------------------------------------------------


def test_copies_are_made_as_far_as_there_is_room(monkeypatch):
    monkeypatch.setattr(packed_linear, "_time", lambda weights, packs: (True,) * len(packed_linear.ROWS))
    layers = [(torch.randn(8, 4), None)] * 3
    for room, kind in ((3 * 128, packed_linear.Packed), (3 * 128 - 1, type(lambda: 0))):
        packing = packed_linear.Packing(room=lambda room=room: room)
        assert {type(product) for product in packing.products(layers)} == {kind}


def test_what_is_left_out_is_said(home, free, capsys):
    free(2 * MIN_HEADROOM)
    asked = ("model.dtype=float32", f"model.path={home / 'model'}")
    spec("smollm2-135m", *asked).load()
    assert "left out" not in capsys.readouterr().err
    config = memory.estimate(tiny().model.config, torch.float32, CPU, 4096)
    free(config.needed + config.copies - 1)
    target, _ = spec("smollm2-135m", *asked).load()
    assert "no room for all" in capsys.readouterr().err
    assert target.packing.room() == config.weights + config.copies - 1
    spec("smollm2-135m", *asked, "model.forward=plain").load()
    assert "left out" not in capsys.readouterr().err


def test_bfloat16_is_packed_only_where_the_processor_can(monkeypatch):
    half = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert packed_linear.packable(half) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not packed_linear.packable(half):
        target = Target.random(config_of({"model_type": "llama", **SIZES}, "shape"), torch.bfloat16, CPU)
        target.optimize_for_inference()
        assert target.fused is not None


# What is free ---------------------------------------------------------------------------------------------------------


def group(folder, limit, used, files, old=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = environment.V1_FILES if old else environment.V2_FILES
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "total_" if old else ""
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {files}\n{prefix}active_file 1\n")


def test_a_container_or_a_batch_job_has_its_limit(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    group(tmp_path / "job", 1000, 400, 9)
    group(tmp_path / "job" / "step", "max", 300, 9)
    assert list(environment._left_in_groups(tmp_path, own)) == [610]
    own.write_text("4:cpu,memory:/old\n2:cpuset:/old\n")
    group(tmp_path / "memory" / "old", 2000, 500, 99, old=True)
    assert list(environment._left_in_groups(tmp_path, own)) == [1600]
    assert list(environment._left_in_groups(tmp_path, tmp_path / "nothing")) == []
    monkeypatch.setattr(environment, "_left_in_groups", lambda *a: [610, 700])
    assert environment.free_memory(CPU) == 610


def test_what_is_available_counts_not_what_there_is(monkeypatch):
    monkeypatch.setattr(environment, "_left_in_groups", lambda *a: [])
    total = environment.hardware(CPU)["memory_gib"] * GIB
    assert 0 < environment.free_memory(CPU) < total


def test_sequences_that_are_decoded_together_have_caches_of_their_own():
    one, eight = (
        estimate(config_of({"model_type": "llama", **SIZES}, "shape"), torch.float32, CPU, 100, sequences=n) for n in (1, 8)
    )
    assert one.cache > 0 and eight.cache == 8 * one.cache and eight.weights == one.weights
