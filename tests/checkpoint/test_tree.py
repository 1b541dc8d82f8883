"""The codec: every tree comes back with its types, order and bits, and nothing else goes in."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.content import prepare_whole
from paceline.checkpoint.tensors import DTYPE_NAMES
from paceline.checkpoint.tree import MalformedTreeError, decode, encode, list_references
from paceline.errors import PacelineError
from tests.checkpoint.states import assert_same, read, read_tensors, save_content, write_tensors

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(DTYPE_NAMES)))
    shape = draw(shapes)
    num_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if dtype == torch.bool:
        data = bytes(byte % 2 for byte in data)
    tensor = torch.empty(shape, dtype=dtype)
    if data:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


arrays = hnp.arrays(
    st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(), hnp.byte_string_dtypes()), shapes
)
scalars = hnp.arrays(hnp.scalar_dtypes(), ()).map(lambda array: array[()])
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    tensors(),
    arrays,
    scalars,
)
keys = st.one_of(
    st.text(max_size=4),
    st.just("$"),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=2),
    st.tuples(st.text(max_size=2), st.integers()),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def through_text(tree: Any) -> Any:
    structure, held = encode(tree, "state")
    structure = json.loads(json.dumps(structure, allow_nan=False))
    assert sorted(list_references(structure)) == sorted(held)
    return decode(structure, held)


@settings(max_examples=150)
@given(trees)
def test_any_tree_comes_back(tree: Any) -> None:
    assert_same(through_text(tree), tree)


@settings(max_examples=50)
@given(tree=trees)
def test_any_tree_comes_back_from_disk(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tree") / "state.safetensors"
    structure, held = encode(tree, "state")
    record = write_tensors(path, held)
    assert record.num_bytes == path.stat().st_size
    assert_same(decode(structure, read_tensors(path)), tree)


def test_random_states_of_the_standard_generators_come_back() -> None:
    generator = np.random.default_rng(3)
    generator.standard_normal(7)
    tree = {
        "python": random.Random(1).getstate(),
        "numpy": generator.bit_generator.state,
        "old numpy": np.random.RandomState(5).get_state(),
        "torch": torch.Generator().manual_seed(2).get_state(),
    }
    again = through_text(tree)
    assert_same(again, tree)
    other = np.random.default_rng(0)
    other.bit_generator.state = again["numpy"]
    assert other.random() == generator.random()


def test_bits_of_nans_and_zeros_survive() -> None:
    odd = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0]
    tree = [-0.0, math.inf, -math.inf, odd, torch.tensor([-0.0, math.nan])]
    assert_same(through_text(tree), tree)


def test_what_changes_its_type() -> None:
    tree = {"o": OrderedDict(b=1, a=2), "s": torch.Size([2, 3]), "p": torch.nn.Parameter(torch.ones(2))}
    again = through_text(tree)
    assert_same(again["o"], {"b": 1, "a": 2})
    assert_same(again["s"], (2, 3))
    assert type(decode(*encode(tree, "state"))["s"]) is tuple


def test_parameters_come_back_as_plain_tensors(tmp_path: Path) -> None:
    structure, held = encode([torch.nn.Parameter(torch.ones(2))], "state")
    write_tensors(tmp_path / "t", held)
    (again,) = decode(structure, read_tensors(tmp_path / "t"))
    assert_same(again, torch.ones(2))
    assert not again.requires_grad


def test_one_tensor_at_two_places_stays_one(tmp_path: Path) -> None:
    shared = torch.arange(1000.0)
    prepared = prepare_whole({}, {}, {"a": shared, "b": [shared], "c": shared.clone()}, None)
    path = save_content(CheckpointFolder(tmp_path, keep=1), 1, prepared, identity={})
    again = read(path).state
    assert again["a"] is again["b"][0]
    assert again["a"] is not again["c"]
    assert prepared.num_bytes == 8000


def test_colliding_paths_get_names_of_their_own() -> None:
    tree = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "__metadata__": torch.tensor(3),
        "": torch.tensor(4),
    }
    assert_same(through_text(tree), tree)


Point = namedtuple("Point", "x y")


class Ema:
    def update(self) -> None: ...


def contains_itself() -> Any:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    return tree


REFUSED = {
    "a method": ({"tracked": {"ema": {"fn": Ema().update}}}, "state.tracked.ema.fn is a builtins.method."),
    "an object": ({"a": [1, Ema()]}, "state.a.1 is a tests.checkpoint.test_tree.Ema."),
    "a set": ({"a": {1, 2}}, "state.a is a builtins.set."),
    "a named tuple": ({"a": Point(1, 2)}, "state.a is a tests.checkpoint.test_tree.Point."),
    "a default dict": ({"a": defaultdict(int)}, "state.a is a collections.defaultdict."),
    "a complex": ({"a": 1j}, "state.a is a builtins.complex."),
    "an object array": ({"a": np.array([None])}, "state.a is of numpy's dtype object."),
    "a structured array": ({"a": np.zeros(2, "i4,f4")}, "state.a is of numpy's dtype"),
    "a masked array": ({"a": np.ma.zeros(2)}, "state.a is a numpy.ma"),
    "a sparse tensor": ({"a": torch.eye(2).to_sparse()}, "state.a is a tensor of layout torch.sparse_coo"),
    "a meta tensor": ({"a": torch.empty(2, device="meta")}, "state.a is a tensor on the meta device"),
    "a tensor of an odd type": (
        {"a": torch.zeros(2, dtype=torch.float8_e4m3fnuz)},
        "state.a is a tensor of torch.float8_e4m3fnuz",
    ),
    "an odd key": ({"a": {torch.float32: 1}}, "state.a.torch.float32 has a dtype as key"),
    "a tensor as key": ({"a": {(torch.ones(1),): 1}}, "has a tensor as key"),
    "itself": (contains_itself(), "nested more than 100 deep, or contains itself"),
}


@pytest.mark.parametrize(("tree", "saw"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_with_the_path(tree: Any, saw: str) -> None:
    with pytest.raises(PacelineError) as caught:
        encode(tree, "state")
    assert caught.value.code == "PL507"
    assert saw in caught.value.saw


@pytest.mark.parametrize(
    "structure",
    [
        {"$": "object"},
        {"$": "tensor", "name": "absent"},
        {"$": "tuple"},
        {"$": "int", "hex": "zz"},
        {"$": "float", "hex": "00"},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "scalar", "dtype": "|O", "base64": "AAAAAAAAAAA="},
        {"$": "scalar", "dtype": "<f8", "base64": "AAAA"},
    ],
)
def test_decode_refuses_what_encode_never_makes(structure: Any) -> None:
    with pytest.raises(MalformedTreeError):
        decode(structure, {})
