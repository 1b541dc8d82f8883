"""Determines which dimensions of a model's tensors are the same.

Every dimension of every tensor in a trace is a product of atoms, the outermost first: a packed projection of
queries, keys and values yields features of 3 x heads x width. An operation determines which dimensions must
be cut in the same way, and so makes atoms equal (`unify`): a view of features as heads splits an atom into
two, an addition equates those of its operands, a product of matrices those that it sums over. A few hundred
classes remain. Cutting one of them over the ranks means that every tensor that has it is cut there, and all
others are whole. An operation that needs all of an atom at once (a norm, a softmax) pins it: it cannot be
cut.

The idea is that of named or logical axes (Xu et al. 2021, GSPMD; Mesh-TensorFlow, Shazeer et al. 2018),
except that the names are found instead of given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Dim = tuple["Atom", ...]


class Atom:
    """A factor of a dimension, of size 2 or more.

    Attributes:
        size: number of places.
        pinned: why it cannot be cut, or `None`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pinned: str | None = None
        self._same: Atom | None = None
        self._parts: Dim | None = None

    @property
    def pinned(self) -> str | None:
        return self._pinned

    def pin(self, reason: str) -> None:
        """Mark the atom as one that cannot be cut, with the reason; the first reason stays."""
        for atom in leaves((self,)):
            atom._pinned = atom._pinned or reason


def leaves(dim: Iterable[Atom]) -> Dim:
    """Return the atoms that a dimension consists of now, each one representing its class."""
    found: list[Atom] = []
    for atom in dim:
        while atom._same is not None:
            atom = atom._same
        if atom._parts is None:
            found.append(atom)
        else:
            found.extend(leaves(atom._parts))
    return tuple(found)


def new_dim(size: int) -> Dim:
    """Return a new dimension with atoms of its own; of size 1 it has none."""
    return (Atom(size),) if size > 1 else ()


def pin(dim: Iterable[Atom], reason: str) -> None:
    """Pin all atoms of a dimension."""
    for atom in leaves(dim):
        atom.pin(reason)


def unify(left: Sequence[Atom], right: Sequence[Atom], reason: str) -> None:
    """Make two products of equal size the same, atom by atom.

    Args:
        left, right: atoms in order; may come from several dimensions that an operation regroups.
        reason: of pinning atoms whose sizes do not nest (6 x 4 viewed as 4 x 6).
    """
    while True:
        a, b = leaves(left), leaves(right)
        differing = next((n for n in range(min(len(a), len(b))) if a[n] is not b[n]), None)
        if differing is None:
            assert len(a) == len(b), (a, b)
            return
        x, y = a[differing], b[differing]
        # The outermost pair that differs: equal sizes make one atom; else the larger is split by the smaller.
        if x.size == y.size:
            x._pinned = x._pinned or y._pinned
            y._same = x
        elif x.size % y.size == 0 and _splits(x, y.size, (*a, *b)):
            _split(x, y.size)
        elif y.size % x.size == 0 and _splits(y, x.size, (*a, *b)):
            _split(y, x.size)
        else:
            for atom in (*a[differing:], *b[differing:]):
                atom.pin(reason)
            return


def divide(dim: Sequence[Atom], outer: int, reason: str) -> Dim:
    """Return one of `outer` equal runs of a dimension; the number of runs is pinned.

    Returns:
        The atoms of one run; new and pinned ones if the sizes do not nest.
    """
    size = 1
    for atom in leaves(dim):
        size *= atom.size
    assert size % outer == 0
    if outer == 1:
        return leaves(dim)
    first, rest = Atom(outer), new_dim(size // outer)
    unify((first, *rest), dim, reason)
    first.pin(reason)
    return leaves(rest)


def _splits(atom: Atom, outer: int, others: Dim) -> bool:
    # An atom that occurs twice would be split in both places, which is correct too.
    return atom.size // outer > 1 and atom in others


def _split(atom: Atom, outer: int) -> None:
    parts = (Atom(outer), Atom(atom.size // outer))
    for part in parts:
        part._pinned = atom._pinned
    atom._parts = parts
