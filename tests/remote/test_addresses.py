"""Addresses of servers as they are typed, bound and connected to; the emulator beside them says nothing at its end."""

import json
import socket
import struct
import subprocess
import sys
import time

import pytest
import zmq
from conftest import ROOT, configuration

from specbench.config.cli import expand_shorthands
from specbench.config.run_spec import from_config
from specbench.remote.transport import client_socket


@pytest.mark.parametrize(("host", "six"), [("[::1]", 1), ("127.0.0.1", 0), ("localhost", 0)])
def test_a_link_is_typed_as_the_address_is_and_connects(host, six):
    address = f"tcp://{host}:5555"
    link = from_config(configuration("none", *expand_shorthands([f"link={address}"]))).link
    assert link.to == address
    client = client_socket(link.to, 1000)
    assert client.get(zmq.IPV6) == six
    client.close()


def abort(connection):
    """Close a connection as a process that is killed does: with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def emulator(server):
    """The process of an emulator in front of a listening socket."""
    place = ["127.0.0.1", str(server.getsockname()[1])]
    command = [sys.executable, "-m", "specbench.remote.network_emulator", *place, json.dumps({"delay_ms": 100})]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def ended(process):
    """Its code, and what it wrote until then, once its standard input is closed."""
    out, err = process.communicate(timeout=10)
    return process.returncode, out, err


def test_connections_that_break_off_leave_no_traceback_of_the_emulator():
    """Of a client, of a server, and of one that is open when the emulator ends; bytes are in flight in each."""
    server = socket.create_server(("127.0.0.1", 0))
    with emulator(server) as process:
        port = int(process.stdout.readline())
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        accepted = [server.accept()[0] for _ in clients]
        for connection in (*clients, *accepted):
            connection.sendall(bytes(100_000))
        abort(clients[0]), abort(accepted[1])
        time.sleep(0.3)
        assert clients[2].recv(10) == bytes(10)
        assert ended(process) == (0, "", "")


def test_an_emulator_without_a_connection_ends_without_a_traceback():
    with socket.create_server(("127.0.0.1", 0)) as server, emulator(server) as process:
        process.stdout.readline()
        assert ended(process) == (0, "", "")
