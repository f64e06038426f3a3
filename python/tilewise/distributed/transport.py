"""The transport of a group."""

from __future__ import annotations

import importlib
import os

import torch

from .copies import Copies
from .exchange import Messages, Transport
from .ranks import Ranks

VARIABLE = "TILEWISE_DISTRIBUTED_TRANSPORT"


def check_transport(device: torch.device | None) -> str:
    """The name of the transport, which the environment of all ranks must give alike.

    Raises:
        ValueError: the environment names neither "messages" nor "copies".
        ImportError: what "copies" needs on a GPU is not installed.
    """
    name = os.environ.get(VARIABLE, "messages")
    if name not in ("messages", "copies"):
        raise ValueError(f"{VARIABLE} is {name!r}, but must be 'messages' or 'copies'")
    if name == "copies" and device is not None and device.type == "cuda":
        importlib.import_module("cuda.bindings.runtime")
    return name


def transport_of(ranks: Ranks, device: torch.device) -> Transport:
    """The transport of a group, after its check."""
    return Copies(ranks, device) if check_transport(device) == "copies" else Messages(ranks)
