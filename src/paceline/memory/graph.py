"""Walks autograd's graph from its roots, and sums what its nodes have saved, each storage once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.torch_seams.saved import (
    find_leaf,
    find_order,
    find_parameters,
    list_saved,
    read_local,
)

Key = tuple[str, int]
"""A storage: its device and its address."""


def find_storage(tensor: Any) -> tuple[Key, int] | None:
    """Return a tensor's storage and its bytes; `None` for one without memory of its own."""
    with suppress(Exception):  # sparse, functional and other tensors without a storage
        tensor = read_local(tensor)
        storage = tensor.untyped_storage()
        address, size = int(storage.data_ptr()), int(storage.nbytes())
        if address and size:
            return (str(storage.device), address), size
    return None


@dataclass(frozen=True)
class Saved:
    """A storage that a node keeps for backward.

    Attributes:
        is_fp32: whether the tensor has 32-bit floating-point numbers.
    """

    key: Key
    num_bytes: int
    order: int
    is_fp32: bool


@dataclass
class Graph:
    """The part of the graph below some roots.

    Attributes:
        saved: what its nodes keep.
        uses: by `id` of a parameter, the operations that use it, by their numbers.
        calls: by `id` of a parameter, how many nodes of one graph use it without a view in between: one per
            forward.
        num_nodes: nodes.
        newest: the highest number of a node.
        begins: the number of the newest forward's first node. The loss of the step before may still be in a
            variable: its graph has no saved tensors left, and uses every parameter.
    """

    saved: list[Saved] = field(default_factory=list)
    uses: dict[int, list[int]] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    num_nodes: int = 0
    newest: int = -1
    begins: int = 0


class GraphWalk:
    """One walk over the graph, in parts: a later part skips the nodes of earlier ones.

    Args:
        reads: whether to read what nodes save. Not while another thread runs backward, which frees it.
    """

    def __init__(self, torch: Any, *, reads: bool = True) -> None:
        self._tensor = torch.Tensor
        self._fp32 = torch.float32
        self._reads = reads
        self._seen: set[Any] = set()

    def add(self, roots: Iterable[Any]) -> Graph:
        """Walk from these nodes, and return what is new."""
        graph = Graph()
        todo = [root for root in dict.fromkeys(roots) if root not in self._seen]
        self._seen.update(todo)
        while todo:
            node = todo.pop()
            for child in list_children(node):
                if child not in self._seen:
                    self._seen.add(child)
                    todo.append(child)
            self._read(node, graph)
        return graph

    def add_newest_first(self, roots: Iterable[Any]) -> Graph:
        """Walk from these nodes, and find where the newest forward begins.

        A forward may have several graphs that are not joined yet. A graph that uses a parameter of a newer
        one belongs to a forward before.
        """
        groups = separate_graphs(root for root in roots if root not in self._seen)
        groups.sort(key=lambda group: max(map(find_order, group)), reverse=True)
        whole, used = Graph(), set[int]()
        for group in groups:
            part = self.add(sorted(group, key=find_order, reverse=True))
            if used & part.uses.keys():
                whole.begins = max(whole.begins, part.newest + 1)
            elif not whole.begins:
                used |= part.uses.keys()
            whole.saved += part.saved
            for parameter, orders in part.uses.items():
                whole.uses.setdefault(parameter, []).extend(orders)
            whole.calls |= part.calls
            whole.num_nodes += part.num_nodes
            whole.newest = max(whole.newest, part.newest)
        return whole

    def _read(self, node: Any, graph: Graph) -> None:
        graph.num_nodes += 1
        order = find_order(node)
        graph.newest = max(graph.newest, order)
        for parameter, is_direct in find_parameters(node):
            graph.uses.setdefault(id(parameter), []).append(order)
            graph.calls[id(parameter)] += is_direct
        if not self._reads:
            return
        for tensor in list_saved(node, self._tensor):
            storage = find_storage(tensor)
            if storage is not None:
                is_fp32 = getattr(tensor, "dtype", None) == self._fp32
                graph.saved.append(Saved(*storage, order, is_fp32))


def list_children(node: Any) -> Iterator[Any]:
    """Yield the nodes that a node leads to; not those that add up gradients, which all forwards share."""
    for child, _ in node.next_functions:
        if child is not None and find_leaf(child) is None:
            yield child


def list_below(node: Any) -> set[Any]:
    """Return a node and all nodes that it leads to."""
    seen, todo = {node}, [node]
    while todo:
        for child in list_children(todo.pop()):
            if child not in seen:
                seen.add(child)
                todo.append(child)
    return seen


def separate_graphs(nodes: Iterable[Any]) -> list[list[Any]]:
    """Return these nodes, the oldest first, by graphs that have no node in common."""
    groups: list[list[Any]] = []
    group_of: dict[Any, int] = {}
    for root in sorted(set(nodes), key=find_order):
        if root in group_of:
            groups[group_of[root]].append(root)
            continue
        here, meets, new, todo = len(groups), len(groups), [root], [root]
        group_of[root] = here
        while todo:
            for child in list_children(todo.pop()):
                if child not in group_of:
                    group_of[child] = here
                    new.append(child)
                    todo.append(child)
                elif group_of[child] != here:
                    meets = group_of[child]
        if meets != here:
            group_of.update(dict.fromkeys(new, meets))
        groups.append([])
        groups[meets].append(root)
    return [group for group in groups if group]
