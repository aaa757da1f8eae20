"""A target with a LoRA adapter: merged weights against PEFT's own forward, its identity, and refusals in one line."""

import json

import pytest
import torch
from command_line import call, run
from conftest import composed, settled, tiny
from decoding import plain
from fixtures import settings
from hydra.utils import instantiate

from drafters.none import NoDrafter
from specbench.common.errors import SpecBenchError
from specbench.config import train_spec
from specbench.engine import adapters
from specbench.engine.verify import Lossless
from specbench.evaluation import costs
from specbench.evaluation.runner import BoundDrafter
from specbench.records import identity
from specbench.records.blocks import below, read_block
from specbench.records.cell_options import CellOptions
from specbench.records.rows import Measurement, Row
from specbench.records.schema import PROVENANCE
from specbench.reporting import cells, console

MODULES = ["q_proj", "v_proj", "down_proj"]
TEXT = torch.arange(14)[None]


def changed(target, size=0.05, seed=0):
    """A copy of a target with an adapter that computes something else."""
    copy = adapters.attach(target, 4, 8.0, MODULES, 0.0)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in copy.model.named_parameters():
        if ".lora_B." in name:
            parameter.data = size * torch.randn(parameter.shape, generator=generator)
    return copy


def saved(target, folder, **options):
    """The folder of such an adapter, with its provenance."""
    adapters.of(changed(target, **options).model, 2.0).save(folder)
    provenance = {"target": "tiny", "original_fingerprint": target.fingerprint()}
    (folder / PROVENANCE).write_text(json.dumps(provenance))
    return folder


@torch.no_grad()
def logits(target):
    return target.score(TEXT, TEXT, None, None)[1]


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "mistral"])
def test_merged_weights_compute_what_the_adapter_does(architecture):
    target = tiny(architecture, spread=0.1)
    copy, before = changed(target), logits(target)
    expected = logits(copy)
    assert (expected - before).abs().max() > 1e-2, "it is another target"
    assert torch.equal(logits(target), before), "the original is left alone"
    target.merge_adapter(adapters.of(copy.model, 2.0))
    assert (logits(target) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def test_the_scale_is_pefts():
    from peft import LoraConfig, inject_adapter_in_model

    for stabilised in (False, True):
        target = tiny(spread=0.1)
        reference = tiny(spread=0.1)
        options = {"r": 4, "lora_alpha": 8, "target_modules": MODULES, "use_rslora": stabilised, "init_lora_weights": False}
        inject_adapter_in_model(LoraConfig(**options), reference.model)
        reference.fused = None  # made of the layers before
        expected = logits(reference)
        target.merge_adapter(adapters.of(reference.model, 8 / (2 if stabilised else 4)))
        assert (logits(target) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def test_a_file_of_pefts_own_is_read(tmp_path):
    from peft import LoraConfig, get_peft_model

    target = tiny(spread=0.1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, init_lora_weights=False, task_type="CAUSAL_LM")
    tuned = get_peft_model(tiny(spread=0.1).model, config)
    tuned.save_pretrained(tmp_path)
    target.merge_adapter(adapters.read(tmp_path))
    with torch.no_grad():
        expected = tuned(TEXT).logits
    assert (logits(target) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def test_pefts_own_loader_reads_what_is_written(tmp_path):
    from peft import PeftModel

    target = tiny(spread=0.1)
    folder = saved(target, tmp_path / "a")
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(tiny(spread=0.1).model, folder)(TEXT).logits
    target.merge_adapter(adapters.read(folder))
    assert (logits(target) - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max()))


def test_a_copy_starts_as_the_target_and_only_the_adapter_is_trained():
    target = tiny()
    target.fused = None
    copy = adapters.attach(target, 4, 8.0, MODULES, 0.0)
    assert torch.equal(logits(copy), logits(target))
    trained = {name for name, p in copy.model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    shared = {id(p) for p in target.model.parameters()}
    assert all(id(p) in shared for name, p in copy.model.named_parameters() if name not in trained)


# Identity -------------------------------------------------------------------------------------------------------------


def test_it_has_a_fingerprint_of_its_own_that_follows_from_both(tmp_path):
    folders = [saved(tiny(), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    prints = []
    for folder in (*folders, folders[0]):
        target = tiny()
        target.merge_adapter(adapters.read(folder))
        prints.append(target.fingerprint())
    assert prints[0] == prints[2] == adapters.read(folders[0]).fingerprint(tiny().fingerprint())
    assert len({*prints, tiny().fingerprint()}) == 3


def test_its_rows_lie_in_cells_of_their_own():
    plain, adapted = (settled("eagle2", f"model.adapter={folder}") for folder in ("null", "some/where/medusa2"))
    assert adapted.cell_folder.name == f"{plain.cell_folder.name}-adapted-medusa2"
    words = ["dataset=mtbench", "model.adapter=some/where/medusa2", "model.quantised=int8"]
    assert CellOptions.of(words).folder == "mtbench-greedy-1024-adapted-medusa2-int8"
    assert identity.variant("a b/", None) == "adapted-a_b"
    headers = [settings("eagle2") for _ in range(2)]
    headers[1]["target"]["fingerprint"] = "f" * 16
    assert len({identity.cell_key(header) for header in headers}) == 2


# Refusals -------------------------------------------------------------------------------------------------------------


def test_another_targets_adapter_is_refused(tmp_path):
    folder = saved(tiny(), tmp_path / "a")
    with pytest.raises(SpecBenchError, match=r"model\.adapter=.*was made for target tiny"):
        tiny(seed=1).merge_adapter(adapters.read(folder))
    (folder / PROVENANCE).unlink()  # nothing says whose it is, but its layers do
    with pytest.raises(SpecBenchError, match=r"made for another target: this one has no model\.layers\.2"):
        tiny(num_hidden_layers=2).merge_adapter(adapters.read(folder))
    target = tiny(intermediate_size=64)
    before = logits(target)
    with pytest.raises(SpecBenchError, match=r"down_proj is \[32, 64\], not \[32, 48\]"):
        target.merge_adapter(adapters.read(folder))
    assert torch.equal(logits(target), before), "nothing was changed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"r": 5}, "has no A and B of rank 5"),
        ({"r": "many"}, r"\br\b"),
    ],
)
def test_what_is_no_plain_lora_is_refused(change, message, tmp_path):
    folder = saved(tiny(), tmp_path / "a")
    path = folder / adapters.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecBenchError, match=message):
        adapters.read(folder)


def test_the_command_line_refuses_it_in_one_line(home, tmp_path):
    folder = saved(tiny(seed=3), tmp_path / "a")
    for given, message in (
        (tmp_path / "nowhere", "there is no adapter_config.json"),
        (folder, "was made for target tiny"),
    ):
        done = call(home, "run", f"model.adapter={given}", "drafter=suffix")
        lines = [line for line in done.stderr.splitlines() if line.startswith("specbench: ")]
        assert done.returncode == 2 and len(lines) == 1 and message in lines[0], done.stderr
    damaged = folder / adapters.TENSORS
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert "damaged or cut off" in run(home, "run", f"model.adapter={folder}", "drafter=suffix", ok=False)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: settled("eagle2", "model.adapter=a", "link=5g"),
        lambda: train_spec.from_config(composed("train", "drafter=eagle2", "model.adapter=a")),
        lambda: instantiate(composed("run", "model.adapter=a", "model.weights=random", "alpha=[0.5]").model).load(),
    ],
)
def test_where_there_is_none_it_is_refused(refuse):
    with pytest.raises(SpecBenchError, match=r"model\.adapter"):
        refuse()


def test_layers_that_are_not_there_cannot_be_adapted():
    with pytest.raises(SpecBenchError, match="no layer of the target is called qkv"):
        adapters.attach(tiny(), 4, 8.0, ["qkv"], 0.0)


# Drift ----------------------------------------------------------------------------------------------------------------


def test_drift_is_what_teacher_forcing_says():
    original, target = tiny(), changed(tiny(), size=0.02)
    drafter = NoDrafter()
    drafter.bind(target)
    plain, prompt = BoundDrafter("none", drafter, Lossless()), [3, 4, 5]
    same = costs.quality(original, original, plain, [prompt], 10)
    assert same["kl"] == pytest.approx(0, abs=1e-6) and same["agreement"] == 1
    found = costs.quality(target, original, plain, [prompt], 10)
    answer = costs._answer(original, plain, prompt, 10, original.stop_ids)
    kl = []
    for i in range(len(answer)):
        ids = torch.tensor([[*prompt, *answer[:i]]])
        ours, theirs = (m.model(ids).logits[0, -1].log_softmax(-1) for m in (target, original))
        kl.append(float((theirs.exp() * (theirs - ours)).sum().detach()))
    assert found["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3) and found["kl"] > 1e-4


def test_a_run_decodes_the_adapted_target_and_measures_its_drift(home, tmp_path):
    from specbench.engine.target import Target

    target = Target.load(home / "model", torch.float32, torch.device("cpu"))
    folder = saved(target, tmp_path / "mine", size=0.2)
    run(home, "run", f"model.adapter={folder}", "drafter=suffix", "decode.max_new_tokens=8", "data.limit=2")
    (path,) = (path for path in below(home / "results") if path.parent.name.endswith("-adapted-mine"))
    header, records = read_block(path)
    assert header["target"]["adapted"] == "mine" and header["target"]["fingerprint"] != target.fingerprint()
    (quality,) = (r for r in records if isinstance(r, Measurement) and r.what == "quality")
    assert quality.values["kl"] > 0 and quality.values["agreement"] < 1
    rows = {(r.drafter, r.question, r.turn): r for r in records if isinstance(r, Row)}
    assert {r.audit["verdict"] for r in rows.values() if r.drafter == "suffix"} == {"identical"}
    adapted, chat = instantiate(composed("run", f"model.path={home / 'model'}", f"model.adapter={folder}").model).load()
    prompt = chat.opening("w0 w3 w4")
    answers = [plain(one, prompt, 8) for one in (adapted, target)]
    assert rows["none", "0", 0].tokens == answers[0] != answers[1], "the baseline is the adapted target's plain decoding"
    printed = " ".join(console.lines(cells.collect([path], path.parents[2]), width=1000))
    assert "adapted by mine" in printed and "nats a token" in printed
