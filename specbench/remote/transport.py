"""Addresses, ZeroMQ sockets with their limits, and the token that client and server share.

Beyond loopback both sides need the same token (`SPECBENCH_TOKEN`). It is never sent: the server's CURVE key is derived
from it, so that messages are encrypted, and only clients that know it can connect. On loopback it is optional.
"""

import hashlib
import ipaddress
import os
import re

import zmq
from zmq.utils import z85

from specbench.common.errors import SpecBenchError

TOKEN = "SPECBENCH_TOKEN"
GONE_MS = 5000  # a connection of a machine that stopped answering is closed after about so long, by TCP itself
QUEUED = 1  # messages of a client that a server queues, in each direction: the protocol is one request, one answer
_ADDRESS = re.compile(r"^tcp://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})$")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://host:port. Raises `SpecBenchError` for anything else."""
    match = _ADDRESS.match(address)
    if match is None or int(match[2]) > 65535:
        raise SpecBenchError(f"{address} is no address; write tcp://host:port")
    return match[1].strip("[]"), int(match[2])


def is_loopback(host: str) -> bool:
    """Is the host reachable from this machine only?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_socket(address: str, max_bytes: int) -> zmq.Socket[bytes]:
    """A server's socket. max_bytes: of a message; a peer that announces more is disconnected before any of it is stored."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, QUEUED)
    socket.set(zmq.RCVHWM, QUEUED)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone raises
    socket.set(zmq.MAXMSGSIZE, max_bytes)
    _common(socket, address)
    if (key := secret_key(address)) is not None:
        socket.curve_server = True
        socket.curve_secretkey = key
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise SpecBenchError(f"cannot listen at {address}: {str(error).lower()}; choose another port=") from error
    return socket


def client_socket(address: str, max_bytes: int) -> zmq.Socket[bytes]:
    """A client's socket; it connects in the background. max_bytes: of a message, as for `server_socket`."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.MAXMSGSIZE, max_bytes)
    _common(socket, address)
    if (key := secret_key(address)) is not None:
        socket.curve_serverkey = zmq.curve_public(key)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
    return socket


def _common(socket: zmq.Socket[bytes], address: str) -> None:
    """ZeroMQ's own heartbeats stay off: one due after a peer with queued messages has left aborts the process.

    Source: assertion `!_io_error`, zeromq/libzmq issue 4364; in 4.3.5 still.
    """
    socket.set(zmq.IPV6, ":" in parse_address(address)[0])  # a name is looked up for IPv4, as servers have it
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.HANDSHAKE_IVL, GONE_MS)
    socket.set(zmq.TCP_MAXRT, GONE_MS)  # while something is sent
    socket.set(zmq.TCP_KEEPALIVE, 1)  # while nothing is: asked after 2 s, then every second
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 2)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.set(zmq.TCP_KEEPALIVE_CNT, GONE_MS // 1000 - 2)


def secret_key(address: str) -> bytes | None:
    """The server's secret key, derived from the token; None without one. Raises `SpecBenchError` beyond loopback then."""
    host, _ = parse_address(address)
    token = os.environ.get(TOKEN)
    if not token:
        if not is_loopback(host):
            raise SpecBenchError(f"{address} is not this machine alone: set {TOKEN} to the same secret on both sides")
        return None
    return z85.encode(hashlib.scrypt(token.encode(), salt=b"specbench", n=1 << 14, r=8, p=1, dklen=32))
