"""The transport of a group."""

from __future__ import annotations

import os

import torch

from .copies import Copies
from .exchange import Messages, Transport
from .ranks import Ranks

VARIABLE = "TILEWISE_DISTRIBUTED_TRANSPORT"


def transport_of(ranks: Ranks, device: torch.device) -> Transport:
    """The transport of a group, which the environment of all ranks must name alike.

    Raises:
        ValueError: the environment names another one than "messages" or "copies".
    """
    name = os.environ.get(VARIABLE, "messages")
    if name == "copies":
        return Copies(ranks, device)
    if name != "messages":
        raise ValueError(f"{VARIABLE} is {name!r}, but must be 'messages' or 'copies'")
    return Messages(ranks)
