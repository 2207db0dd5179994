"""How the ranks of a group find each other: rank 0 starts a coordinator and tells its address through the store."""

import ipaddress
import json
import os
import secrets
import socket

from torch._C import _distributed_c10d as c10d

from . import _native


def join(store, rank, world_size, timeout_ms, name):
    """Joins a group. Returns this rank's end of it, and the coordinator if this rank hosts it."""
    if world_size == 1:
        return _native.Group(0, 1, "", name, "", timeout_ms), None
    # One store may serve several groups of one name, one after the other.
    turn = store.add(f"joins of rank {rank}", 1)
    key = f"coordinator {turn}"
    host = None
    if rank == 0:
        try:
            host, told = _start(store, world_size, name)
        except Exception as error:
            store.set(key, json.dumps({"error": f"rank 0 cannot start the coordinator: {error}"}))
            raise
        store.set(key, json.dumps(told))
    else:
        told = json.loads(store.get(key))
    if "error" in told:
        raise c10d_error(told["error"])
    secret = _secret_of_user() or told["secret"]
    return _native.Group(rank, world_size, told["address"], told["job"], secret, timeout_ms), host


def c10d_error(text):
    from torch.distributed import DistBackendError

    return DistBackendError(text)


def _start(store, world_size, name):
    address = _own_address(store)
    ip = ipaddress.ip_address(address)
    # Without a secret, dist accepts processes of the same user on the same host only.
    secret = "" if ip.is_loopback or _secret_of_user() else secrets.token_hex(32)
    job = f"{name} {secrets.token_hex(4)}"
    bracketed = f"[{address}]" if ip.version == 6 else address
    host = _native.Host(bracketed, world_size, job, _secret_of_user() or secret)
    return host, {"address": f"{bracketed}:{host.port}", "job": job, "secret": secret}


def _own_address(store):
    """Returns the address of this machine from which it reaches the host of the store."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, c10d.TCPStore) else os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # Sends nothing: it only chooses the route.
        return probe.getsockname()[0]


def _secret_of_user():
    path = os.environ.get("DIST_SECRET_FILE")
    if not path:
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()
