"""Targets as configurations name them: prompt formats, stop tokens, what they weigh, and what is said before loading."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from command_line import rows_of, run
from conftest import ROOT, composed, make, tiny
from corpora import Numbers
from fixtures import ledger, settings
from hydra.utils import instantiate
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specbench.common.errors import SpecBenchError
from specbench.data.chat import Chat
from specbench.data.prompts import Question
from specbench.engine.decode import RunSettings
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless
from specbench.evaluation.runner import Bench, BoundDrafter
from specbench.records.blocks import below, read_block
from specbench.records.rows import Failure, Row

MODELS = sorted(p.stem for p in (ROOT / "conf" / "model").glob("*.yaml"))
PAPERS = {"vicuna-7b", "llama2-7b", "llama2-13b", "llama3-8b", "llama3-70b", "mixtral-8x7b"}
PAPERS |= {f"qwen2.5-{size}" for size in ("3b", "7b", "14b")}


def spec(model, *overrides):
    return instantiate(composed("run", f"model={model}", *overrides).model)


def test_every_target_of_the_papers_has_a_configuration():
    assert {*PAPERS, "gemma3-270m", "smollm2-135m"} <= set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_a_target_says_what_it_weighs_and_where_it_comes_from(model):
    found = spec(model)
    assert found.billions is not None or model == "smollm2-135m"
    assert found.hub or found.wheel
    assert found.system is not None or model in ("smollm2-135m", "gemma3-270m", "mixtral-8x7b") or "qwen" in model


@pytest.mark.parametrize("model", sorted(PAPERS))
def test_what_cannot_fit_is_said_before_anything_is_fetched(model, monkeypatch):
    monkeypatch.setattr("specbench.common.environment.free_memory", lambda device, everywhere=False: 10**9)
    monkeypatch.setattr("specbench.engine.loading.model_folder", lambda *a: pytest.fail("fetched"))
    with pytest.raises(SpecBenchError, match=rf"{model} needs about \d+\.\d GB in .* has 1\.0 GB free"):
        spec(model).load()


def test_vicunas_format_is_the_papers(home):
    found = spec("vicuna-7b")
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.chat_template = found.template
    messages = [
        {"role": "system", "content": found.system},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Who?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.removeprefix("None") == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
        "and polite answers to the user's questions. USER: Hello ASSISTANT: Hi</s>USER: Who? ASSISTANT:"
    )


def test_a_template_serves_only_where_the_tokenizer_has_none(home, tmp_path):
    import shutil

    own = tmp_path / "own"
    shutil.copytree(home / "model", own)
    overrides = ("model.wheel=null", "model.dtype=float32", "+model.template=w1", "model.system=null")
    _, chat = spec("smollm2-135m", f"model.path={home / 'model'}", *overrides).load()
    asked = [{"role": "user", "content": "w9"}]
    assert chat.encode(asked) == [Chat(chat.tokenizer).tokenizer.convert_tokens_to_ids("w1")]
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.chat_template = "w2"
    tokenizer.save_pretrained(own)
    _, chat = spec("smollm2-135m", f"model.path={own}", *overrides).load()
    assert chat.encode(asked) == [tokenizer.convert_tokens_to_ids("w2")]


def test_terms_are_named_before_the_weights_are_fetched(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))

    def fetching(*_: object) -> Path:
        assert "Gemma Terms of Use" in capsys.readouterr().err
        raise SpecBenchError("stopped here")

    monkeypatch.setattr("specbench.engine.loading.model_folder", fetching)
    with pytest.raises(SpecBenchError, match="stopped here"):
        spec("gemma3-270m").load()


@pytest.mark.parametrize("model", sorted(PAPERS))
def test_a_benchmark_of_a_papers_target_asks_for_the_heads_it_has(model):
    done = subprocess.run(["make", "-n", "bench", f"MODEL={model}"], cwd=ROOT, capture_output=True, text=True, check=True)
    drafters = re.findall(r"arms=\[(\S+)\]", done.stdout)
    trained = {p.name for p in (ROOT / "drafters" / "weights" / model).glob("*")}
    nothing_needed = ["none", "prompt_lookup", "suffix", "token_recycling"]
    assert drafters == [",".join([*nothing_needed, *sorted(trained | set(spec(model).published or {}))])]


def test_published_heads_are_taken_where_none_were_trained(home):
    """The target stands in for a published draft model of its own: all it drafts is accepted."""
    asked = ("drafter=vanilla", "dataset=mtbench", "data.limit=1")
    assert "no drafter weights" in run(home, "run", *asked, ok=False)
    run(home, "run", *asked, f"+model.published={{vanilla: {home / 'model'}}}")
    header, rows = rows_of(home, "vanilla")
    arm = header["arms"]["vanilla"]
    assert arm["checkpoint"] == arm["weights"]["checkpoint"] == str(home / "model")
    found = [row for row in rows if row.drafter == "vanilla"]
    assert found and all(row.accepted[:-1] == row.drafted[:-1] for row in found)


@pytest.mark.parametrize(("kind", "words"), [("mamba", "attention implementation"), ("gpt2", "no Llama-like decoder")])
def test_a_model_that_cannot_be_driven_is_refused(kind, words, tmp_path):
    small = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "eos_token_id": 1, "bos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small))
    model.save_pretrained(tmp_path)
    with pytest.raises(SpecBenchError, match=words):
        Target.load(tmp_path, torch.float32, torch.device("cpu"))


def test_out_of_memory_in_one_generation_is_a_failed_row_and_the_rest_goes_on(tmp_path, home):
    """The second prompt is too much for the drafter; the baseline's rows and the drafter's others are there."""
    target, chat = spec("smollm2-135m", f"model.path={home / 'model'}", "model.dtype=float32").load()
    baseline, drafter = make("none", target), make("eagle2", target)
    draft, calls = drafter.reset, []

    def reset(capacity):
        calls.append(capacity)
        if len(calls) == 3:  # after the warm-up and the first prompt
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        draft(capacity)

    drafter.reset = reset
    questions = [Question(str(i), "writing", (f"tell me {i}",)) for i in range(3)]
    known = ledger(tmp_path, settings("eagle2"))
    bound_drafters = [BoundDrafter(d.name, d, Lossless()) for d in (baseline, drafter)]
    bench = Bench(target, chat, bound_drafters, Sampler(), RunSettings(max_new_tokens=6))
    bench.run(questions, known)
    _, records = read_block(known.block.path)
    failed = [record for record in records if isinstance(record, Failure)]
    assert [(f.drafter, f.question) for f in failed] == [("eagle2", "1")] and "out of memory" in failed[0].error
    assert sum(isinstance(record, Row) for record in records) == 5
    assert known.failed() == {("eagle2", failed[0].text, 0)}
    bench.run(questions, ledger(tmp_path, settings("eagle2")))
    assert not ledger(tmp_path, settings("eagle2")).failed(), "it was not tried again by the next run"


@pytest.mark.parametrize("replay", [False, True])
def test_no_other_answer_stands_for_that_of_a_baseline_that_failed(tmp_path, replay):
    """Of its first turn nothing else is decoded or replayed, its second is not asked; a later run does both."""
    target = tiny()
    target.stop_ids = ()
    chat = Numbers()
    bound_drafters = [BoundDrafter(d, make(d, target), Lossless()) for d in ("none", "eagle2", "vanilla")]
    bench = Bench(target, chat, bound_drafters, Sampler(), RunSettings(max_new_tokens=6, warmup=0), replay)
    propose, calls = bound_drafters[0].drafter.propose, []

    def fails_first(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return propose(*arguments)

    bound_drafters[0].drafter.propose = fails_first
    questions = [Question(i, "c", (f"3 14 {n}", "9 26")) for n, i in enumerate("ab")]
    known = ledger(tmp_path, settings("eagle2", "vanilla"))
    bench.run(questions, known)
    assert bench.missing(questions, known) == 6
    found = newest(tmp_path)
    first = [found[name, "a", 0] for name in ("none", "eagle2", "vanilla")]
    assert isinstance(first[0], Failure)
    for row in first[1:]:
        assert isinstance(row, Failure) and "baseline failed" in row.error
    assert not any(key[1:] == ("a", 1) for key in found), "the next turn follows an answer that is not there"
    bench.run(questions, ledger(tmp_path, settings("eagle2", "vanilla")))
    found = newest(tmp_path)
    assert all(isinstance(found[c.label, q, turn], Row) for c in bound_drafters for q in "ab" for turn in (0, 1))


def newest(folder):
    """Rows and failures of all blocks of a cell that this process wrote one after the other."""
    blocks = sorted(below(folder), key=lambda path: path.stat().st_mtime_ns)
    records = [record for path in blocks for record in read_block(path)[1]]
    return {record.key: record for record in records if isinstance(record, Row | Failure)}


def test_a_target_under_a_device_map_is_the_same(home):
    plain, _ = spec("smollm2-135m", f"model.path={home / 'model'}", "model.dtype=float32").load()
    spread, _ = spec("smollm2-135m", f"model.path={home / 'model'}", "model.dtype=float32", "model.device_map=auto").load()
    assert plain.greedy((3, 4), 12).tolist() == spread.greedy((3, 4), 12).tolist()


def test_a_cache_keeps_layers_where_they_are():
    """Two devices without two devices: `meta` takes the shapes, the CPU the numbers."""
    import torch

    from specbench.engine.cache import KVCache

    cpu, meta = torch.device("cpu"), torch.device("meta")
    cache = KVCache(3, 8, [cpu, meta, cpu])
    rows = torch.arange(4.0).reshape(1, 1, 4, 1)
    for layer, device in enumerate((cpu, meta, cpu)):
        keys, _ = cache.append(layer, (rows + 10 * layer).to(device), rows.to(device))
        assert keys.device == device and keys.shape == (1, 1, 4, 1)
    cache.keep(torch.tensor([0, 2, 3]))
    assert cache.length == 3
    assert cache.rows(0, 0, 3)[0].flatten().tolist() == [0, 2, 3]
    assert cache.rows(2, 0, 3)[0].flatten().tolist() == [20, 22, 23]
    assert cache.rows(1, 0, 3)[0].device == meta


@pytest.mark.parametrize(
    ("able", "dtype"),
    [({}, "float32"), ({"avx512_bf16": True}, "float32"), ({"avx512_bf16": True, "amx_bf16": True}, "bfloat16")],
)
def test_on_a_processor_bfloat16_is_chosen_only_with_amx(monkeypatch, able, dtype):
    import torch

    from specbench.engine.device import pick_dtype

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    assert pick_dtype("auto", torch.device("cpu")) == getattr(torch, dtype)
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert pick_dtype("auto", torch.device("meta")) == torch.bfloat16
