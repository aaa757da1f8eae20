"""What others send, when they die, and when: one clear error to who sent it, and nothing to anybody else."""

import itertools
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import ExitStack, contextmanager

import msgpack
import pytest
import torch
import zmq
from command_line import start
from conftest import make, tiny
from decoding import PROMPT, generate, plain
from test_remote import LIMITS, client, folder, server, serving, wait_for  # noqa: F401 - fixtures
from test_serve import served

from specbench.common.errors import SpecBenchError
from specbench.engine.decode import Limits, Step, decode
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless
from specbench.remote import protocol
from specbench.remote.client import LinkLost

TAPS = {"hidden": [], "kv": [], "last": True, "observe_top_k": 0, "condensed": None, "free_running": False}
TERMS = {"rule": "lossless", "numbers": [], "seed": None, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
BEGIN = {"kind": "begin", "n": 2, "prompt": PROMPT, "capacity": 64, "taps": TAPS, "judged": TERMS} | {
    "resumed": False,
    "eight": False,
}
PASS = {"kind": "pass", "n": 3, "tokens": [1, 2], "parents": [0]}
Q = {"nodes": [0], "ranks": [0, 0], "width": 1, "replacement": False}


class Raw:
    """A client that sends what it likes."""

    def __init__(self, address, greeted=True, **options):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        self.socket.connect(address)
        if greeted:
            assert self.ask({"kind": "hello", "n": 1, "version": protocol.VERSION})["kind"] == "welcome"

    def ask(self, *frames):
        self.socket.send_multipart([f if isinstance(f, bytes) else protocol.encode(f) for f in frames])
        return self.receive()

    def receive(self):
        while self.socket.poll(20_000):
            answer = protocol.decode(self.socket.recv(), protocol.REPLY)
            if answer["kind"] != "alive":
                return answer
        raise AssertionError("no answer")

    def close(self):
        self.socket.close()


@contextmanager
def raw(address, greeted=True):
    found = Raw(address, greeted)
    try:
        yield found
    finally:
        found.close()


def q(values, rows=1, width=61):
    return {**Q, "q": protocol.pack(torch.full((rows, width), values))}


BAD = {
    "nothing": (b"", "no msgpack"),
    "noise": (random.Random(0).randbytes(300), "wrong shape|no msgpack"),
    "depth": (b"\x91" * 100_000, "no msgpack"),
    "bytes behind a message": (protocol.encode(PASS) + b"\xc0", "no msgpack"),
    "a list said to be long": (b"\x81\xa1a\xdd\xff\xff\xff\xff", "no msgpack"),
    "a million maps": (b"\x81\xa1a\xdd" + (1_000_000).to_bytes(4, "big") + b"\x80" * 1_000_000, "no msgpack"),
    "a map of many keys": (protocol.encode({str(key): 0 for key in range(100)}), "no msgpack"),
    "a long text": (protocol.encode({**PASS, "kind": "x" * 10_000}), "no msgpack"),
    "an extension": (b"\x81\xa1a\xd4\x01\x00", "no msgpack"),
    "a number": (protocol.encode(7), "wrong shape"),
    "another kind": ({"kind": "eval", "n": 3, "code": "1"}, "wrong shape"),
    "more than was asked": ({**PASS, "path": "/etc/passwd"}, "wrong shape"),
    "a float for an id": ({**PASS, "tokens": [1.0, 2]}, "wrong shape"),
    "true for an id": ({**PASS, "tokens": [True, 2]}, "wrong shape"),
    "an empty tree": ({**PASS, "tokens": []}, "wrong shape"),
    "an id too large": ({**PASS, "tokens": [1, 61]}, "token 61"),
    "a negative id": ({**PASS, "tokens": [1, -1]}, "wrong shape"),
    "a circle": ({**PASS, "parents": [1]}, "behind its parent"),
    "too few parents": ({**PASS, "parents": []}, "behind its parent"),
    "too many nodes": ({**PASS, "tokens": [1] * 129, "parents": [0] * 128}, "129 nodes"),
    "no room": ({**PASS, "tokens": [1] * 80, "parents": [0] * 79}, "no room left"),
    "q of another size": ({**PASS, "drawn": q(0.1, width=60)}, "expected"),
    "q that is no number": ({**PASS, "drawn": q(float("nan"))}, "no probability"),
    "q of nodes that are not there": ({**PASS, "drawn": {**q(0.1), "nodes": [7]}}, "does not have"),
    "ranks beyond the width": ({**PASS, "drawn": {**q(0.1), "ranks": [0, 5]}}, "ranks"),
    "a shape of petabytes": ({**PASS, "drawn": {**Q, "q": {"d": "float32", "s": [2**30, 2**30], "b": b""}}}, "expected"),
    "a layer that is not there": ({**BEGIN, "taps": {**TAPS, "kv": [99]}}, "layer 99"),
    "int8 without what it stands for": (
        {**PASS, "drawn": {**Q, "q": {"d": "int8", "s": [1, 61], "b": bytes(61)}}},
        "expected",
    ),
    "int8 that stands for no number": (
        {**PASS, "drawn": {**Q, "q": {"d": "int8", "s": [1, 61], "b": bytes([1] * 61), "m": b"\xff\xff\xff\xff"}}},
        "no probability",
    ),
    "a layer many times": ({**BEGIN, "taps": {**TAPS, "kv": [1] * 50}}, "twice"),
    "a network that is not there": ({**BEGIN, "taps": {**TAPS, "condensed": "0" * 16}}, "does not have the network"),
    "a long prompt": ({**BEGIN, "prompt": [1] * 129, "capacity": 200}, "129 tokens"),
    "a huge cache": ({**BEGIN, "capacity": 2**31 - 1}, "positions"),
    "no room for the prompt": ({**BEGIN, "capacity": 3}, "no room"),
    "another rule": ({**BEGIN, "judged": {**TERMS, "rule": "specbench.engine.verify.Simulated"}}, "wrong shape"),
    "numbers for a rule without": ({**BEGIN, "judged": {**TERMS, "temperature": float("nan")}}, "wrong shape"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_message_gets_one_line_and_hurts_nobody(what, server, folder):  # noqa: F811
    """Its sender may go on, and another client's generation, begun before and ended after, is what it would be."""
    message, refusal = BAD[what]
    with client(server, folder) as good, raw(server.address) as bad:
        events = decode(good, make("eagle2", good), PROMPT, Limits(16), Lossless(), Sampler())
        found = [next(events).token]
        if not (isinstance(message, dict) and message.get("kind") == "begin"):
            assert bad.ask(BEGIN)["kind"] == "answer"
        answer = bad.ask(message)
        assert answer["kind"] == "error" and "\n" not in answer["message"]
        assert any(part in answer["message"] for part in refusal.split("|")), answer["message"]
        assert bad.ask(BEGIN)["token"] == plain(tiny(), PROMPT, 1)[0]
        found += [t for e in events if isinstance(e, Step) for t in e.tokens]
    assert found == plain(tiny(), PROMPT, 16)


def many(count, item, key="tokens"):
    """A tree whose list of tokens, or another item, holds the same bytes so often."""
    head = b"\x84" + b"".join(map(protocol.encode, ("kind", "pass", "n", 1, "parents", [], key)))
    return head + b"\xdd" + count.to_bytes(4, "big") + item * count


LARGE = {
    "empty texts": many(5_000_000, b"\xa0"),
    "empty lists": many(5_000_000, b"\x90"),
    "negative ids, as many as may be": many(protocol.MAX_ITEMS - 9, b"\xff"),
    "long lists": many(40, b"\xdd" + (200_000).to_bytes(4, "big") + b"\x01" * 200_000),
    "keys": b"\xdf"
    + (1_000_000).to_bytes(4, "big")
    + b"".join(b"\xa3" + i.to_bytes(3, "big") + b"\x01" for i in range(10**6)),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_message_takes_a_few_times_its_size_and_no_time(what):
    """Counts are bounded before objects are built, and of a million mistakes the first one ends it."""
    message = LARGE[what]
    tracemalloc.start()
    try:
        begin = time.process_time()
        with pytest.raises(SpecBenchError, match="wrong shape"):
            protocol.decode(message, protocol.REQUEST)
        assert time.process_time() - begin < 2 and tracemalloc.get_traced_memory()[1] < 3 * len(message) + 2**25
    finally:
        tracemalloc.stop()


def test_what_is_not_received_or_piles_up_is_bounded_and_others_are_served():
    """Some 140 answers of 24 kB of logits fill what a connection holds; a client that receives none of them is dropped."""
    with serving(tiny(), idle_s=2) as own:
        silent = Raw(own.address, RCVHWM=1, RCVBUF=4096)
        begin = {**BEGIN, "capacity": 256, "taps": {**TAPS, "observe_top_k": None}}
        begun = silent.ask(begin)  # waits for the answer: a pass sent earlier would replace it
        assert begun["kind"] == "answer"
        wide = {**PASS, "tokens": [1] * 100, "parents": [0] * 99}
        sent = 0
        deadline = time.monotonic() + 60
        while own.clients and time.monotonic() < deadline:
            try:
                silent.socket.send(protocol.encode({**wide, "n": sent}), zmq.NOBLOCK)
            except zmq.Again:  # once the server has closed the connection nothing goes out
                time.sleep(0.01)
            sent += 1
        assert not own.clients, "the silent client is not dropped"
        with raw(own.address) as other:
            assert other.ask(BEGIN)["kind"] == "answer"
        silent.close()


def test_a_client_that_is_silent_for_too_long_makes_room_and_is_told():
    with serving(tiny(), clients=1, idle_s=0.3) as own, raw(own.address) as silent:
        assert silent.ask(BEGIN)["kind"] == "answer"
        wait_for(lambda: not own.clients)
        with raw(own.address) as following:
            assert following.ask(BEGIN)["kind"] == "answer"
            assert "dropped it as idle" in silent.ask(PASS)["message"]


def test_a_message_larger_than_the_server_takes_is_not_sent(folder):  # noqa: F811
    with serving(tiny(), message=300) as small, client(small, folder) as there:
        assert generate(there, make("none", there), cap=2)[0] == plain(tiny(), PROMPT, 2)
        with pytest.raises(SpecBenchError, match=r"but the server takes 300; set a larger megabytes= there"):
            generate(there, make("none", there), [55] * 120)


def test_clients_that_ask_without_reading_are_one_pass_ahead_of_another_at_most(monkeypatch):
    """Eight clients send 20 passes each and read nothing; the next client is answered before most of them run."""
    with serving(tiny(), clients=10) as there, ExitStack() as opened:
        passes = []
        forward = there.sessions.forward
        slow = lambda *given: (passes.append(1), time.sleep(0.02), forward(*given))[-1]  # noqa: E731
        monkeypatch.setattr(there.sessions, "forward", slow)
        busy = [opened.enter_context(raw(there.address)) for _ in range(8)]
        for other in busy:
            other.ask(BEGIN)
        other = opened.enter_context(raw(there.address))
        for asking in busy:
            for n in range(20):
                asking.socket.send(protocol.encode({**PASS, "n": 3 + n}))
        assert other.ask(BEGIN)["kind"] == "answer"
        assert other.ask({**PASS, "tokens": [1, 2, 3], "parents": [0, 0]})["kind"] == "answer"
        assert len(passes) <= 12  # in turn they would be 17 and more


LEAVING = """
import time, zmq
from specbench.remote.transport import server_socket
server = server_socket("tcp://127.0.0.1:0", 1000)
for _ in range(20):
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.set(zmq.LINGER, 0)
    peer.connect(server.get_string(zmq.LAST_ENDPOINT))
    for _ in range(9):
        peer.send(b"pass")
    time.sleep(0.02)
    peer.close()
time.sleep(2)
while server.poll(200):
    server.recv_multipart()
"""


def test_clients_that_leave_with_messages_in_the_queue_do_not_end_the_server():
    """ZeroMQ's heartbeats would: one that is due during a pass of a second found the closed connection, and aborted."""
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_connection_that_names_itself_is_refused(server):  # noqa: F811
    """Or it could take the name of a client that has just gone, and its session."""
    thief = zmq.Context.instance().socket(zmq.DEALER)
    thief.set(zmq.LINGER, 0)
    thief.set(zmq.ROUTING_ID, b"somebody")
    thief.connect(server.address)
    thief.send(protocol.encode({"kind": "hello", "n": 1, "version": protocol.VERSION}))
    assert thief.poll(20_000) and "its own choice" in protocol.decode(thief.recv(), protocol.REPLY)["message"]
    thief.close()


def test_a_slow_reader_of_a_stream_gets_all_of_it(folder):  # noqa: F811
    """The server waits with the next token, and goes on for others meanwhile."""
    with serving(tiny()) as own, client(own, folder) as there:
        target = tiny()
        drafter = make("none", there, "drafter.streamed=true")
        events = decode(there, drafter, PROMPT, Limits(60), Lossless(), Sampler())
        tokens = [next(events).token]
        time.sleep(1.5)
        with raw(own.address) as other:
            assert other.ask(BEGIN)["kind"] == "answer"
        tokens += [t for step in events for t in step.tokens]
        assert tokens == plain(target, PROMPT, 60)


BENT = {
    "no first token": (0, lambda answer: answer.pop("token")),
    "a first token beyond the vocabulary": (0, lambda answer: answer.update(token=61)),
    "no states of the prompt": (0, lambda answer: answer.pop("last")),
    "states of fewer tokens": (0, lambda answer: answer.update(last=protocol.pack(torch.zeros(1, 32)))),
    "states that are no numbers": (1, lambda answer: answer["last"].update(b=b"\xff" * len(answer["last"]["b"]))),
    "no path": (1, lambda answer: answer.pop("path")),
    "a path beyond the tree": (1, lambda answer: answer.update(path=[500])),
    "a path that begins below the root": (1, lambda answer: answer.update(path=[3, 4])),
    "a path for ever": (1, lambda answer: answer.update(path=[1] * 1000)),
    "no drafted depth": (1, lambda answer: answer.pop("drafted")),
    "a drafted depth beyond the tree": (1, lambda answer: answer.update(drafted=10**6)),
    "no bonus": (1, lambda answer: answer.pop("token")),
    "a bonus beyond the vocabulary": (1, lambda answer: answer.update(token=61)),
    "no cache rows": (1, lambda answer: answer.pop("kv")),
}


@pytest.mark.parametrize("what", BENT)
def test_an_answer_that_does_not_fit_is_one_line(what, folder):  # noqa: F811
    """Of a server that speaks the protocol and means something else, in the answer to a prompt or to a tree."""
    place, bend = BENT[what]
    with serving(tiny()) as own, client(own, folder) as there:
        send, answers = own._send, itertools.count()

        def bent(peer, reply):
            message = msgpack.unpackb(reply)
            if message["kind"] == "answer" and next(answers) == place:
                bend(message)
            send(peer, msgpack.packb(message))

        own._send = bent
        drafter = make("moa" if what == "no cache rows" else "eagle2", there)
        with pytest.raises(SpecBenchError, match=re.escape(f"{own.address} sent an answer that does not fit")) as refused:
            list(decode(there, drafter, PROMPT, Limits(8), Lossless(), Sampler()))
        assert "\n" not in str(refused.value)


def test_several_frames_another_version_and_strangers_are_told_so(server):  # noqa: F811
    with raw(server.address, greeted=False) as stranger:
        assert "hello" in stranger.ask(PASS)["message"]
        assert "frames" in stranger.ask(b"a", b"b")["message"]
        assert (
            f"version {protocol.VERSION}, you speak 99" in stranger.ask({"kind": "hello", "n": 1, "version": 99})["message"]
        )


def test_no_more_clients_than_allowed_and_who_leaves_makes_room():
    with serving(tiny(), clients=1) as small:
        with raw(small.address), raw(small.address, greeted=False) as second:
            assert "1 clients already" in second.ask({"kind": "hello", "n": 1, "version": protocol.VERSION})["message"]
        deadline = time.monotonic() + 120
        while small.clients and time.monotonic() < deadline:
            time.sleep(0.1)
        with raw(small.address):
            pass


def test_a_client_that_waits_gets_the_place_that_its_lost_connection_held(folder):  # noqa: F811
    """The server may notice a lost connection after the client's next one."""
    with serving(tiny(), clients=1) as small, client(small, folder, on_disconnect="wait") as there:
        expected, drop_gone = plain(tiny(), PROMPT, 8), small._drop_gone
        late = iter([lambda: None, lambda: None])
        small._drop_gone = lambda: next(late, drop_gone)()
        there.connection.close()
        assert generate(there, make("none", there), cap=8)[0] == expected
        assert next(late, None) is None


def test_another_target_is_refused(server, tmp_path):  # noqa: F811
    tiny(seed=5).model.save_pretrained(tmp_path)
    with pytest.raises(SpecBenchError, match="serves another target"), client(server, tmp_path):
        pass


# Bytes below messages ---------------------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HANDSHAKE = GREETING + b"\x04" + bytes([len(READY)]) + READY


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        (HANDSHAKE + b"\x02" + (1 << 30).to_bytes(8, "big") + bytes(1000), True),  # 1 GB announced
        (HANDSHAKE + b"\x00\x64" + bytes(10), False),  # half a message
        (HANDSHAKE[:70], False),  # half a handshake
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, False),  # ZeroMQ's oldest version, to it
    ],
)
def test_what_is_no_message_is_cut_off_or_waits_and_hurts_nobody(sent, ends, server, folder):  # noqa: F811
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(sent)
        with client(server, folder) as good:
            assert generate(good, make("none", good), cap=8)[0] == plain(tiny(), PROMPT, 8)
        if ends:
            assert ended(line)


def ended(line):
    """Does the other side hang up?"""
    try:
        while line.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


# Side by side -----------------------------------------------------------------------------------------------------------


def test_clients_with_different_drafters_interleave(server, folder):  # noqa: F811
    """Each answer is what it is alone, though every pass comes between passes of others."""
    prompts = {"eagle2": PROMPT, "moa": [7, 7, 1, 30], "lookahead": [50, 2, 9], "vanilla": [11] * 9}
    with client(server, folder) as a, client(server, folder) as b, client(server, folder) as c, client(server, folder) as d:
        found = {drafter: [] for drafter in prompts}
        streams = [
            decode(there, make(name, there), prompt, Limits(20), Lossless(), Sampler())
            for there, (name, prompt) in zip((a, b, c, d), prompts.items(), strict=True)
        ]
        for events in itertools.zip_longest(*streams):
            for name, event in zip(prompts, events, strict=True):
                if event is not None:
                    found[name] += event.tokens if isinstance(event, Step) else [event.token]
    assert found == {name: plain(tiny(), prompt, 20) for name, prompt in prompts.items()}


# Sudden ends ------------------------------------------------------------------------------------------------------------


def test_a_killed_client_frees_its_cache(home):
    target = Target.load(home / "model", torch.float32, torch.device("cpu"))
    with serving(target, context=256) as running:
        for _ in range(2):
            process = start(home, "run", f"link={running.address}", "drafter=none", "rerun=all")
            deadline = time.monotonic() + 120
            while not any(c.session.cache.nbytes for c in list(running.clients.values())) and time.monotonic() < deadline:
                time.sleep(0.002)
            assert time.monotonic() < deadline, "the client never came as far as a cache"
            process.send_signal(signal.SIGKILL)
            process.wait()
            while running.clients and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not running.clients, "a client that is dead still has its place"


def test_a_killed_server_is_waited_for_and_answers_stay(home):
    """At random moments; another server at the same port goes on from the prompt and what was verified."""
    moments = random.Random(3)
    expected = generate(Target.load(home / "model", torch.float32, torch.device("cpu")), make("none", tiny()), cap=60)[0]
    process, address = served(home)
    port = address.rpartition(":")[2]

    class Running:
        pass

    Running.address = address
    with client(Running, home / "model", on_disconnect="wait") as there:
        found = []

        def answer():
            events = decode(there, make("none", there), PROMPT, Limits(60), Lossless(), Sampler())
            for event in events:
                found.extend(event.tokens if isinstance(event, Step) else [event.token])
                time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        while not found:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process, _ = served(home, f"port={port}")
        thread.join(90)
        assert found == expected
        assert there.traffic.resumed >= 1
        process.send_signal(signal.SIGKILL)
        there.on_disconnect, there.connection.timeout_s = "stop", 2.0
        with pytest.raises(LinkLost):
            generate(there, make("none", there), cap=60)
