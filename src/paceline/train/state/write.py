"""Prepares what each rank writes of a run's state: rank 0 whole tensors, or every rank its share of parts.

For shares, each rank plans the writer of every part. Ranks compare digests of their plans' inputs, so that a
part without a writer is detected before anything is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import tree
from paceline.checkpoint.content import MODEL, PreparedShare, find_tied, prepare_whole
from paceline.checkpoint.tensors import refuse_unstorable
from paceline.checkpoint.writers import Holding, digest_holdings, plan_writers
from paceline.errors import PacelineError
from paceline.parallel.placement import local
from paceline.torch_seams.trees import tree_leaves, tree_map
from paceline.train.equal_copies import Copies
from paceline.train.pieces import OwnPart, join_pieces
from paceline.train.state.parts import Parts
from paceline.train.state.transfer import raise_any
from paceline.world import World


@dataclass(frozen=True)
class RunState:
    """This rank's part of a run's state to be saved.

    Attributes:
        optimizers: trees by model, with `OwnPart`.
        tracked: states of the user's objects by name, with `OwnPart`.
        describe: returns everything else; called on rank 0 only.
        recipe_toml: the resolved recipe, where there is one.
        copies: the checks that ranks hold the same copies, one per model.
    """

    parts: Parts
    optimizers: Mapping[str, Any]
    tracked: Mapping[str, Any]
    describe: Callable[[], dict[str, Any]]
    recipe_toml: str | None
    copies: Sequence[Copies] = ()

    def check_copies(self) -> None:
        """Compare all tensors that ranks hold copies of; collective; raises PL418."""
        for each in self.copies:
            each.check_all()


def prepare_full(world: World, state: RunState) -> PreparedShare | None:
    """Gather whole tensors on rank 0 and return its files; collective if parts are divided."""
    keep = world.is_main
    placement = state.parts.placement
    model_pieces = state.parts.list_model()
    model = join_pieces(model_pieces, placement, keep=keep)
    optimizers = join_pieces(state.optimizers, placement, keep=keep)
    tracked = join_pieces(state.tracked, placement, keep=keep)
    if not keep:
        return None
    late = {id(model[name]) for name in model_pieces if state.parts.is_parameter(name)}
    pieces = tree_leaves(state.optimizers)
    late |= {
        id(whole)
        for piece, whole in zip(pieces, tree_leaves(optimizers), strict=True)
        if isinstance(piece, OwnPart)
    }
    described = state.describe()
    described["tracked"] = tracked | described["tracked"]
    prepared = prepare_whole(model, optimizers, described, state.recipe_toml)
    return replace(prepared, late=frozenset(late))


@torch.no_grad()  # with gradients, a DTensor's local part goes through autograd
def prepare_share(rank: int, state: RunState) -> tuple[PreparedShare, str]:
    """Return a rank's share, and a digest of the holdings that all ranks have planned from.

    Args:
        rank: this one, as the layout of `state.parts` numbers it.
    """
    model = state.parts.list_model()
    named: dict[str, Any] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.items():
        kept = first.setdefault(id(value), f"{MODEL}/{name}")
        if kept == f"{MODEL}/{name}":
            named[kept] = value
        else:
            tied[f"{MODEL}/{name}"] = kept
    own_tensors: dict[str, Tensor] = {}
    structures = {"optimizer": _encode(state.optimizers, "optimizer", named, own_tensors)}
    rest: dict[str, Any] = {"tracked": state.tracked}
    if rank == 0:
        rest = state.describe()
        rest["tracked"] = dict(state.tracked) | rest.get("tracked", {})
    else:  # of the user's objects only what is cut; the rest is rank 0's
        rest = tree_map(lambda value: value if isinstance(value, OwnPart) else None, rest)
    structures["state"] = _encode(rest, "state", named, own_tensors)

    own = {name: value for name, value in sorted(named.items()) if isinstance(value, OwnPart)}
    holdings, writers, digest = _plan(state.parts, own)
    tensors: dict[str, Tensor] = {}
    parts = {}
    late = set()
    for holding, writer in zip(holdings, writers, strict=True):
        if writer == rank:
            found = own_tensors.get(holding.name)
            tensors[holding.name] = local(own[holding.name].tensor) if found is None else found
            if _only_steps_change(state.parts, holding.name):
                late.add(id(tensors[holding.name]))
            if not holding.part.is_whole:
                parts[holding.name] = holding.part
    plain = {name: value for name, value in named.items() if name not in own}
    for name, value in (plain | tensors).items():
        if name.startswith(f"{MODEL}/"):  # `tree.encode` has looked at the others
            refuse_unstorable(name.replace("/", ".", 1), value)
    num_bytes = sum(holding.num_bytes for holding in holdings)
    if rank != 0:
        share = PreparedShare(rank, tensors, parts, num_bytes, late=frozenset(late))
        return share, digest
    aliases = find_tied(plain)
    plain = {name: tensor for name, tensor in plain.items() if name not in aliases}
    num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in plain.values())
    share = PreparedShare(
        rank,
        plain | tensors,
        parts,
        num_bytes,
        {name: aliases.get(kept, kept) for name, kept in tied.items()} | aliases,
        structures,
        state.recipe_toml,
        late=frozenset(late),
    )
    return share, digest


def _plan(parts: Parts, own: Mapping[str, OwnPart]) -> tuple[list[Holding], list[int], str]:
    """Return the holdings of all ranks, the writer of each, and a digest of what the plan depends on."""
    decisive = (
        (name, value.name, value.tensor.shape, value.tensor.dtype, type(value.tensor))
        for name, value in own.items()
    )
    key = tuple((*each, parts.is_parameter(each[1])) for each in decisive)
    plans = parts.known.plans
    if key not in plans:
        plans.clear()  # one is enough, unless the state changes
        holdings = [each for name, value in own.items() for each in _list_holdings(parts, name, value)]
        plans[key] = holdings, plan_writers(holdings), digest_holdings(holdings)
    found: tuple[list[Holding], list[int], str] = plans[key]
    return found


def _list_holdings(parts: Parts, name: str, own: OwnPart) -> Iterator[Holding]:
    """Yield the parts of one tensor with their holders, except empty parts."""
    # Copies of parameters and their optimizer state have the same bits, so any rank may write them. Of
    # buffers and the user's own averages rank 0's are saved, or those of the first rank that has the part.
    spreads = _only_steps_change(parts, name)
    for part, ranks in parts.list_holders(own):
        if part.num_elements or part.is_whole:
            num_bytes = part.num_elements * own.tensor.element_size()
            yield Holding(name, part, num_bytes, ranks if spreads else ranks[:1])


def _only_steps_change(parts: Parts, name: str) -> bool:
    """Return whether a tensor is a parameter or its optimizer state; only an optimizer's step changes it."""
    return name.startswith("optimizer/") or parts.is_parameter(name.removeprefix(f"{MODEL}/"))


def _encode(value: Any, group: str, named: dict[str, Any], own_tensors: dict[str, Tensor]) -> Any:
    """Return the structure of a tree.

    Args:
        named: gets the tree's tensors, as they were if only parts are here.
        own_tensors: gets this rank's parts of these, since a DTensor takes long to return its own.
    """
    owned: dict[int, OwnPart] = {}

    def find_tensor(own: Any) -> Tensor | None:
        if not isinstance(own, OwnPart):
            return None
        tensor = local(own.tensor)
        owned[id(tensor)] = own
        return tensor

    structure, tensors = tree.encode(value, group, find_tensor)
    for name, tensor in tensors.items():
        own = owned.get(id(tensor))
        named[f"{group}/{name}"] = tensor if own is None else own
        if isinstance(own, OwnPart):
            own_tensors[f"{group}/{name}"] = tensor
    return structure


class _Caught:
    """A holder of this rank's error, to be reported to the others."""

    error: PacelineError | None = None


@contextlib.contextmanager
def caught() -> Iterator[_Caught]:
    """Keep a `PacelineError` for the other ranks, which wait, instead of raising it at once."""
    held = _Caught()
    try:
        yield held
    except PacelineError as error:
        held.error = error


def agree(gathered: Sequence[tuple[PacelineError | None, str]]) -> None:
    """Raise one rank's error on all ranks, or PL525 if ranks planned from different states.

    Args:
        gathered: by rank, its error in preparing a save and the digest of `prepare_share`.
    """
    raise_any(error for error, _ in gathered)
    differing = [rank for rank, (_, each) in enumerate(gathered) if each != gathered[0][1]]
    if differing:
        error = PacelineError(
            "PL525",
            saw=f"rank {differing[0]} has other tensors to save than rank 0 (of {len(differing)} ranks that "
            "differ, the first).",
            rule="Every part of every tensor is written by one rank, and all ranks compute the same plan.",
            fix="Look for optimizer state or tracked averages that only some ranks have, or "
            'choose checkpoint.mode = "full".',
        )
        raise_any([error])
