"""Chooses the device of every rank: all of them describe what they see, and rank 0 decides for all.

Protocol: every rank puts a `SeenDevices` into the store. Rank 0 reads them and puts a device per rank there,
or an error, which every rank then raises. So no rank computes on another kind of device than the others.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineError
from paceline.phrases import name_ranks
from paceline.place import RankPlace
from paceline.torch_seams.devices import is_in_bad_fork

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

# Waits until so many ranks have put a key with a prefix into the store.
Wait = Callable[["Store", str, int], None]
# How much memory cuBLAS gets; torch takes some values for deterministic.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_SEEN, _CHOSEN, _READ = "paceline/seen/", "paceline/chosen/", "paceline/read/"


@dataclass(frozen=True)
class SeenDevices:
    """The devices that a rank asks for and sees.

    Attributes:
        asked: `"auto"`, `"cpu"` or `"cuda"`.
        shares: whether its backend lets several ranks use one device.
        host: the name of its machine.
        node_rank, local_rank, local_world_size: its place.
        names, uuids: of the CUDA devices that torch can use.
        trouble: why it cannot use devices that this machine has; "" if it has none, or they are not wanted.
    """

    asked: str
    shares: bool
    host: str
    node_rank: int
    local_rank: int
    local_world_size: int
    names: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    trouble: str = ""


def see_devices(asked: str, backend: str | None, place: RankPlace) -> SeenDevices:
    """Return what this rank sees."""
    if asked not in ("auto", "cpu", "cuda"):
        raise PacelineError(
            "PL305",
            saw=f"device={asked!r}.",
            rule='A device is "auto", "cpu" or "cuda"; which CUDA device follows from the local rank.',
            fix="To select CUDA devices, set CUDA_VISIBLE_DEVICES.",
        )
    shares = backend is not None and "nccl" not in backend
    found = (place.node_rank, place.local_rank, place.local_world_size)
    if asked == "cpu":
        return SeenDevices(asked, shares, socket.gethostname(), *found)
    num_devices = torch.cuda.device_count()
    if num_devices and is_in_bad_fork():
        raise PacelineError(
            "PL324",
            saw="this rank was forked from a process that has started CUDA's driver.",
            rule="CUDA does not survive a fork, and torch.cuda.is_available() is enough to start it.",
            fix="Put the function that you launch into a module and import it; or restart the notebook and "
            'call launch() before any function of torch.cuda; or use device="cpu".',
        )
    trouble = ""
    if num_devices and not torch.cuda.is_available():
        trouble, num_devices = f"torch {torch.__version__} cannot use its driver", 0
    elif not num_devices and torch.version.cuda is None and torch.version.hip is None:
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if glob.glob("/dev/nvidia[0-9]*") and not is_hidden:
            trouble = f"torch {torch.__version__} was built without CUDA"
    each = [torch.cuda.get_device_properties(number) for number in range(num_devices)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    uuids = [str(getattr(one, "uuid", f"{visible}:{number}")) for number, one in enumerate(each)]
    names = tuple(one.name for one in each)
    return SeenDevices(asked, shares, socket.gethostname(), *found, names, tuple(uuids), trouble)


def agree_on_device(seen: SeenDevices, store: Store, rank: int, world_size: int, wait: Wait) -> torch.device:
    """Return the device of this rank; every rank must call it.

    Raises:
        PacelineError: as `choose_devices`, on every rank.
    """
    store.set(f"{_SEEN}{rank}", json.dumps(asdict(seen)))
    if rank == 0:
        wait(store, _SEEN, world_size)
        ranks = [SeenDevices(**json.loads(store.get(f"{_SEEN}{each}"))) for each in range(world_size)]
        store.set(f"{_CHOSEN}0", json.dumps(_try_to_choose(ranks)))
    wait(store, _CHOSEN, 1)
    found = json.loads(store.get(f"{_CHOSEN}0"))
    if "code" in found:
        store.set(f"{_READ}{rank}", "1")
        if rank == 0:  # it may host the store, which the others still read
            wait(store, _READ, world_size)
        raise PacelineError(**found, on_every_rank=True)
    for line in found["lines"] if rank == 0 else ():
        log.warning("%s", line)
    number = found["numbers"][rank]
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def _try_to_choose(ranks: Sequence[SeenDevices]) -> dict[str, object]:
    try:
        numbers = choose_devices(ranks)
    except PacelineError as error:
        return {"code": error.code, "saw": error.saw, "rule": error.rule, "fix": error.fix}
    return {"numbers": numbers, "lines": _describe(ranks, numbers)}


def choose_devices(ranks: Sequence[SeenDevices]) -> list[int | None]:
    """Return the number of the CUDA device of every rank among those that it sees; `None` for the CPU."""
    wants = [seen for seen in ranks if seen.asked != "cpu"]
    if not any(seen.uuids for seen in wants):
        asks = next((seen for seen in ranks if seen.asked == "cuda"), None)
        if asks is None:
            return [None] * len(ranks)
        raise PacelineError(
            "PL306",
            saw=f'device="cuda", but torch finds no CUDA device{asks.trouble and ": "}{asks.trouble}.',
            rule="Each rank on this node needs its own device.",
            fix='Use device="cpu", or check the driver, CUDA_VISIBLE_DEVICES and torch itself '
            f"(torch {torch.__version__}, CUDA {torch.version.cuda}).",
        )
    numbers: list[int | None] = []
    taken: dict[tuple[str, str], int] = {}
    for rank, seen in enumerate(ranks):
        beside = [other for other in ranks if other.node_rank == seen.node_rank]
        has_own = all(other is seen or not {*other.uuids} & {*seen.uuids} for other in beside)
        few = len(seen.uuids) < (1 if has_own or seen.shares else seen.local_world_size)
        if few or seen.asked == "cpu":
            raise _too_few_error(seen, ranks)
        number = 0 if has_own else seen.local_rank % len(seen.uuids)
        numbers.append(number)
        other = taken.setdefault((seen.host, seen.uuids[number]), rank)
        if other != rank and not seen.shares:
            raise PacelineError(
                "PL307",
                saw=f"{name_ranks([other, rank])} would both compute on {seen.names[number]} "
                f"{seen.uuids[number]} of {seen.host}.",
                rule="Each rank needs its own device.",
                fix="Give each rank another one in CUDA_VISIBLE_DEVICES, or start fewer ranks.",
            )
    return numbers


def choose_alone(seen: SeenDevices) -> torch.device:
    """Return the device of a rank whose group exists already: its own, or that of its local rank."""
    beside = 1 if len(seen.uuids) == 1 else seen.local_world_size
    ranks = [replace(seen, local_rank=place, local_world_size=beside) for place in range(beside)]
    number = choose_devices(ranks)[min(seen.local_rank, beside - 1)]
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def _too_few_error(seen: SeenDevices, ranks: Sequence[SeenDevices]) -> PacelineError:
    where = f"node {seen.node_rank} ({seen.host})" if any(r.node_rank for r in ranks) else "this node"
    saw = f"{seen.local_world_size} ranks on {where}, but {len(seen.uuids)} CUDA devices"
    if seen.asked == "cpu":
        saw = f'device="cpu" on a rank of {where}, and CUDA on others'
    elif seen.trouble:
        saw += f": {seen.trouble}"
    most = max(len(other.uuids) for other in ranks)
    if most > len(seen.uuids):
        saw += f"; another node shows {most}"
    return PacelineError(
        "PL307",
        saw=f"{saw}.",
        rule="Each rank needs its own device, and all ranks the same kind.",
        fix=f"Start at most {len(seen.uuids)} ranks per node, check nvidia-smi there, "
        'or use device="cpu" on all ranks.',
    )


def _describe(ranks: Sequence[SeenDevices], numbers: Sequence[int | None]) -> list[str]:
    """Log the devices of all ranks, and return what a user has to know about them."""
    places: dict[str, list[int]] = {}
    for rank, (seen, number) in enumerate(zip(ranks, numbers, strict=True)):
        if number is None:
            troubles = sorted({f"{each.host}: {each.trouble}" for each in ranks if each.trouble})
            return ["training on the CPU of a machine with GPUs; " + "; ".join(troubles)] if troubles else []
        places.setdefault(seen.names[number], []).append(rank)
    text = ", ".join(f"{name} on {name_ranks(own)}" for name, own in places.items())
    log.info("devices: %s; rank 0 on %s of %s", text, ranks[0].uuids[numbers[0] or 0], ranks[0].host)
    if len(places) == 1:
        return []
    return [f"ranks compute on devices of several kinds, whose results differ in the last bits: {text}"]


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels only in this context."""
    cudnn, filling = torch.backends.cudnn, torch.utils.deterministic
    with ExitStack() as undo:
        undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        for owner, attribute, value in (
            (cudnn, "deterministic", True),
            (cudnn, "benchmark", False),
            # Filling costs time and hides reads of uninitialised memory, which verify should detect.
            (filling, "fill_uninitialized_memory", False),
        ):
            undo.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, value)
        torch.use_deterministic_algorithms(True)
        if device.type == "cuda":
            _try_product(device)
        yield


def _try_product(device: torch.device) -> None:
    """Raise if torch refuses products of matrices: it has read cuBLAS's variable once, at the first one."""
    one = torch.ones(1, 1, device=device)
    try:
        torch.mm(one, one)
    except RuntimeError as error:
        if CUBLAS not in str(error):
            raise
        raise PacelineError(
            "PL314",
            saw=f"deterministic kernels are wanted, and {CUBLAS} was not :4096:8 or :16:8 when this process "
            "multiplied its first matrices on CUDA.",
            rule="torch reads that variable once, at the first product; with others, cuBLAS may add in any "
            "order.",
            fix="Call paceline.start() before anything is computed on CUDA, or start the script with "
            f'{CUBLAS}=:4096:8. reduction="fast" needs neither.',
        ) from None
