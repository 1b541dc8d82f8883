"""torch's records of a sharded model, under the names of several versions of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.parallel.shard.setup import ShardSettings, apply_sharding
from paceline.torch_seams.fsdp import list_groups, list_records
from paceline.torch_seams.table import NAMES, TorchName


class Module:
    def __init__(self, **state: Any) -> None:
        names = ("_pre_forward", "_post_forward", "_pre_backward", "_register_pre_backward_hook")
        self._state = SimpleNamespace(**dict.fromkeys(names), **state)

    def _get_fsdp_state(self) -> Any:
        return self._state


def test_one_group_or_several() -> None:
    first, second = SimpleNamespace(fsdp_params=[1, 2]), SimpleNamespace(fsdp_params=[3])
    older: Any = Module(_fsdp_param_group=first)
    newer: Any = Module(_fsdp_param_groups=[first, second])
    empty: Any = Module(_fsdp_param_group=None)
    assert list_groups(older) == [first]
    assert list_records(older) == [1, 2]
    assert list_records(newer) == [1, 2, 3]
    assert list_records(empty) == []


def test_a_missing_name_is_refused_before_a_model_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "fsdp", (TorchName("torch.distributed.fsdp.FSDPModule._no_such", "shards"),))
    with pytest.raises(PacelineError, match=r"FSDPModule\._no_such \(shards\).*PL396"):
        apply_sharding(torch.nn.Linear(2, 2), None, ShardSettings(), zero=3, offload="none")  # type: ignore[arg-type]
