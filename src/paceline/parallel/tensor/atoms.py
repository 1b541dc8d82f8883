"""Which dimensions of a model's tensors are one and the same thing.

Every dimension of every tensor in a trace is a product of atoms, the outermost first: a packed projection
of queries, keys and values gives features of 3 x heads x width. An operation says which dimensions must be
cut alike, and so makes atoms one (`unify`): a view of features as heads splits an atom into two, an addition
makes those of its operands equal, a product of matrices those that it sums over. What remains is a few
hundred classes. Cutting one of them over the ranks means: every tensor that has it is cut there, all else is
whole. An operation that needs all of an atom at once (a norm, a softmax) pins it: it can't be cut.

The idea is that of named or logical axes (Xu et al. 2021, GSPMD; Mesh-TensorFlow, Shazeer et al. 2018), with
the names found instead of given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Dim = tuple["Atom", ...]


class Atom:
    """A factor of a dimension, of at least 2.

    Attributes:
        size: how many places.
        pinned: why it can't be cut, or `None`.
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
        """Says that it can't be cut, and why; the first reason stays."""
        for atom in leaves((self,)):
            atom._pinned = atom._pinned or reason


def leaves(dim: Iterable[Atom]) -> Dim:
    """The atoms that a dimension consists of by now, each one standing for its class."""
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
    """A dimension of its own; of size 1 it has no atoms."""
    return (Atom(size),) if size > 1 else ()


def pin(dim: Iterable[Atom], reason: str) -> None:
    """Pins all atoms of a dimension."""
    for atom in leaves(dim):
        atom.pin(reason)


def unify(left: Sequence[Atom], right: Sequence[Atom], reason: str) -> None:
    """Makes two products of equal size one and the same, atom by atom.

    Args:
        left, right: atoms in order; may stem from several dimensions that an operation regroups.
        reason: what to say of atoms whose sizes don't nest (6 x 4 seen as 4 x 6), which are pinned.
    """
    while True:
        a, b = leaves(left), leaves(right)
        differing = next((n for n in range(min(len(a), len(b))) if a[n] is not b[n]), None)
        if differing is None:
            assert len(a) == len(b), (a, b)
            return
        x, y = a[differing], b[differing]
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
    """What is left of a dimension when `outer` equal runs of it are taken apart; these are pinned.

    Returns:
        The atoms of one run; all of them fresh and pinned where the sizes don't nest.
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
    # An atom that is there twice would be split in both places; that is right, too.
    return atom.size // outer > 1 and atom in others


def _split(atom: Atom, outer: int) -> None:
    parts = (Atom(outer), Atom(atom.size // outer))
    for part in parts:
        part._pinned = atom._pinned
    atom._parts = parts
