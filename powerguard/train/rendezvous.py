"""How ranks come to a name in common, through a store in which earlier starts of the run may have left theirs.

torchrun's store outlives a restart of the workers, and nothing that workers can see names the start: the restart count
is each node's own, and stays where workers are restarted because another node's failed. So no key can be known to be
of this start, and each rank asks rank 0 with a token of its own. Ranks of an earlier start are gone when those of this
one begin: what they have asked is answered too, and read by nobody.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from powerguard.errors import StateError

REACH_S = 10.0
"""The agent's store is there before its workers are: it answers at once, or not at all."""
WAIT_S = 1800.0
"""What ranks do before may take that much longer on one than on another; torch.distributed waits so long too."""
_POLL_S = 0.02


def agent_store() -> Any:
    """A connection to the store of torchrun's agent, closed with the last reference; None where there is no such store.

    It has no threads, and the store's count of workers, which torch.distributed uses, is left alone.
    """
    import torch.distributed as dist

    client: Any = getattr(dist, "TCPStore", None)  # which torch may be built without
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if client is None or not served or not address or not port.isdecimal():
        return None
    reach = timedelta(seconds=REACH_S)
    try:
        store: Any = client(address, int(port), is_master=False, timeout=reach, wait_for_workers=False)
    except (RuntimeError, ValueError):  # nobody listens, no such host; no such port
        return None
    store.set_timeout(timedelta(seconds=WAIT_S))
    return store


def tell(store: Any, key: str, world_size: int, answer: str) -> None:
    """Rank 0's part: gives *answer*, which no start has given before, to all other ranks, until all have it.

    Raises StateError where they don't ask within the store's timeout.
    """
    ends = time.monotonic() + store.timeout.total_seconds()
    asks = [f"{key}/asks/{rank}" for rank in range(1, world_size)]
    answered: set[bytes] = set()
    try:
        while not store.check([f"{key}/{answer}/all"]):
            if time.monotonic() > ends:
                raise _nobody(0)
            for token in set(store.multi_get(asks)) - answered:
                store.set(f"{key}/{token.decode()}", answer)
                answered.add(token)
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise _nobody(0) from error


def ask(store: Any, key: str, rank: int, world_size: int) -> str:
    """Another rank's part: rank 0's answer. Raises StateError where it doesn't come within the store's timeout."""
    token = uuid.uuid4().hex
    try:
        store.set(f"{key}/asks/{rank}", token)
        answer = str(store.get(f"{key}/{token}").decode())
        if store.add(f"{key}/{answer}", 1) == world_size - 1:
            store.set(f"{key}/{answer}/all", "yes")
    except RuntimeError as error:
        raise _nobody(rank) from error
    return answer


def _nobody(rank: int) -> StateError:
    return StateError(
        f"rank {rank} has waited in vain for {'other ranks' if rank == 0 else 'rank 0'} to agree on a name",
        todo="let all ranks make their Checkpointers, or attach, in the same order",
    )
