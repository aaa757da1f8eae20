"""Another engine as a row: what is asked of it, how its answer is timed and held against the baseline's; bad servers."""

import json
import re
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from command_line import call, records_of, run
from conftest import tiny

from drafters.none import NoDrafter
from drafters.served import Served
from specbench.common.errors import SpecBenchError
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.records import blocks
from specbench.records.rows import Row, contradiction
from specbench.records.rows import Served as Answered
from specbench.remote.endpoint import Endpoint
from specbench.reporting import cells, overview

DONE = b"data: [DONE]\n\n"


def event(text="", ids=None, reason=None, **more):
    """One event of a stream, as vLLM and SGLang send it."""
    choice = {"index": 0, "text": text, "finish_reason": reason} | ({} if ids is None else {"token_ids": ids})
    return f"data: {json.dumps({'object': 'text_completion', 'choices': [choice]} | more)}\n\n".encode()


class Stub:
    """A server. stream: makes the pieces of an answer from a request; asked: every request that came.

    key: that it wants. keys: that it got.
    """

    def __init__(self):
        self.asked, self.models = [], [{"id": "tiny", "root": "/models/tiny", "owned_by": "vllm", "created": time.time()}]
        self.status, self.headers, self.body = 200, {}, b""
        self.key, self.keys = None, []
        self.stream = lambda request: iter(())


@contextmanager
def serving(stub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def welcome(self):
            key = self.headers["Authorization"]
            stub.keys.append(key)
            if stub.key is not None and key != f"Bearer {stub.key}":
                self.send(401 if key is None else 403, json.dumps({"error": f"Incorrect key: {key}"}).encode())
                return False
            return True

        def do_GET(self):
            if not self.welcome():
                return
            self.send(200 if stub.models is not None else 404, json.dumps({"data": stub.models}).encode())

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.welcome():
                return None
            stub.asked.append(request)
            if stub.status != 200:
                return self.send(stub.status, stub.body, **stub.headers)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for piece in stub.stream(request):
                    if piece is None:  # the server dies
                        self.close_connection = True
                        return self.connection.shutdown(socket.SHUT_RDWR)
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                pass  # the client had enough

        def send(self, status, body, **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def stub():
    return Stub()


@pytest.fixture
def url(stub):
    with serving(stub) as address:
        yield address


def faithful(target, words=None, spoilt=None):
    """A stream of the target's own greedy answer, three tokens an event. words: text alone. spoilt: change this token."""
    drafter = NoDrafter()
    drafter.bind(target)

    def stream(request):
        limits = Limits(request["max_tokens"], tuple(request["stop_token_ids"]))
        ids = []
        for part in decode(target, drafter, request["prompt"], limits, Lossless(), Sampler()):
            ids += [part.token] if isinstance(part, Prefill) else part.tokens
        if spoilt is not None and len(ids) > spoilt:
            ids[spoilt] = 5 if ids[spoilt] != 5 else 6
        for i in range(0, len(ids), 3):
            text = " ".join(words[t] for t in ids[i : i + 3] if t != 1) + " " if words else "x"
            yield event(text, None if words else ids[i : i + 3])
        yield event("", [] if words is None else None, "stop" if ids[-1] == 1 else "length")
        yield DONE

    return stream


# The client -----------------------------------------------------------------------------------------------------------


def test_an_answer_is_what_was_streamed_with_its_times(stub, url):
    def stream(_):
        time.sleep(0.05)
        yield b": waiting\n\n" + event("a", [3])[:20]  # an event in two pieces
        yield event("a", [3])[20:] + event(" b c", [4, 5])
        time.sleep(0.05)
        yield event("", [1], "stop") + event("", usage={"completion_tokens": 4}) + DONE

    stub.stream = stream
    answer = Endpoint(url, 5.0).complete({"max_tokens": 9})
    assert (answer.ids, answer.text, answer.reason) == ([3, 4, 5, 1], "a b c", "stop")
    assert answer.first_s >= 0.05 and 0.04 <= answer.decode_s < 3
    assert stub.asked == [{"max_tokens": 9, "stream": True}]


def test_a_server_that_says_no_ids_has_a_text(stub, url):
    stub.stream = lambda _: iter([event("a"), event(" b", reason="length"), DONE])
    answer = Endpoint(f"{url}/v1/", 5.0).complete({"max_tokens": 2})
    assert answer.ids is None and answer.text == "a b"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://u:p@x", "http://x:99999", "http://x/?a=b", "http://[x", "file:///etc"],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(SpecBenchError, match=r"must be http://HOST:PORT"):
        Endpoint(address, 1.0)


def endless(_):
    while True:
        yield event("a", [3])


def empty_forever(_):
    while True:
        yield event("")
        time.sleep(0.01)


def one_line_forever(_):
    while True:
        yield b"data: " + b"a" * (1 << 18)


def silent(_):
    yield event("a", [3])
    time.sleep(1.5)


BAD_STREAMS = {
    "cut off": (lambda _: iter([event("a", [3])]), "its stream was cut off"),
    "dead": (lambda _: iter([event("a", [3]), None]), "cut off or is no HTTP"),
    "dead at once": (lambda _: iter([None]), "cut off or is no HTTP"),
    "no JSON": (lambda _: iter([b"data: {nonsense\x1b[2J\n\n"]), r"no JSON object: {nonsense\x1b[2J"),
    "no object": (lambda _: iter([b"data: [1]\n\n"]), "no JSON object: [1]"),
    "no completion": (lambda _: iter([b'data: {"choices": [{"text": 3}]}\n\n']), "what is no completion"),
    "no list": (lambda _: iter([b'data: {"choices": 3}\n\n']), "what is no completion"),
    "odd ids": (lambda _: iter([event("a", [-1])]), "what is no completion"),
    "an error": (lambda _: iter([b'data: {"error": {"message": "out of\\nmemory"}}\n\n']), "it failed: out of memory"),
    "no token": (lambda _: iter([event(reason="stop"), DONE]), "it answered without a token"),
    "aborted": (lambda _: iter([event("a", [3], "abort"), DONE]), "finish_reason=abort"),
    "endless": (endless, "more than the 4 tokens"),
    "empty forever": (empty_forever, "no token for 0.5 s"),
    "one line forever": (one_line_forever, "its stream has no end"),
    "silent": (silent, "silent for 0.5 s"),
    "another body": (lambda _: iter([b"<html>"]), "its stream was cut off"),
}


@pytest.mark.parametrize("case", BAD_STREAMS)
def test_a_bad_stream_ends_in_one_line(stub, url, case):
    stub.stream, refusal = BAD_STREAMS[case]
    begin = time.monotonic()
    with pytest.raises(SpecBenchError, match=re.escape(refusal)) as caught:
        Endpoint(url, 0.5).complete({"max_tokens": 4})
    assert str(caught.value).startswith(f"endpoint={url}: ") and "\n" not in str(caught.value)
    assert time.monotonic() - begin < 10 and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("status", "body", "headers", "refusal"),
    [
        (500, b'{"error": {"message": "no \\u001b[31mmemory"}}', {}, r"/v1/completions answers 500: no \x1b[31mmemory"),
        (400, b'{"message": "prompt: ids are not taken", "code": 400}', {}, "answers 400: prompt: ids are not taken"),
        (422, b'{"detail": [{"msg": "bad"}]}', {}, 'answers 422: [{"msg": "bad"}]'),
        (404, b"<html>", {}, "answers 404: Not Found; does its address end before /completions?"),
        (503, b"x" * 3000, {}, "answers 503: Service Unavailable"),
        (302, b"", {"Location": "http://elsewhere.example/"}, "it redirects to http://elsewhere.example/; give that"),
    ],
)
def test_a_server_that_refuses_is_quoted(stub, url, status, body, headers, refusal):
    stub.status, stub.body, stub.headers = status, body, headers
    with pytest.raises(SpecBenchError, match=re.escape(refusal)):
        Endpoint(url, 5.0).complete({"max_tokens": 4})


def test_nobody_there():
    with serving(Stub()) as gone:
        pass
    with pytest.raises(SpecBenchError, match=r"connection refused; is the server running\?"):
        Endpoint(gone, 5.0).models()


@pytest.mark.parametrize("models", [None, 3, [{"name": "a"}], ["a"]])
def test_a_server_without_a_list_of_models(stub, url, models):
    stub.models = models
    with pytest.raises(SpecBenchError, match=r"/v1/models (lists no models|answers 404)"):
        Endpoint(url, 5.0).models()


# A key ----------------------------------------------------------------------------------------------------------------


def test_a_key_goes_to_the_server_and_nowhere_else(stub, url, monkeypatch):
    stub.stream = lambda _: iter([event("a", [3], "length"), DONE])
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Served("served", url).find_model()
    assert stub.keys == [None]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    stub.key = "sk-secret"
    drafter = Served("served", url)
    drafter.find_model()
    drafter.answer([3, 4], "x y", Limits(8), Sampler(), None)
    assert stub.keys[1:] == ["Bearer sk-secret"] * 2
    assert "secret" not in str(vars(drafter)) + str(vars(drafter.endpoint)) + json.dumps(stub.asked)
    stub.status, stub.body = 500, b'{"error": "what is sk-secret?"}'
    with pytest.raises(SpecBenchError, match=re.escape("answers 500: what is …?")):
        drafter.answer([3, 4], "x y", Limits(8), Sampler(), None)


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        (None, "answers 401, access refused; set OPENAI_API_KEY to its key"),
        ("sk-other", "answers 403, access refused; check the key in OPENAI_API_KEY"),
        ("sk-öther", "OPENAI_API_KEY: must be one word"),
        ("sk other\r\nX: y", "OPENAI_API_KEY: must be one word"),
    ],
)
def test_a_wrong_key_ends_in_a_line_that_names_the_variable_alone(stub, url, monkeypatch, key, refusal):
    stub.key = "sk-secret"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(SpecBenchError, match=re.escape(refusal)) as caught:
        Served("served", url).find_model()
    assert "sk" not in str(caught.value) and "\n" not in str(caught.value)


# The arm --------------------------------------------------------------------------------------------------------------


def test_the_one_model_is_taken_or_the_named_one(stub, url):
    drafter = Served("served", url)
    drafter.find_model()
    assert drafter.found == {"id": "tiny", "root": "/models/tiny", "owned_by": "vllm"}
    same = Served("served", url)
    same.find_model()
    assert same.contents == drafter.contents, "when it was loaded names no rows"
    with pytest.raises(SpecBenchError, match=r"drafter\.model=big: .* serves tiny"):
        Served("served", url, model="big").find_model()
    stub.models = [{"id": "a"}, {"id": "b"}]
    with pytest.raises(SpecBenchError, match=r"it serves a, b; choose with drafter\.model="):
        Served("served", url).find_model()
    other = Served("served", url, model="b")
    other.find_model()
    assert other.found == {"id": "b"} and other.contents != drafter.contents
    stub.models = []
    with pytest.raises(SpecBenchError, match="it serves no model"):
        Served("served", url).find_model()


def test_no_default_of_the_server_changes_the_distribution(stub, url):
    stub.stream = lambda _: iter([event("a", [3], "length"), DONE])
    for sampler, drawn in ((Sampler(), (0.0, 1.0, -1)), (Sampler(0.7, 0.9, 20), (0.7, 0.9, 20))):
        drafter = Served("served", url)
        drafter.find_model()
        drafter.answer([3, 4], "x y", Limits(8, (1,)), sampler, None if sampler.greedy else 7)
        asked = stub.asked[-1]
        assert (asked["temperature"], asked["top_p"], asked["top_k"]) == drawn
        assert asked["prompt"] == [3, 4] and asked["max_tokens"] == 8 and asked["stop_token_ids"] == [1]
        assert asked["ignore_eos"] is False and asked["repetition_penalty"] == 1.0 and asked["return_token_ids"] is True
        assert asked.get("seed") == (None if sampler.greedy else 7)
    drafter = Served("served", url, prompts="text")
    drafter.find_model()
    drafter.answer([3, 4], "x y", Limits(8), Sampler(), None)
    assert stub.asked[-1]["prompt"] == "x y" and stub.asked[-1]["add_special_tokens"] is False


def test_it_drafts_nothing(url):
    with pytest.raises(SpecBenchError, match="drafts nothing here"):
        Served("served", url).propose(3, Sampler(), None)


def test_a_row_of_it_has_no_cycles_and_no_audit():
    row = Row("served", "q", "", 0, 3, [4, 5, 6], 0.1, 0.2, served=Answered(False, True))
    assert contradiction(row, ["served"]) is None
    row.audit = {"verdict": "identical"}
    assert "no cycles and no audit" in contradiction(row, ["served"])
    row.audit, row.accepted, row.nodes, row.drafted, row.ranks = None, [1], [1], [1], [[0]]
    assert "no cycles and no audit" in contradiction(row, ["served"])


# The command ----------------------------------------------------------------------------------------------------------


def asked_of(home, url, results, *more):
    return "run", "drafter=served", f"endpoint={url}", "data.limit=2", f"results={results}", *more


def test_a_run_puts_a_row_beside_the_baseline_and_nobody_is_faster(home, tmp_path, stub, url):
    stub.stream = faithful(tiny())
    out = run(home, *asked_of(home, url, tmp_path, "memory=1", "trace=1", "drafter.engine='stub, eagle2'"))
    assert "SERVED" in out and "4 of 4 answers equal" in out.replace("\n", " ")
    assert f"answers of tiny at {url}" in " ".join(out.split()) and "stub, eagle2" in out
    header, rows = records_of(tmp_path, "served")
    mine = [r for r in rows if getattr(r, "served", None)]
    base = {(r.text, r.turn): r.tokens for r in rows if r.kind == "prompt" and r.drafter == "none"}
    assert len(mine) == 4 and all(r.tokens == base[r.text, r.turn] for r in mine)
    assert all(r.audit is None and r.prefill_s > 0 and not r.accepted for r in mine)
    assert header["arms"]["served"]["served"]["owned_by"] == "vllm"
    assert not [r for r in rows if r.kind == "measurement" and r.drafter == "served"], "its memory is not ours to measure"
    (entry,) = [e for e in cells.collect(blocks.below(tmp_path)) if e.name == "served"]
    assert (
        entry.summary.speed > 0 and entry.summary.speed_up is None and entry.summary.lossless.startswith("another engine; ")
    )
    assert [e.name for e in overview.ranking(cells.collect(blocks.below(tmp_path)))] == ["none", "served"]
    asked = len(stub.asked)
    run(home, *asked_of(home, url, tmp_path, "memory=1", "trace=1", "drafter.engine='stub, eagle2'"))
    assert len(stub.asked) == asked, "rows that are there are not asked for again"
    report = call(home, "report", f"results={tmp_path}")
    assert report.returncode == 0 and "No speed-up was measured here" in report.stdout, report.stderr
    assert "CAUTION served: answers of tiny at" in (tmp_path / "report.html").read_text()


def test_a_run_writes_no_key(home, tmp_path, stub, url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    stub.stream, stub.key = faithful(tiny()), "sk-secret"
    done = call(home, *asked_of(home, url, tmp_path))
    assert done.returncode == 0 and "sk-secret" not in done.stdout + done.stderr, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(b"sk-secret" in path.read_bytes() for path in written)


def test_an_answer_that_parts_is_said_and_is_no_bug(home, tmp_path, stub, url):
    stub.stream = faithful(tiny(), spoilt=2)
    out = " ".join(run(home, *asked_of(home, url, tmp_path)).split())
    assert "of 4 answers equal, the earliest difference at token 2 of question" in out
    assert "4 of 4 answers equal" not in out and "NOT lossless" not in out


def test_a_server_without_ids_is_compared_by_text(home, tmp_path, stub, url):
    words = ["<pad>", "<end>", *(f"w{i}" for i in range(59))]
    stub.stream = faithful(tiny(), words)
    out = " ".join(run(home, *asked_of(home, url, tmp_path)).split())
    assert "4 of 4 answers equal" in out and "tokens counted anew from its text" in out


def test_what_is_drawn_is_not_compared(home, tmp_path, stub, url):
    stub.stream = faithful(tiny())
    out = " ".join(run(home, *asked_of(home, url, tmp_path, "sampler.temperature=0.8")).split())
    assert "answers not compared" in out
    assert len({request["seed"] for request in stub.asked}) == 5 == len(stub.asked), (
        "a seed a generation, and the warm-up's"
    )


def test_another_server_at_the_same_address_has_rows_of_its_own(home, tmp_path, stub, url):
    stub.stream = faithful(tiny())
    run(home, *asked_of(home, url, tmp_path))
    asked = len(stub.asked)
    stub.models[0]["root"] = "/models/other"
    run(home, *asked_of(home, url, tmp_path))
    assert len(stub.asked) > asked


def test_a_study_takes_it_as_an_arm(home, tmp_path, stub, url):
    stub.stream = faithful(tiny())
    words = "study=retrieval", "arms=[suffix,served]", "cells=[0]", "datasets=[mtbench]", f"endpoint={url}"
    out = run(home, "study", *words, "data.limit=1", f"results={tmp_path}")
    assert "SERVED" in out


def test_a_generation_that_fails_is_a_failure_in_its_own_row(home, tmp_path, stub, url):
    good = faithful(tiny())
    stub.stream = lambda request: good(request) if len(stub.asked) < 4 else iter([event("a", [3])])
    assert "generations failed" in run(home, *asked_of(home, url, tmp_path), ok=False)
    _, rows = records_of(tmp_path, "served")
    assert any("its stream was cut off" in r.error for r in rows if r.kind == "error")
    stub.stream = lambda _: iter([event("a", [999], "stop"), DONE])
    assert "other tokens than this model; does it serve" in run(home, *asked_of(home, url, tmp_path), ok=False)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (["endpoint=null"], "drafter=served needs endpoint=http://HOST:PORT"),
        (["endpoint=ftp://x"], "endpoint=ftp://x: must be http"),
        (["replay=true"], "drafter=served with replay=true"),
        (["link=lan"], "drafter=served with link=lan"),
        (["drafter.model=big"], "serves tiny"),
        (["drafter.prompts=words"], "drafter.prompts=words"),
        (["checkpoint=x"], "takes no checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(home, tmp_path, stub, url, more, refusal):
    assert refusal in run(home, *asked_of(home, url, tmp_path, "model.path=/nowhere", *more), ok=False)
