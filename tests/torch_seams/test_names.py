"""The private names of torch: which of them the installed torch lacks, and how that is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paceline.errors import PacelineError
from paceline.torch_seams import installed
from paceline.torch_seams.elastic import forget_store
from paceline.torch_seams.groups import forget_group_count
from paceline.torch_seams.installed import find_missing, has_name, require, set_existing
from paceline.torch_seams.table import NAMES, TorchName


def test_the_installed_torch_has_every_name() -> None:
    missing = [f"{topic}: {name.path}" for topic, names in NAMES.items() for name in find_missing(names)]
    assert not missing, f"torch {torch.__version__} lacks\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("path", "is_there"),
    [
        ("torch._foreach_norm", True),
        ("torch._no_such", False),
        ("torch._subclasses.fake_tensor.FakeTensor", True),  # in a module that is imported for it
        ("torch._no_such.fake_tensor.FakeTensor", False),
        ("torch.nn.Module._parameters", True),  # declared by the class
        ("torch.nn.Module._parametres", False),
        ("torch.amp.GradScaler._scale", True),  # set by a method
        ("torch.amp.GradScaler._skale", False),
        ("torch.Tensor._version", True),
        ("torch.ops.aten._safe_softmax", True),
        ("torch.ops.aten._no_such", False),
        ("torch.nn.Module._no_such.name", False),
    ],
)
def test_names_are_found(path: str, is_there: bool) -> None:
    assert has_name(path) == is_there


def test_all_missing_names_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        installed.NAMES,
        "modules",
        (
            TorchName("torch._first", "adds"),
            TorchName("torch.nn.Module._parameters", "reads"),
            TorchName("torch._second or torch._third", "takes away"),
            TorchName("torch._fourth or torch.nn", "is one of two"),
            TorchName("torch._fifth", "is done without", fallback="a slower way"),
        ),
    )
    with pytest.raises(PacelineError, match="PL396") as caught:
        require("modules")
    assert caught.value.saw == (
        f"torch {torch.__version__} has no torch._first (adds), "
        "no torch._second or torch._third (takes away)."
    )


def test_an_attribute_that_is_not_there_is_not_set() -> None:
    owner = SimpleNamespace(kept=1)
    set_existing(owner, "kept", 2)
    assert owner.kept == 2
    with pytest.raises(PacelineError, match="PL396") as caught:
        set_existing(owner, "lost", 2)
    assert "SimpleNamespace.lost" in str(caught.value)
    assert not hasattr(owner, "lost")


def test_a_renamed_group_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_group_count()
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace())
    with pytest.raises(PacelineError, match="PL396"):
        forget_group_count()


@pytest.mark.parametrize("lost", ["_bootstrap_store_info", "_shared_tcp_store_server"])
def test_a_renamed_store_is_refused(lost: str) -> None:
    handler: Any = DynamicRendezvousHandler.__new__(DynamicRendezvousHandler)
    handler._bootstrap_store_info = handler._shared_tcp_store_server = 1
    forget_store(handler)
    assert (handler._bootstrap_store_info, handler._shared_tcp_store_server) == (None, None)
    delattr(handler, lost)
    with pytest.raises(PacelineError, match="PL396"):
        forget_store(handler)


def test_a_rendezvous_of_another_kind_has_no_store_to_forget() -> None:
    other: Any = SimpleNamespace()
    forget_store(other)
    assert not vars(other)
