"""The transport of a group: copies between the GPUs of one host, and messages elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import torch

from .agreement import exchange
from .copies import Copies
from .exchange import Messages, Transport
from .ranks import Ranks

VARIABLE = "TILEWISE_DISTRIBUTED_TRANSPORT"
AUTO, MESSAGES, COPIES = "auto", "messages", "copies"


def check_transport(device: torch.device | None) -> str:
    """The name of the transport, which the environment of all ranks must give alike.

    Raises:
        ValueError: the environment names another one than "auto", "messages" and "copies".
        ImportError: what "copies" needs on a GPU is not installed.
    """
    name = os.environ.get(VARIABLE, AUTO)
    if name not in (AUTO, MESSAGES, COPIES):
        raise ValueError(f"{VARIABLE} is {name!r}, but must be 'auto', 'messages' or 'copies'")
    if name == COPIES and device is not None and device.type == "cuda":
        _import_runtime()
    return name


def transport_of(ranks: Ranks, device: torch.device) -> Transport:
    """The transport of a group, after its check."""
    name = check_transport(device)
    if name == AUTO:
        name = COPIES if device.type == "cuda" and _can_copy(ranks, device) else MESSAGES
    return Copies(ranks, device) if name == COPIES else Messages(ranks)


# By group: whether all of its ranks can copy from each other.
_copying: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _can_copy(ranks: Ranks, device: torch.device) -> bool:
    """Whether all ranks are on one host and their GPUs share memory; all ranks must ask."""
    group: Any = ranks.group
    if group not in _copying:
        hosts = exchange([_host()], ranks)
        possible = all(host == hosts[0] for host in hosts) and hosts[0] != [0]
        if possible:  # none of them leaves the others alone in the exchange of addresses
            possible = all(opened for (opened,) in exchange([_opens(ranks, device)], ranks))
        _copying[group] = possible
    return _copying[group]


def _host() -> int:
    """A number of this host since it was started; 0 if a package is missing."""
    try:
        _import_runtime()
    except ImportError:
        return 0
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.is_file() else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


def _opens(ranks: Ranks, device: torch.device) -> int:
    with contextlib.suppress(RuntimeError):  # no NVLink or PCIe path, or a container forbids it
        Copies(ranks, device).open()
        return 1
    return 0


def _import_runtime() -> None:
    importlib.import_module("cuda.bindings.runtime")
