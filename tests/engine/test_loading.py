"""What others wrote is read as data, whole and finite, or refused in one line that names the file."""

import builtins
import inspect
import json
import lzma
import pickle
import shutil
import sys
from contextlib import suppress

import pytest
import torch
from battery import counting
from conftest import configuration, make, tiny
from corpora import trainer
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import modeling_gguf_pytorch_utils as gguf_reader

from drafters.vanilla import Vanilla
from specbench.common.errors import SpecBenchError, format_exception, refusing
from specbench.common.storage import sha256_of
from specbench.data.chat import Chat
from specbench.data.conversations import Conversations
from specbench.data.corpus_file import PACKED, PACKED_PROVENANCE, Dialogue, unpack
from specbench.data.prompts import read_jsonl
from specbench.engine import checkpoints, loading, pretrained, weights
from specbench.engine.backends import packed_linear
from specbench.engine.loading import ModelSpec
from specbench.engine.policies import Chain
from specbench.engine.pretrained import config_of, read_gguf, read_tokenizer
from specbench.engine.target import Target
from specbench.training.corpus import CorpusSettings, CorpusText
from specbench.training.corpus_reader import CorpusReader, held_out
from specbench.training.shards import Sequence, save_shard

CPU = torch.device("cpu")
ASKED = [{"role": "user", "content": "w1"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(home, tmp_path):
    """A model's folder to spoil."""
    return shutil.copytree(home / "model", tmp_path / "model")


def refused(call, *words):
    """One line that names all this."""
    with counting(words):
        with pytest.raises(SpecBenchError) as error:
            call()
        message = str(error.value)
        assert "\n" not in message and len(message) < 900, message
        for word in words:
            assert str(word) in message, message


def load(folder, **options):
    return ModelSpec("tiny", path=str(folder), device="cpu", dtype="float32", **options).load()


def said_in(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def edit(path, change):
    """Change the tensors of a safetensors file in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def set_nan(tensors, name):
    tensors[name].view(-1)[3] = torch.nan


def cut(path, count=50):
    path.write_bytes(path.read_bytes()[:-count])


def flip(path):
    """Other bytes where the file says how long its header is."""
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


DAMAGE = {
    "cut off": cut,
    "header": flip,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello, these are no weights at all"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}

# Code -----------------------------------------------------------------------------------------------------------------


def plant(folder, marker, kind):
    """Code beside a model, which its files ask to run."""
    (folder / "evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M, PreTrainedTokenizerFast as T\n"
    )
    models = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    if kind == "unknown type":
        said_in(folder / "config.json", auto_map=models, model_type="evil")
    elif kind == "known type":
        said_in(folder / "config.json", auto_map=models)
    elif kind == "tokenizer":
        said_in(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T")
    elif kind == "generation":
        (folder / "custom_generate").mkdir()
        shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")


USES = {
    "target": lambda folder, target: load(folder),
    "random target": lambda folder, target: load(folder, weights="random"),
    "draft model": lambda folder, target: Vanilla("vanilla", Chain(3), path=str(folder)).bind(target),
    "checkpoint": lambda folder, target: adopt("vanilla", folder, target),
}


def adopt(drafter, folder, target):
    made = instantiate(configuration(drafter).drafter)
    made.checkpoint = checkpoints.read(str(folder))
    made.bind(target)
    return made


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["unknown type", "known type", "tokenizer", "generation"])
def test_code_beside_a_model_never_runs(kind, use, model, tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr(sys, "path", [*sys.path])
    target = tiny()
    plant(model, tmp_path / "marker", kind)
    with suppress(SpecBenchError):  # refused, or read without it
        USES[use](model, target)
    assert not (tmp_path / "marker").exists()


def test_a_pickle_with_code_is_not_opened(model, tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "marker"), "w")

    (model / "model.safetensors").unlink()
    with (model / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"model.norm.weight": Evil()}, file, protocol=2)
    refused(lambda: load(model), "pytorch_model.bin", "holds code")
    refused(lambda: checkpoints.read(str(model)), "pytorch_model.bin", "holds code")
    assert not (tmp_path / "marker").exists()


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_model_file_is_named(kind, model):
    DAMAGE[kind](model / "model.safetensors")
    refused(lambda: load(model), model, "no weights" if kind == "folder" else "model.safetensors")


def drop(part):
    def change(tensors):
        for name in [n for n in tensors if part in n]:
            del tensors[name]

    return change


SPOILT = {
    "a dropped layer": (drop("layers.2."), {}, "lacks tensors", "model.layers.2.input_layernorm.weight", "5 more"),
    "a dropped head": (drop("lm_head"), {}, "lacks tensors", "lm_head.weight"),
    "more layers asked for": (lambda t: None, {"num_hidden_layers": 5}, "lacks tensors", "model.layers.3."),
    "fewer layers asked for": (lambda t: None, {"num_hidden_layers": 2}, "no place for", "model.layers.2."),
    "a bias asked for": (lambda t: None, {"attention_bias": True}, "lacks tensors", "k_proj.bias"),
    "a tensor left over": (lambda t: t.update({"model.layers.0.extra": torch.ones(2)}), {}, "no place for", "0.extra"),
    "a wrong shape": (lambda t: t.update({"model.norm.weight": torch.ones(31)}), {}, "model.norm.weight is [31], not [32]"),
    "fewer key heads asked for": (lambda t: None, {"num_key_value_heads": 1}, "is [16, 32], not [8, 32]"),
    "another vocabulary": (lambda t: None, {"vocab_size": 60}, "is [61, 32], not [60, 32]"),
    "a NaN": (lambda t: set_nan(t, "model.layers.1.mlp.up_proj.weight"), {}, "NaN", "layers.1.mlp.up_proj.weight"),
    "infinity": (lambda t: t["lm_head.weight"][5, 5:].fill_(-torch.inf), {}, "infinity", "lm_head.weight"),
}


@pytest.mark.parametrize(
    ("kind", "use"), [*((kind, "target") for kind in SPOILT), ("a dropped layer", "draft model"), ("a NaN", "draft model")]
)
def test_a_model_is_taken_whole_or_not_at_all(kind, use, model):
    change, values, *words = SPOILT[kind]
    edit(model / "model.safetensors", change)
    said_in(model / "config.json", **values)
    refused(lambda: USES[use](model, tiny()), model / "model.safetensors", *words)


def test_large_numbers_whose_sum_overflows_are_numbers(model):
    edit(model / "model.safetensors", lambda t: t["model.layers.0.mlp.up_proj.weight"].fill_(3e38))
    with pytest.raises(SpecBenchError, match="logits that are no numbers"):  # what they lead to is another matter
        load(model)


def test_what_can_be_computed_may_be_left_over_and_tied_heads_may_be_missing(model, tmp_path):
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit(model / "model.safetensors", lambda t: t.update(constant))
    load(model)
    tiny("qwen2").model.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    Target.load(tmp_path / "tied", torch.float32, CPU)


def test_a_missing_or_damaged_part_of_several_is_named(tmp_path):
    tiny().model.save_pretrained(tmp_path, max_shard_size="10KB")
    parts = sorted(tmp_path.glob("*.safetensors"))
    cut(parts[1])
    refused(lambda: Target.load(tmp_path, torch.float32, CPU), parts[1])
    parts[1].unlink()
    refused(lambda: Target.load(tmp_path, torch.float32, CPU), parts[1].name, "is missing")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": 5}}')
    refused(lambda: Target.load(tmp_path, torch.float32, CPU), index, "weight_map.a")


BAD = [
    {"num_hidden_layers": "3"},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": -1},
    {"num_attention_heads": 0},
    {"num_attention_heads": 5},
    {"num_key_value_heads": 0},
    {"num_key_value_heads": 3},
    {"hidden_size": -32},
    {"hidden_size": None},
    {"vocab_size": -1},
    {"vocab_size": "many"},
    {"head_dim": 0},
    {"model_type": "nonsense"},
    {"model_type": 5},
    {"model_type": None},
    {"rms_norm_eps": "x"},
    {"rope_parameters": "x"},
    {"rope_parameters": {"rope_theta": "a", "rope_type": "weird"}},
    {"rope_parameters": {"rope_theta": -1.0, "rope_type": "default"}},
    {"hidden_act": "nope"},
    {"max_position_embeddings": 0},
    {"max_position_embeddings": "x"},
    {"eos_token_id": "x"},
    {"dtype": "nonsense"},
    {"quantization_config": 3},
    {"auto_map": 3},
    {"tie_word_embeddings": "yes"},
    {"num_hidden_layers": 10_000_000},
    {"num_hidden_layers": 10**15},
    {"num_key_value_heads": 10**9},
    {"hidden_size": 10**12},
    {"vocab_size": 10**18},
    {"head_dim": 10**11},
    {"max_position_embeddings": 10**20},
    {"transformers_weights": "other.safetensors"},
    {"rope_parameters": {"rope_theta": 1.0, "rope_type": "default", "transformers_weights": "x"}},
    {"configuration_files": ["config.4.0.0.json"]},
]


@pytest.mark.parametrize("values", BAD, ids=str)
def test_a_value_that_no_model_can_have_is_one_line(values, model):
    said_in(model / "config.json", **values)
    refused(lambda: load(model), "config.json")


@pytest.mark.parametrize("values", BAD[:15], ids=str)
def test_so_it_is_of_a_target_without_weights(values, model):
    said_in(model / "config.json", **values)
    refused(lambda: load(model, weights="random"), "config")
    shape = json.loads((model / "config.json").read_text())
    refused(lambda: Target.random(config_of(shape, "model.shape"), torch.float32, CPU), "config")


REDIRECTED = {
    "tokenizer_config.json": {"fast_tokenizer_files": ["sub/tokenizer.4.0.json"]},
    "adapter_config.json": {"base_model_name_or_path": "elsewhere"},
}


@pytest.mark.parametrize("name", REDIRECTED)
def test_a_folder_that_sends_its_reader_to_other_files_is_refused(name, model):
    said_in(model / name, **REDIRECTED[name])
    refused(lambda: load(model), model / name, "remove")


def test_files_in_folders_below_are_named_by_their_path(model):
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "default.jinja").write_text("w7 {{ messages[0].content }}")
    target, chat = load(model)
    assert chat.encode(ASKED) == chat.tokenizer("w7 w1")["input_ids"]
    assert "additional_chat_templates/default.jinja" in target.contents()


WORDS = {"cut off": b"{", "empty": b"", "list": b"[]", "not UTF-8": b'{"a": "\xff\xfe"}', "text": b"hello"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", WORDS)
def test_a_damaged_file_of_text_is_named(name, kind, model):
    (model / name).write_bytes(WORDS[kind])
    refused(lambda: load(model), model / name)


def test_odd_stop_tokens_and_tokenizers_that_lack_their_parts_are_named(model, tmp_path):
    shutil.copytree(model, tmp_path / "stop")
    said_in(tmp_path / "stop" / "generation_config.json", eos_token_id=["</s>"])
    refused(lambda: load(tmp_path / "stop"), "eos_token_id")
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["w9"] = 400  # few ids, one of them beyond the embedding
    (model / "tokenizer.json").write_text(json.dumps(content))
    refused(lambda: load(model), model, "401 ids")
    content["model"] |= {"vocab": {}, "unk_token": ""}
    (model / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []}))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    refused(lambda: load(model), model, "has no tokens")
    (model / "tokenizer.json").write_text("{}")
    refused(lambda: load(model), "tokenizer", model)
    (model / "tokenizer.json").unlink()
    refused(lambda: load(model), "tokenizer", model)
    refused(lambda: Target.load(tmp_path / "nowhere", torch.float32, CPU), tmp_path / "nowhere")


@pytest.mark.parametrize(
    "template", ["{% for m in", "{{ raise_exception('no system') }}", "{{ messages[7].content.x }}", b"\xff"]
)
def test_a_broken_chat_template_is_one_line(template, model):
    (model / "chat_template.jinja").write_bytes(template if isinstance(template, bytes) else template.encode())

    def ask():
        _, chat = load(model)
        chat.encode([{"role": "user", "content": "w1"}])

    refused(ask, "template", model)


def encoded(model, template):
    (model / "chat_template.jinja").write_text(template)
    return load(model)[1].encode(ASKED)


def test_a_template_renders_the_same_on_every_day(model):
    assert encoded(model, "{% if strftime_now('%d %b %Y') == '26 Jul 2024' %}w9{% endif %}") == [11]


@pytest.mark.parametrize("template", ["{{ ['w1', 'w2'] | random }}", "{{ lipsum() }}"])
def test_a_template_that_draws_is_refused(template, model):
    refused(lambda: encoded(model, template), "chat template", model)


def test_a_prompt_that_a_template_makes_too_long_is_refused(model):
    refused(lambda: encoded(model, "{{ 'w1 ' * 4000000 }}"), "12,000,000 characters")


@pytest.mark.parametrize("offline", [False, True])
def test_a_converted_model_does_not_depend_on_the_environment(offline, model, tmp_path, monkeypatch):
    def read(_):
        tokenizer = read_tokenizer(model)
        tokenizer.init_kwargs["local_files_only"] = offline  # as Transformers notes the environment's HF_HUB_OFFLINE
        return pretrained.read_model(model, torch.float32), tokenizer

    monkeypatch.setattr(loading, "read_gguf", read)
    loading._convert_gguf(tmp_path / "small.gguf", tmp_path / "made")
    assert json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())["local_files_only"] is False
    load(tmp_path / "made")


def test_any_of_several_processes_converts_a_model_whole(model, tmp_path, monkeypatch):
    read = pretrained.read_model(model, torch.float32), read_tokenizer(model)
    monkeypatch.setattr(loading, "read_gguf", lambda _: read)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        loading._convert_gguf(tmp_path / "small.gguf", tmp_path / "made")
    finally:
        torch.distributed.destroy_process_group()
    assert (tmp_path / "made" / "config.json").is_file()
    assert (tmp_path / "made" / "model.safetensors").is_file()


def test_a_damaged_gguf_is_named(tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    refused(lambda: read_gguf(tmp_path / "small.gguf"), tmp_path / "small.gguf")


def test_reading_a_gguf_draws_no_bar_into_a_log(tmp_path, monkeypatch, capsys):
    drawn = gguf_reader.tqdm

    def reads(*_, **__):
        list(gguf_reader.tqdm(range(3), desc="Converting"))
        raise ValueError("no more")

    monkeypatch.setattr(pretrained.MODELS, "from_pretrained", reads)
    refused(lambda: read_gguf(tmp_path / "small.gguf"), tmp_path / "small.gguf")
    assert "Converting" not in capsys.readouterr().err and gguf_reader.tqdm is drawn
    source = inspect.getsource(gguf_reader.load_gguf_checkpoint)
    assert " tqdm(" in source, "its bar is no longer drawn by that name"


ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)
FULL = [
    torch.OutOfMemoryError("full"),
    MemoryError(),
    RuntimeError(ALLOCATOR),
    RuntimeError("std::bad_alloc"),
    OSError(12, "Cannot allocate memory"),
]


@pytest.mark.parametrize("error", FULL, ids=repr)
def test_a_full_memory_is_neither_a_damaged_file_nor_a_fault(error):
    with pytest.raises(type(error)), refusing("damaged"):
        raise error
    assert format_exception(error).startswith("out of memory")


def test_what_torchs_allocator_refuses_is_out_of_memory():
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 55)
    assert format_exception(error.value).startswith("out of memory")


# Drafters -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(home, tmp_path):
    """A drafter's weights to spoil, without the SHA-256 that would refuse them all."""
    folder = shutil.copytree(home / "weights" / "eagle2", tmp_path / "eagle2")
    provenance = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({k: v for k, v in provenance.items() if k != "sha256"}))
    return folder


def into_eagle(folder):
    target = tiny()
    return lambda: weights.load(make("eagle2", target), folder, target.fingerprint())


@pytest.mark.parametrize("kind", [*DAMAGE, "NaN", "whole numbers"])
def test_damaged_weights_of_a_drafter_are_named(kind, own):
    path = own / "model.safetensors"
    if kind == "NaN":
        edit(path, lambda t: set_nan(t, "fc.weight"))
    elif kind == "whole numbers":
        edit(path, lambda t: t.update({"fc.weight": t["fc.weight"].int()}))
    else:
        DAMAGE[kind](path)
    refused(into_eagle(own), path, "fc.weight" if kind in ("NaN", "whole numbers") else "")


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{", b"\xff", b'{"target_fingerprint": 5}', b'{"target": []}', b'{"calibration": "x"}', b'{"history": 3}'],
)
def test_an_odd_provenance_is_named(content, own):
    (own / "provenance.json").write_bytes(content)
    refused(into_eagle(own), own / "provenance.json")


SPOILT_HEADS = [*(k for k in DAMAGE if k != "folder"), "NaN", "whole numbers", "twice"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("model.safetensors", "pytorch_model.bin") for kind in SPOILT_HEADS]
    + [("pytorch_model.bin", "list")],
)
def test_a_damaged_checkpoint_is_named(name, kind, tmp_path):
    target = tiny()
    tensors = {n: t.clone() for n, t in weights.trained(make("eagle2", target)).items()}
    tensors = {n.replace("layer.", "layers.0."): t for n, t in tensors.items()}
    path = tmp_path / name
    if kind == "NaN":
        set_nan(tensors, "fc.weight")
    if kind == "whole numbers":
        tensors["fc.weight"] = tensors["fc.weight"].int()
    if path.suffix == ".bin":
        torch.save(list(tensors) if kind == "list" else tensors, path)
    else:
        save_file(tensors, path)
    if kind == "twice":
        shutil.copy(path, tmp_path / f"zz-{name}".replace("zz-pytorch_model", "pytorch_model-2"))
    elif kind in DAMAGE:
        DAMAGE[kind](path)
    refused(
        lambda: adopt("eagle2", tmp_path, target), tmp_path, name.split(".")[0] if kind != "whole numbers" else "fc.weight"
    )


ODD = [{"num_attention_heads": "x"}, {"num_attention_heads": 10**9}, {"num_attention_heads": -4}, {"rope_scaling": 5}, None]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_an_odd_configuration_of_a_checkpoint_is_one_line(odd, tmp_path):
    target = tiny()
    d, kv = 32, 16
    attention = {"q_proj.weight": (d, d), "k_proj.weight": (kv, d), "v_proj.weight": (kv, d), "o_proj.weight": (d, d)}
    tensors = {"Ekv2E.weight": torch.zeros(d, 2 * kv)}
    for part in ("layer_self_attention", "self_attention", "cross_attention"):
        tensors |= {f"{part}.self_attn.{n}": torch.zeros(shape) for n, shape in attention.items()}
        tensors[f"{part}.mlp.gate_proj.weight"] = torch.zeros(48, d)
    save_file(tensors, tmp_path / "model.safetensors")
    config = [] if odd is None else {"num_attention_heads": 4, "rope_theta": 1e4} | odd
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(lambda: adopt("moa", tmp_path, target), tmp_path)


def test_a_draft_model_that_is_nowhere(tmp_path, monkeypatch):
    for place in (str(tmp_path / "nowhere"), "../elsewhere/model"):
        refused(lambda place=place: Vanilla("vanilla", Chain(3), path=place).bind(tiny()), f"drafter.path={place}")


# Training -------------------------------------------------------------------------------------------------------------


def shard(folder, name="shard-00000"):
    sequences = [Sequence(i, torch.arange(9), torch.arange(9) > 4, torch.randn(9, 4)) for i in range(3)]
    save_shard(folder / f"{name}.safetensors", sequences)
    return folder / f"{name}.safetensors"


def epoch(folder):
    corpus = CorpusReader(folder, 2, False, 0)
    return [corpus.load(rows, CPU, torch.float32) for rows in corpus.batches(0)]


TORN = {
    "lengths": lambda t: t.update(answer=t["answer"][:-1]),
    "starts": lambda t: t.update(starts=t["starts"].flip(0)),
    "lacking": lambda t: t.pop("starts"),
    "no answer": lambda t: t.pop("answer"),
}


@pytest.mark.parametrize("kind", [*(k for k in DAMAGE if k != "folder"), *TORN])
def test_a_damaged_shard_is_named_with_its_mend(kind, tmp_path):
    for path, read in ((shard(tmp_path), epoch), (shard(tmp_path, "validation"), lambda folder: held_out(folder, 2))):
        read(tmp_path)
        if kind in TORN:
            edit(path, TORN[kind])
        else:
            DAMAGE[kind](path)
        refused(lambda read=read: read(tmp_path), path, "remove it")


def writer(home, root, packed):
    target, chat = load(home / "model")
    settings = CorpusSettings(validation=4, answer_tokens=8, text_tokens=32, tokens=50, turns=1)
    return CorpusText(settings, target, chat, Conversations(str(home / "talk.json")).load, root, packed)


def pack(made):
    """A packed corpus that this writer would take over."""
    made.folder.mkdir(parents=True)
    line = json.dumps({"index": 1, "tokens": [3, 4, 5], "spans": [[1, 3]]})
    (made.folder / "answers-0.jsonl").write_text(line + '\n{"index": 2, "tok\n' + line.replace("1,", "7,", 1) + "\n")
    made.pack(made.packed, {})
    shutil.rmtree(made.folder)


def test_a_packed_corpus_is_taken_over_and_a_damaged_one_named(home, tmp_path):
    made = writer(home, tmp_path / "corpora", tmp_path / "packed")
    pack(made)
    made.prepare()
    assert made.texts() == [Dialogue(1, [3, 4, 5], [(1, 3)]), Dialogue(7, [3, 4, 5], [(1, 3)])]
    file, provenance = made.packed / PACKED, made.packed / PACKED_PROVENANCE
    whole, words = file.read_bytes(), json.loads(provenance.read_text())
    for damaged in (whole[:-9], b"", b"hello", lzma.compress(b"no tensors")):
        file.write_bytes(damaged)
        refused(lambda: unpack(file), file)
        shutil.rmtree(made.folder)
        refused(made.prepare, file, "SHA-256")
        provenance.write_text(json.dumps(words | {"sha256": sha256_of(file)}))
        refused(made.prepare, file, "damaged")
        provenance.write_text(json.dumps(words))
    for odd in ({"corpus": 5}, {"sha256": None}):
        provenance.write_text(json.dumps(words | odd))
        refused(made.prepare, provenance, next(iter(odd)))
    for text in (b"{", b"[]", b"\xff"):
        provenance.write_bytes(text)
        refused(made.prepare, provenance)


@pytest.mark.parametrize(
    "line", ['{"index": "x", "tokens": [], "spans": []}', '{"index": 1}', '{"index": -1, "tokens": [], "spans": []}']
)
def test_an_odd_line_of_answers_is_named(line, home, tmp_path):
    made = writer(home, tmp_path / "corpora", None)
    made.prepare()
    (made.folder / "answers-0.jsonl").write_text('{"index": 1, "tok\n' + line + "\n")
    refused(made.written, made.folder / "answers-0.jsonl", "line 2")


@pytest.mark.parametrize("kind", [*DAMAGE, "list", "lacking", "another shape"])
def test_a_damaged_checkpoint_of_a_training_is_named_with_its_mend(kind, tmp_path):
    made = trainer(tmp_path)
    made.run()
    path = made.checkpoint
    if kind in DAMAGE:
        DAMAGE[kind](path)
    else:
        state = torch.load(path, weights_only=True)
        if kind == "lacking":
            del state["rng"]
        if kind == "another shape":
            state["parameters"][0] = torch.zeros(3)
        torch.save([1] if kind == "list" else state, path)
    refused(trainer(tmp_path)._resume, path, "remove it")


# Text -----------------------------------------------------------------------------------------------------------------


def test_odd_training_text_is_named_or_passed_over(tmp_path):
    path = tmp_path / "talk.json"
    path.write_text('[{"id": 1}, 5]')
    refused(Conversations(str(path)).load, path, "record 2")
    good = [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]
    odd = [5, {"from": [], "value": "x"}, {"from": "human", "value": 7}, {"from": "human"}]
    path.write_text(json.dumps([{"conversations": [*good, turn]} for turn in odd] + [{"conversations": "x"}]))
    assert [len(chat) for chat in Conversations(str(path)).load()] == [2] * 4


def test_packed_prompts_that_are_cut_off_are_named(tmp_path):
    import gzip

    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"turns": ["a"]}\n' * 50)[:-12])
    refused(lambda: list(read_jsonl(path)), path)
    path.write_bytes(b"no gzip")
    refused(lambda: list(read_jsonl(path)), path)


def test_a_tokenizer_without_a_name_still_has_a_line():
    class Odd:
        chat_template = "x"

        def get_chat_template(self):
            return "x"

        def apply_chat_template(self, *_, **__):
            raise TypeError("two\nlines")

    refused(lambda: Chat(Odd()).encode([{"role": "user", "content": "x"}]), "two lines")


@pytest.mark.parametrize(("options", "takes"), [({}, True), ({"dtype": "bfloat16"}, False), ({"forward": "plain"}, False)])
def test_drafters_get_a_type_of_their_own_beside_a_float32_target_alone(options, takes, model):
    settings = {"dtype": "float32", "draft_dtype": "bfloat16"} | options
    target, _ = ModelSpec("tiny", path=str(model), device="cpu", **settings).load()
    has_it = packed_linear.packable(target.head.weight, torch.bfloat16)
    assert target.draft_dtype == (torch.bfloat16 if takes and has_it else None)
    assert load(model)[0].draft_dtype is None
