"""Builds a factory's model on rank 0, and its structure alone on the other ranks.

Protocol, all ranks together:

1. Rank 0 runs the factory under a seed, on the CPU and by one thread. The other ranks run it without values
   (`construct/structure.py`), or if that fails, like rank 0.
2. All compare what they have built. A rank whose model differs runs the factory again, like rank 0.
3. Every rank moves its model to the meta device, tensor by tensor. Rank 0 keeps the values aside.
4. Once the model is laid out, rank 0 broadcasts one tensor after the other (`construct/hand_out.py`).

A pretrained model is built without values on rank 0 too, which reads them from files in step 4.

The values depend on the seed and the factory alone, not on the layout. Host memory: on rank 0 the whole
model (of a pretrained one, its part), on other ranks their parts and one tensor. Where a factory cannot run
without values, they too hold the whole model until step 3, and rank 0 says so.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.comm.one_tensor import gather_objects
from paceline.errors import PacelineError
from paceline.generators import preserved_generators, seed_generators
from paceline.parallel.construct.hand_out import Construction, Value, give
from paceline.parallel.construct.structure import (
    MOST_ELEMENTS,
    WithoutValues,
    describe_modules,
    describe_tensors,
    list_held,
    list_meta_storages,
    number_windows,
    read_tensors,
)
from paceline.phrases import first_line, name_ranks, name_some
from paceline.seeds import derive_seed
from paceline.torch_seams.tensors import identify

log = logging.getLogger(__name__)

# From a model's structure to what reads its values, by name.
Read = Callable[[nn.Module], Mapping[str, Callable[[], Tensor]]]

_BUILT = "Or pass the built model in place of its factory: rank 0's weights are then used."


@dataclass(frozen=True)
class _Attempt:
    """The result of one rank's build, as other ranks need to know it.

    Attributes:
        tensors: digest of the parameters and buffers.
        modules: digest of the modules.
        obstacle: why the model could not be built without values; empty if it was.
        error: why it could not be built at all.
        model: what was built; it does not travel.
        values: of tensors by their windows, in place of those that were built; they do not travel.
    """

    tensors: str = ""
    modules: str = ""
    obstacle: str = ""
    error: PacelineError | None = None
    model: nn.Module | None = None
    values: Mapping[int, Value] = field(default_factory=dict)

    def take_model(self) -> nn.Module:
        """Return the model; raise the error if it could not be built."""
        if self.error is not None:
            raise self.error
        assert self.model is not None
        return self.model

    def agrees_with(self, first: _Attempt) -> bool:
        """Return whether another attempt would be in vain, or is not needed."""
        is_same = (self.tensors, self.modules) == (first.tensors, first.modules)
        return bool(self.obstacle) or is_same


def construct(
    factory: Callable[[], nn.Module],
    seed: int,
    place: Callable[[nn.Module], object] | None = None,
    group: dist.ProcessGroup | None = None,
    read: Read | None = None,
) -> Construction:
    """Build a factory's model; collective.

    torch's, numpy's and Python's generators are seeded for the factory and restored afterwards.

    Args:
        factory: builds the model; called once on rank 0, and once or twice on the others.
        place: called with the model afterwards: for example to change the dtype.
        group: the ranks; by default, this process alone.
        read: of a pretrained model: returns what reads its values, by name; called on rank 0.

    Raises:
        PacelineError: PL457 to PL459; and what `read` raises, on every rank.
    """

    def run() -> nn.Module:
        model = factory()
        if isinstance(model, nn.Module) and place is not None:
            place(model)
        return model

    seed = derive_seed(seed, 0, "construction")
    built = _attempt_first(run, seed, read) if group is None else _build_on_ranks(run, seed, group, read)
    model = built.take_model()
    tensors = read_tensors(model)
    windows = number_windows(tensors)
    shapes = {windows[name]: torch.empty_like(each, device="meta") for name, each in tensors.items()}
    values: dict[int, Value] = {windows[n]: each.detach() for n, each in tensors.items() if not each.is_meta}
    values |= built.values
    for tensor in {id(each): each for each in tensors.values()}.values():
        give(model, tensor, torch.empty_like(tensor.detach(), device="meta"))
    return Construction(model, windows, group, values if group is None or group.rank() == 0 else {}, shapes)


def _build(run: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model with its values, and check that it has all of them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a matrix product depend on their number
    try:
        with _seeded(seed), _marked_memory():
            model = run()
    except PacelineError:
        raise
    except Exception as error:
        raise PacelineError(
            "PL457",
            saw=f"The factory raised {type(error).__name__}: {str(error).rstrip('.')}.",
            rule="A factory builds the model, on every rank.",
            fix="Call it directly to see whether it fails without Paceline.",
        ) from error
    finally:
        torch.set_num_threads(num_threads)
    if not isinstance(model, nn.Module):
        raise PacelineError(
            "PL457",
            saw=f"The factory returned a {type(model).__name__}.",
            rule="A factory takes no arguments and returns one nn.Module.",
            fix="Return the model.",
        )
    _check_values(model)
    return model


def _check_values(model: nn.Module) -> None:
    tensors = read_tensors(model)
    lost = [name for name, each in tensors.items() if is_lazy(each) or each.is_meta or not _is_plain(each)]
    if lost:
        raise PacelineError(
            "PL458",
            saw=f"The factory gives {name_some(lost)} no values in dense memory.",
            rule="A factory makes all of its model's tensors, dense and of torch's own class, and not on the "
            "meta device.",
            fix=f"Build them inside of the factory, without torch.device('meta'). {_BUILT}",
        )
    owned = {identify(each.untyped_storage()): name for name, each in tensors.items()}
    known = set(map(id, tensors.values()))
    for name, held in list_held(model):
        if id(held) not in known and (owner := owned.get(identify(held.untyped_storage()))):
            raise PacelineError(
                "PL458",
                saw=f"{name} is a tensor that shares its memory with {owner}.",
                rule="Parameters and buffers get memory of their own on each rank, which it would not share.",
                fix=f"Compute it where it is used, or register it with register_buffer. {_BUILT}",
            )
    unwritten = [name for name, each in tensors.items() if _has_nan(each)]
    if parameters := [name for name in unwritten if isinstance(tensors[name], nn.Parameter)]:
        raise PacelineError(
            "PL459",
            saw=f"The factory does not write all of {name_some(parameters)}, or writes NaN: what is left of "
            "torch.empty is arbitrary.",
            rule="Every run must start with the same weights, so every element of a parameter needs a value.",
            fix="Initialise it in the factory (torch.zeros, or a function of torch.nn.init).",
        )
    for name in unwritten:
        log.warning("The factory does not write all of the buffer %s: the rest of it starts as zeros.", name)
        tensors[name].nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _is_plain(tensor: Tensor) -> bool:
    own_class = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return own_class and tensor.layout is torch.strided and not tensor.is_quantized


def _has_nan(tensor: Tensor) -> bool:
    may_have = (tensor.is_floating_point() and tensor.itemsize > 1) or tensor.is_complex()
    return may_have and bool(tensor.isnan().any())


# ---- on several ranks


def _build_on_ranks(
    run: Callable[[], nn.Module], seed: int, group: dist.ProcessGroup, read: Read | None
) -> _Attempt:
    """Build the model on rank 0, and its structure on the others; raise an error of any rank on all."""
    own = _attempt_first(run, seed, read) if group.rank() == 0 else _attempt_without_values(run, seed)
    found = _gather(own, group)
    if found[0].error is None and not all(each.agrees_with(found[0]) for each in found):
        if not own.agrees_with(found[0]):
            own = _attempt(run, seed, "another model was built without values")
        found = _gather(own, group)
    for rank, each in enumerate(found):
        if each.error is not None:
            error, where = each.error, f"On rank {rank} alone: " if rank else ""
            words = {"saw": where + error.saw, "rule": error.rule, "fix": error.fix}
            raise PacelineError(error.code, **words, on_every_rank=True)
    odd = [rank for rank, each in enumerate(found) if each.obstacle]
    if odd and group.rank() == 0:
        reason = found[odd[0]].obstacle
        log.info("factory: %s held the whole model for a moment: %s", name_ranks(odd), reason)
    return own


def _attempt_first(run: Callable[[], nn.Module], seed: int, read: Read | None) -> _Attempt:
    """Build the model as rank 0 does."""
    if read is None:
        return _attempt(run, seed, "")
    own = _attempt_without_values(run, seed, sys.maxsize)
    if own.model is None:
        return own
    try:
        readers, tensors = read(own.model), read_tensors(own.model)
        windows = number_windows(tensors)
        values: dict[int, Value] = {windows[name]: reader for name, reader in readers.items()}
        unread = [name for name, each in tensors.items() if each.is_meta and windows[name] not in values]
        whole = read_tensors(_build(run, seed)) if unread else {}
        values |= {windows[name]: whole[name].detach().clone() for name in unread}
        return replace(own, values=values)
    except PacelineError as error:
        return _Attempt(error=error)


def _attempt(run: Callable[[], nn.Module], seed: int, obstacle: str) -> _Attempt:
    try:
        return _describe(_build(run, seed), obstacle)
    except PacelineError as error:
        return _Attempt(obstacle=obstacle, error=error)


def _attempt_without_values(
    run: Callable[[], nn.Module], seed: int, most_elements: int = MOST_ELEMENTS
) -> _Attempt:
    before = list_meta_storages()
    try:
        with warnings.catch_warnings(), _seeded(seed), WithoutValues(most_elements):
            warnings.simplefilter("ignore")  # rank 0 shows them
            model = run()
        known = {identify(each.untyped_storage()) for each in read_tensors(model).values()} | before.keys()
        if known.issuperset(list_meta_storages()):
            return _describe(model, "")
        obstacle = "it holds a tensor that is neither a parameter nor a buffer"
        del model
    except Exception as error:  # of any kind: rank 0 will know whether the factory is to blame
        obstacle = first_line(error)
    return _attempt(run, seed, obstacle)


def _describe(model: nn.Module, obstacle: str) -> _Attempt:
    tensors, modules = describe_tensors(read_tensors(model)), describe_modules(model)
    return _Attempt(_digest(tensors), _digest(modules), obstacle, model=model)


def _gather(own: _Attempt, group: dist.ProcessGroup) -> list[_Attempt]:
    return gather_objects(replace(own, model=None, values={}), group)


def _digest(description: str) -> str:
    return sha256(description.encode()).hexdigest()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's, numpy's and Python's generators of the CPU, and restore them afterwards."""
    with preserved_generators():
        seed_generators(seed, torch.device("cpu"))
        yield


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Fill new memory with NaN, by which memory that nothing writes is known."""
    is_on, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
