"""The processes of a run and how they talk: all of them make the same calls in the same order."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as nnf

from fedxl.errors import UserError, first_line, require

T = TypeVar("T")
CPU = torch.device("cpu")
FAILED = "fedxl-failed"  # where a rank that fails says why, for the others to show
ASKING = timedelta(seconds=2)  # for that text
WORDS = 500  # characters of it
AS_LONG_AS_IT_TAKES = timedelta(days=1000)
# As torchrun sets them.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LostRankError(UserError):
    """Another process of this run has died, failed, or not answered in time."""


class Seat(NamedTuple):
    """Which of a run's processes this is."""

    rank: int
    size: int
    local: int = 0  # which of those on this machine
    beside: int = 1  # how many there are on this machine


def seat(environment: Mapping[str, str] | None = None) -> Seat | None:
    """This process's place as torchrun gives it; None for a run in one process.

    >>> seat({}) is None
    True
    >>> seat(dict(zip(NAMES, ("3", "8", "1", "2", "10.0.0.1", "29500"))))
    Seat(rank=3, size=8, local=1, beside=2)
    """
    found = os.environ if environment is None else environment
    if not all(name in found for name in NAMES):
        return None
    try:
        rank, size, local, beside = (int(found[name]) for name in NAMES[:4])
    except ValueError:
        raise UserError(f"{', '.join(NAMES[:4])} must be whole numbers, as torchrun sets them") from None
    require(0 <= rank < size and 0 <= local < beside, f"RANK {rank} of {size}, LOCAL_RANK {local} of {beside}")
    return Seat(rank, size, local, beside) if size > 1 else None


class Place(NamedTuple):
    """Where a rank computes."""

    device: str
    own: bool = False  # whether it is a card that no other rank uses


def place_of(name: str, seat: Seat) -> Place:
    """The device of a rank: a card of its own; where a config names one device, all ranks share it."""
    if name not in ("auto", "cuda"):
        return Place(name)
    cards = torch.cuda.device_count()
    if name == "auto" and not cards:
        return Place("cpu")
    need = f"{seat.beside} processes need as many cards, and this machine has {cards}"
    require(seat.beside <= cards, f"{need}; start fewer, or set run.device")
    return Place(f"cuda:{seat.local}", own=True)


@dataclass
class Spent:
    """What communication has cost this rank so far."""

    bytes: int = 0  # that it sent to others
    seconds: float = 0.0  # waiting for slower ranks included


class Watch:
    """Notices at once that another rank has died. NCCL does not, and would wait for as long as it may.

    Every rank keeps a gloo connection to rank 0, on which nothing is said until the run ends. It closes when one of
    its ends dies. Then `lost` is set, and the collective that waits for the dead rank is given up.
    """

    def __init__(self, rank: int, size: int, limit: float, give_up: Callable[[], None]) -> None:
        """All ranks call this together. give_up: makes the collective that this rank is waiting in return."""
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


@dataclass
class Team:
    """The processes of a run. Rank 0 leads: it alone writes files and speaks."""

    rank: int
    size: int
    local: int = 0
    wire: torch.device = CPU  # where tensors lie that are sent
    spent: Spent = field(default_factory=Spent)
    watch: Watch | None = None  # where a lost rank is not noticed otherwise

    @classmethod
    @contextmanager
    def joined(cls, seat: Seat, place: Place, limit: float) -> Iterator[Team]:
        """This process among the others, by NCCL if it has its own card. Nobody waits longer than `limit` seconds."""
        if place.own:
            torch.cuda.set_device(place.device)
            # So that a lost rank is an error here, and not the end of the process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        team = cls(seat.rank, seat.size, seat.local, torch.device(place.device) if place.own else CPU)
        with team._talking(0):
            dist.init_process_group("nccl" if place.own else "gloo", timeout=timedelta(seconds=limit))
            team.watch = Watch(seat.rank, seat.size, limit, team._give_up) if place.own else None
        try:
            yield team
        except LostRankError:
            raise
        except BaseException as error:
            team._confess(error)
            raise
        else:
            team.heard(None)  # nobody leaves before all are done: the others would take it for lost
            if team.watch:
                with team._talking(0):
                    team.watch.end()
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """The result of work that every rank does. A mistake at any of them ends all with the same line.

        The first rank of each machine goes first: it may write what it makes of large files.
        """
        found: T | None = None
        for mine in (self.local == 0, self.local != 0):
            line = ""
            try:
                found = work() if mine else found
            except UserError as error:
                line = str(error)
            for rank, said in enumerate(self.heard(line)):
                if said:
                    raise UserError(said if said == line or rank == 0 else f"rank {rank}: {said}")
        return found  # type: ignore[return-value]

    def heard(self, word: Any) -> list[Any]:
        """What each rank says, by rank: anything that JSON holds."""
        own = _letters(word)
        lengths = [int(many) for many in self.gather(torch.tensor([len(own)]), [1] * self.size)]
        return [_word(letters) for letters in self.gather(own, lengths)]

    def tell(self, word: Any) -> Any:
        """What rank 0 says; the others' words do not matter."""
        letters = _letters(word)
        length = self.told(torch.tensor([len(letters)]))
        return _word(self.told(letters if self.leads else torch.empty(int(length), dtype=torch.uint8)))

    def told(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor; the others give one of the same type and shape."""
        sent = tensor.detach().to(self.wire, copy=True).contiguous()
        with self._talking(self.leads * sent.nbytes * (self.size - 1)):
            dist.broadcast(sent, 0)
        return sent.to(tensor.device)

    def gather(self, own: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The vectors of all ranks, by rank; everyone knows their lengths."""
        if not max(lengths):
            return [own] * self.size
        sent = nnf.pad(own.to(self.wire), (0, max(lengths) - len(own))).contiguous()
        received = [torch.empty_like(sent) for _ in lengths]
        with self._talking(sent.nbytes * (self.size - 1)):
            dist.all_gather(received, sent)
        return [one[:length].to(own.device) for one, length in zip(received, lengths, strict=True)]

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' vectors, added in the order of ranks: the same bits at every rank.

        Each rank adds up a piece of the vector and sends it to all others: nobody holds more than two vectors.
        """
        piece = -(-len(part) // self.size)
        if not piece:
            return part
        sent = nnf.pad(part.to(self.wire), (0, piece * self.size - len(part))).contiguous()
        parts = torch.empty_like(sent)
        with self._talking(piece * part.element_size() * (self.size - 1)):
            dist.all_to_all_single(parts, sent)
        rows = parts.view(self.size, piece)
        summed = rows[0].clone()
        for row in rows[1:]:
            summed += row
        return torch.cat(self.gather(summed, [piece] * self.size))[: len(part)].to(part.device)

    def exchange(self, sent: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Bytes for each rank, and those from each rank, of which the receiver knows the lengths."""
        flat = torch.cat([one.to(self.wire) for one in sent])
        received = torch.empty(sum(lengths), dtype=torch.uint8, device=self.wire)
        with self._talking(flat.nbytes - sent[self.rank].nbytes):
            dist.all_to_all_single(received, flat, list(lengths), [len(one) for one in sent])
        return list(received.split(list(lengths)))

    @contextmanager
    def _talking(self, sent: int) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch has no type of its own for what gloo raises
            raise LostRankError(self._reason(error)) from error
        if self.watch and self.watch.lost.is_set():  # what was given up returns, with nothing in it
            raise LostRankError(self._reason(RuntimeError("closed")))
        self.spent.bytes += sent
        self.spent.seconds += time.monotonic() - began

    def _give_up(self) -> None:
        """Make the collective that this rank waits in return."""
        dist.distributed_c10d._get_default_group()._get_backend(self.wire).abort()

    def _confess(self, error: BaseException) -> None:
        """Say why this rank ends, for those that will miss it."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(FAILED, f"rank {self.rank} failed: {text[:WORDS]}")
        except (RuntimeError, ValueError):
            pass  # then they will say that they have lost us

    def _reason(self, error: BaseException) -> str:
        """What the rank that failed has said, or what is known without it."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set_timeout(ASKING)
            if store.check([FAILED]):
                return UserError(store.get(FAILED).decode(errors="replace")).__str__()
        except (RuntimeError, ValueError):
            pass
        return f"rank {self.rank} of {self.size} lost another rank: {_in_words(first_line(error))}"


def _in_words(text: str) -> str:
    """What a network library says of a lost peer.

    >>> _in_words("[pair.cc:553] Connection closed by peer [127.0.0.1]:8373. This is typically ...")
    'its connection is closed, so it has died or was ended'
    """
    if "closed" in text or "reset" in text:
        return "its connection is closed, so it has died or was ended"
    return "it did not answer within --limit" if "imed out" in text or "imeout" in text else text[:WORDS]


def _letters(word: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8)


def _word(letters: Tensor) -> Any:
    return json.loads(letters.cpu().numpy().tobytes())
