"""Identity by content: what was read makes the cell, and nothing is read for its digest twice."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ARCHITECTURES, ROOT, configuration, tiny
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.storage import sha256_of
from specbench.config import run_spec
from specbench.data.corpus_file import PACKED_PROVENANCE
from specbench.data.prompts import PromptSet
from specbench.engine import pretrained
from specbench.engine.model_files import contents_of
from specbench.engine.pretrained import fingerprint_of
from specbench.engine.target import Target
from specbench.evaluation import arms, run
from specbench.records import identity
from specbench.records.blocks import NAME, read_block, trace_path
from specbench.records.rows import Row
from specbench.training.corpus import CorpusSettings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashing, "SETTLED_NS", 0)  # the tests' files are younger than any user's
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch):
    """The files read for their digest, as they are."""
    found = []
    monkeypatch.setattr(hashing, "sha256_of", lambda path: (found.append(path.name), sha256_of(path))[1])
    return found


def edit(path, change):
    """Change a safetensors file's tensors in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


# The memory -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_once_and_again_when_it_was_touched(tmp_path, reads):
    path = tmp_path / "file"
    path.write_text("content")
    first = hashing.of_file(path)
    assert hashing.of_file(path) == first == sha256_of(path) and reads == ["file"]
    os.utime(path, ns=(1, 1))
    assert hashing.of_file(path) == first and hashing.of_file(path) == first and reads == ["file"] * 2


def test_a_change_of_the_same_size_and_time_is_seen(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    os.utime(path, ns=(1, 1))
    first = hashing.of_file(path)
    path.write_text("behind")
    os.utime(path, ns=(1, 1))
    assert hashing.of_file(path) == sha256_of(path) != first


def test_what_changed_a_moment_ago_is_not_remembered(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(hashing, "SETTLED_NS", 10**12)
    (tmp_path / "file").write_text("x")
    assert hashing.of_file(tmp_path / "file") == hashing.of_file(tmp_path / "file")
    assert len(reads) == 2


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"state": 1}', b'{"state": "s", "digest": "nonsense"}']
)
def test_a_damaged_memory_is_made_anew(tmp_path, cache, damage, reads):
    (tmp_path / "file").write_text("x")
    first = hashing.of_file(tmp_path / "file")
    (entry,) = (cache / "contents").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage)
    assert hashing.of_file(tmp_path / "file") == first and len(reads) == 2
    assert entry.read_bytes() == whole


def test_processes_side_by_side_and_a_cache_that_cannot_be_written(tmp_path, cache, monkeypatch):
    path = tmp_path / "file"
    path.write_text("x" * 5000)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: hashing.of_file(path), range(32))) == {sha256_of(path)}
    assert len(list((cache / "contents").iterdir())) == 1, "temporary files were left behind"
    (tmp_path / "flat").write_text("no folder")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "flat"))
    assert hashing.of_file(path) == sha256_of(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecBenchError, match="nowhere"):
        hashing.of_file(tmp_path / "nowhere")


# The fingerprint ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_fingerprint_is_alike_in_any_dtype_and_layout(architecture, tmp_path):
    target = tiny(architecture)
    known = target.fingerprint()
    target.model.save_pretrained(tmp_path / "one")
    target.model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert Target.load(tmp_path / "one", dtype, CPU).fingerprint() == known
    assert Target.load(tmp_path / "many", torch.float32, CPU).fingerprint() == known
    target.model.bfloat16().save_pretrained(tmp_path / "half")
    assert fingerprint_of(tmp_path / "half") == known == target.fingerprint()

    def older(tensors):  # a second copy of tied embeddings, and constants
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit(tmp_path / "one" / "model.safetensors", older)
    assert Target.load(tmp_path / "one", torch.float32, CPU).fingerprint() == known
    torch.save(load_file(tmp_path / "one" / "model.safetensors"), tmp_path / "one" / "pytorch_model.bin")
    (tmp_path / "one" / "model.safetensors").unlink()
    assert Target.load(tmp_path / "one", torch.float32, CPU).fingerprint() == known


def test_every_tensor_counts(tmp_path):
    target = tiny()
    seen = {target.fingerprint()}
    named = dict(target.model.named_parameters())
    for parameter in named.values():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        seen.add(target.fingerprint())
    assert len(seen) == 1 + len(named)


def test_a_folders_tensors_are_hashed_once_wherever_they_lie_now(home, tmp_path, monkeypatch):
    calls = []
    whole = pretrained.fingerprint
    monkeypatch.setattr(pretrained, "fingerprint", lambda tensors: (calls.append(1), whole(tensors))[1])
    target = Target.load(home / "model", torch.float32, CPU)
    known = target.fingerprint()
    target.model.to("meta")  # as under a device map that leaves layers on disk
    shutil.copytree(home / "model", tmp_path / "copy")
    assert target.fingerprint() == known == Target.load(tmp_path / "copy", torch.float32, CPU).fingerprint()
    assert len(calls) == 1


def test_a_target_without_weights_is_its_shape():
    def shaped(layers, seed, dtype=torch.float32):
        torch.manual_seed(seed)
        config = tiny().config
        config.num_hidden_layers = layers
        return Target.random(config, dtype, CPU).fingerprint()

    assert shaped(2, 0) == shaped(2, 1) == shaped(2, 1, torch.bfloat16) != shaped(3, 0)


def test_shipped_weights_and_corpus_name_one_fingerprint():
    """That it is the default target's is tested where that target is read (`test_real`). Medusa-2 has an adapted one."""
    folder = ROOT / "drafters" / "weights" / "smollm2-135m"
    corpus = json.loads((folder / PACKED_PROVENANCE).read_text())
    known = [json.loads(p.read_text()) for p in folder.rglob("provenance.json")]
    fingerprints = {one.get("original_fingerprint", one["target_fingerprint"]) for one in known}
    assert fingerprints == {corpus["target_fingerprint"]}
    assert CorpusSettings(**corpus["settings"]).digest(corpus["target_fingerprint"]) == corpus["corpus"]


# The cell -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(home, tmp_path):
    """A copy of the home folder to change, and a draft model in it."""
    for name in ("model", "weights"):
        shutil.copytree(home / name, tmp_path / name)
    shutil.copytree(home / "model", tmp_path / "draft")
    shutil.copy(home / "mtbench.jsonl", tmp_path)
    return tmp_path


def decode(own, drafter, *overrides):
    """Run one cell in this process; the folders of all cells so far."""
    common = [f"model.path={own / 'model'}", "model.name=tiny", "model.wheel=null", "model.dtype=float32", "show=false"]
    common += [
        f"results={own / 'results'}",
        f"data.root={own}",
        "data.limit=1",
        "decode.max_new_tokens=3",
        "trace=0",
        "memory=0",
    ]
    torch_threads = torch.get_num_threads()
    config = configuration(drafter, "dataset=mtbench", *common, f"threads={torch_threads}", *overrides)
    run.decode([run_spec.from_config(config)], arms.Reused())
    return sorted((own / "results").rglob(NAME), key=lambda path: path.stat().st_mtime_ns)


def contents_in(path):
    """What a header says of the contents of target and drafter."""
    header, _ = read_block(path)
    own = [arm["contents"] for name, arm in header["arms"].items() if name != "none"]
    return {"target": header["target"]["contents"], "drafter": own[0] if own else {}}


def names_of_rows(path):
    """What names the rows of a block: its cell, its arms, and the questions' texts."""
    header, records = read_block(path)
    arms = {label: identity.arm_key(arm) for label, arm in header["arms"].items()}
    return {(identity.cell_key(header), arms[r.drafter], r.text, r.turn) for r in records if isinstance(r, Row)}


def later_layer(path):
    edit(path, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].add_(0.25))


def prompt_text(own):
    path = own / "mtbench.jsonl"
    path.write_text(path.read_text().replace("w0 w3", "w0 w5"))


def chat_format(own):
    (own / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}w7")


def tokenizer(own):
    """The same chat format, whose probe has none of these words."""
    path = own / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace('"w3"', '"w99"'))


def configuration_value(own):
    path = own / "model" / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))


def other_template(own):
    folder = own / "model" / "additional_chat_templates"
    folder.mkdir()
    (folder / "default.jinja").write_text("{% for m in messages %}{% if 'w3' in m.content %}w7{% endif %}{% endfor %}")


def drafter_tensor(own):
    folder = own / "weights" / "eagle2"
    edit(folder / "model.safetensors", lambda tensors: tensors["fc.weight"].mul_(-1))
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["sha256"] = sha256_of(folder / "model.safetensors")
    (folder / "provenance.json").write_text(json.dumps(provenance))


CHANGES = {
    "prompts": ("none", (), prompt_text),
    "chat format": ("none", (), chat_format),
    "tokenizer": ("none", (), tokenizer),
    "configuration": ("none", (), configuration_value),
    "additional template": ("none", (), other_template),
    "drafter's weights": ("eagle2", ("drafter.weights={own}/weights/eagle2",), drafter_tensor),
    "draft model": ("vanilla", ("drafter.path={own}/draft",), lambda own: later_layer(own / "draft" / "model.safetensors")),
    "checkpoint": ("vanilla", ("checkpoint={own}/draft",), lambda own: later_layer(own / "draft" / "model.safetensors")),
    "target": ("none", (), lambda own: later_layer(own / "model" / "model.safetensors")),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_content_is_another_cell_and_unchanged_content_none(kind, own, reads, capsys):
    drafter, overrides, change = CHANGES[kind]
    overrides = [o.format(own=own) for o in overrides]
    (first,) = decode(own, drafter, *overrides)
    seen = len(reads)
    assert seen and decode(own, drafter, *overrides) == [first] and len(reads) == seen, "read again"
    for path in own.rglob("*.safetensors"):
        path.touch()
    assert decode(own, drafter, *overrides) == [first], "touched is not changed"
    rows = first.read_bytes()
    change(own)
    both = decode(own, drafter, *overrides)
    assert len(both) == 2 and first.read_bytes() == rows
    before, after = map(names_of_rows, both)
    assert after - before, "rows of other content have the same names"


def test_the_header_holds_what_sha256sum_says(own, capsys):
    (path,) = decode(own, "eagle2", f"drafter.weights={own / 'weights' / 'eagle2'}")
    contents = contents_in(path)
    assert contents["target"] == contents_of(own / "model") and "tokenizer.json" in contents["target"]
    assert contents["target"]["model.safetensors"] == sha256_of(own / "model" / "model.safetensors")
    assert contents["drafter"]["model.safetensors"] == sha256_of(own / "weights" / "eagle2" / "model.safetensors")
    (question,) = PromptSet("mtbench", root=str(own), limit=1).load()
    assert {r.text for r in read_block(path)[1] if isinstance(r, Row)} == {question.digest}


def test_a_router_says_what_its_base_was_read_from(own):
    target = Target.load(own / "model", torch.float32, CPU)
    config = configuration("eagle2_router", "drafter.weights=null", f"drafter.base.weights={own / 'weights' / 'eagle2'}")
    made = instantiate(config.drafter)
    made.bind(target)
    assert made.contents["base/model.safetensors"] == sha256_of(own / "weights" / "eagle2" / "model.safetensors")


# Prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"question_id": 1}, {"question_id": 2}, {"question_id": "1"}], "records 1 and 3: both have question_id 1"),
        ([{"task_id": "a"}, {"task_id": "a"}], "records 1 and 2"),
        ([{"question_id": 1}, {}], "records 1 and 2"),
        ([{"question_id": [1]}], r"record 1: `question_id` is \[1\]"),
        ([{"question_id": True}], "record 1: `question_id` is True"),
        ([{"category": 5}], "record 1: `category` is 5"),
        ([{"turns": {"a": 1}}], "record 1: `turns`"),
    ],
)
def test_prompts_that_cannot_be_told_apart_or_are_odd_are_refused(records, words, tmp_path):
    lines = [json.dumps({"turns": [f"tell me of {n}"]} | r) + "\n" for n, r in enumerate(records)]
    (tmp_path / "toy.jsonl").write_text("".join(lines))
    with pytest.raises(SpecBenchError, match=words) as error:
        PromptSet("toy", root=str(tmp_path), limit=1).load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("entries", [1, 3, 33, 500])
def test_headers_keep_the_learning_curve_of_a_training(entries):
    history = [
        {
            "step": i,
            "tokens": 9 * i,
            "chain_tau": 1.5,
            "tree_tau": 1.9,
            "n_alpha": [0.4],
            "alpha0_top4": 0.5,
            "alpha0_top10": 0.6,
            "loss": 5.0,
            "classification": 2.0,
            "regression": 0.3,
            "agreement": 0.4,
        }
        for i in range(1, entries + 1)
    ]
    kept = arms._provenance({"history": history, "recipe": {}})["history"]
    assert kept[-1] == history[-1] and len(kept) <= arms.CURVE_POINTS + 1
    assert len(kept) == entries or entries > arms.CURVE_POINTS
    assert all(point.keys() == set(arms.CURVE) for point in kept[:-1])


def test_traces_are_of_the_arm_as_it_is(own):
    weights = own / "weights" / "eagle2"

    def traces():
        cells = decode(own, "eagle2", f"drafter.weights={weights}", "trace=1")
        path = trace_path(cells[-1].parent, "eagle2")
        return path.stat().st_mtime_ns, json.loads(path.read_text())[0]["arm"]

    first = traces()
    assert traces() == first, "decoded again for nothing"
    edit(weights / "model.safetensors", lambda tensors: tensors["fc.weight"].add_(0.01))
    provenance = json.loads((weights / "provenance.json").read_text())
    sha256 = sha256_of(weights / "model.safetensors")
    (weights / "provenance.json").write_text(json.dumps(provenance | {"sha256": sha256}))
    assert traces()[1] != first[1]
