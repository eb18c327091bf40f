"""Chooses the peers that run a case, and creates the inputs that all of them get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashbwd.bench import attention_inputs, attention_peers, block_peers, decoding_peers, flex_peers, norm_peers
from flashbwd.bench.cases import AttentionCase, BlockCase, Case, DecodingCase, FlexCase
from flashbwd.bench.peers import Peer

SEED = 20


def peers_of(case: Case, device: torch.device, only: Sequence[str] = ()) -> list[Peer]:
    """Return the peers of a case on this device. Deterministic and compiled peers run only if the case requests them.

    If ``only`` has strings, the name of a peer must contain one of them.
    """
    table = norm_peers.NORM_PEERS
    if isinstance(case, AttentionCase):
        table = attention_peers.ATTENTION_PEERS
    elif isinstance(case, DecodingCase):
        table = decoding_peers.DECODING_PEERS
    elif isinstance(case, FlexCase):
        table = flex_peers.FLEX_PEERS
    elif isinstance(case, BlockCase):
        table = block_peers.BLOCK_PEERS
    return [
        peer
        for peer in table
        if device.type in peer.devices
        and (not only or any(part in peer.name for part in only))
        and (case.compiled or not peer.compiled)
        and (not peer.deterministic or (isinstance(case, AttentionCase | FlexCase) and case.deterministic))
    ]


def make_inputs(case: Case, device: torch.device, seed: int) -> Any:
    if isinstance(case, AttentionCase):
        return attention_inputs.make_inputs(case, device, seed)
    if isinstance(case, FlexCase):
        return attention_inputs.make_inputs(case.dense, device, seed)
    if isinstance(case, DecodingCase):
        return decoding_peers.make_inputs(case, device, seed)
    if isinstance(case, BlockCase):
        return block_peers.make_inputs(case, device, seed)
    return norm_peers.make_inputs(case, device, seed)
