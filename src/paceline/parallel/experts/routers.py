"""Refuses routers that depend on the rank.

During training this could not be noticed, because each data rank has tokens of its own. Two things are
checked before the first step. Numbers in a mixture's modules, and numbers outside of them that its code
reads, must be the same on all ranks. Its code must not ask for the rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError
from paceline.own_code import describe_place
from paceline.parallel.experts.lists import join_names
from paceline.phrases import name_ranks

_READS = frozenset({"get_rank", "get_node_local_rank", "get_local_rank", "get_group_rank", "current_world"})
_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
)


def check_routers(model: nn.Module, mixtures: Sequence[str]) -> None:
    """Raise if a mixture's code or numbers depend on the rank; collective over all ranks.

    Args:
        model: before anything is divided.
        mixtures: full names of the modules with a router and its experts.

    Raises:
        PacelineError: PL666, on every rank.
    """
    reads, numbers = dict[str, str](), dict[str, Any]()
    for mixture in mixtures:
        inside = dict(model.get_submodule(mixture).named_modules(prefix=mixture))
        # No code reads the others, such as a time stamp.
        used = {
            name
            for kind in set(map(type, inside.values()))
            for function in _list_functions(kind, left_out=())
            for code in _list_code(function.__code__)
            for name in code.co_names
        }
        for name, module in inside.items():
            for function in _list_functions(type(module)):
                for what in _find_reads(function):
                    reads[f"{type(module).__name__}.{function.__name__}"] = (
                        f"{what}, in the mixture {mixture}"
                    )
                numbers |= {f"{key}, which {name} reads,": n for key, n in _read_outside(function)}
            numbers |= {
                join_names(name, key): n for key, n in vars(module).items() if _is_number(n) and key in used
            }
    if reads:
        place, what = next(iter(reads.items()))
        raise _router_error(f"{place} {what}.")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {key: repr(number) for key, number in numbers.items()})
    for key in dict.fromkeys(key for each in gathered for key in each):
        values = [each.get(key, "missing") for each in gathered]
        if len(set(values)) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, value in enumerate(values):
                ranks.setdefault(value, []).append(rank)
            shown = ", ".join(f"{value} on {name_ranks(each)}" for value, each in list(ranks.items())[:4])
            raise _router_error(f"a number of a mixture differs between ranks: {key} is {shown}.")


def _list_functions(
    kind: type, left_out: Sequence[str] = ("torch", "builtins", "paceline")
) -> Iterator[FunctionType]:
    """Yield the functions of a module's class that a forward may call, without those of some packages."""
    for each in kind.__mro__:
        if each.__module__.split(".")[0] in left_out:
            continue
        for name, found in vars(each).items():
            function = inspect.unwrap(found) if callable(found) else found
            if isinstance(function, FunctionType) and name != "__init__":
                yield function


def _list_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_code(constant)


def _find_reads(function: FunctionType) -> Iterator[str]:
    for code in _list_code(function.__code__):
        place = describe_place(code.co_filename, code.co_firstlineno, code.co_name)
        for name in _READS.intersection(code.co_names):
            yield f"asks for the rank by {name} ({place})"
        for name in _VARIABLES.intersection(each for each in code.co_consts if isinstance(each, str)):
            yield f"reads the rank from {name} ({place})"


def _read_outside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a function reads from its closure and from globals of its file."""
    closed = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    names = {name for code in _list_code(function.__code__) for name in code.co_names}
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    for name, value in {**found, **closed}.items():
        if _is_number(value):
            yield name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _router_error(saw: str) -> PacelineError:
    return PacelineError(
        "PL666",
        saw=saw,
        rule="A router sends equal tokens to the same experts on every rank. In one process there is one "
        "rank, so otherwise the numbers depend on the layout.",
        fix="Make the router depend on its input and its weights alone. Move work that only some ranks do, "
        "such as logging, out of the modules of the mixture.",
    )
