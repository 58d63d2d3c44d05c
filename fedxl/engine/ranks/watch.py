"""Notices at once that another rank has died. NCCL does not, and would wait for as long as it may.

Every rank keeps a connection of gloo's to rank 0, on which nothing is said until the run ends. It closes when one of
its ends dies. Then the collective that waits for the dead rank is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread

import torch
import torch.distributed as dist

AS_LONG_AS_IT_TAKES = timedelta(days=1000)


class Watch:
    """Connections between rank 0 and each other rank; `lost` says whether one was closed too early."""

    def __init__(self, rank: int, size: int, limit: float, give_up: Callable[[], None]) -> None:
        """give_up: makes the collective that this rank is waiting in return.

        All ranks make this call together, and wait `limit` seconds for each other.
        """
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
        self.peers = range(1, size) if rank == 0 else range(1)
        self.lost = Event()
        self._give_up = give_up
        # Daemons: the thread that waits for a dead rank must not keep this process alive.
        self._threads = [Thread(target=self._listen, args=(peer,), daemon=True) for peer in self.peers]
        for thread in self._threads:
            thread.start()

    def _listen(self, peer: int) -> None:
        """Wait for the word that all is done."""
        try:
            word = dist.irecv(torch.empty(1), peer, self.group)
            assert word is not None, "this rank is in the group"
            word.wait(AS_LONG_AS_IT_TAKES)
        except (RuntimeError, ValueError):
            self.lost.set()
            self._give_up()

    def end(self) -> None:
        """All is done at this rank; return when it is at those that it is connected with."""
        for peer in self.peers:
            dist.send(torch.zeros(1), peer, self.group)
        for thread in self._threads:
            thread.join()
