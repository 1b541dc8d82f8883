"""torch's records of a sharded model, under the names of several versions of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.torch_seams.fsdp import check_torch, list_groups, list_records


class Module:
    def __init__(self, **state: Any) -> None:
        names = ("_pre_forward", "_post_forward", "_pre_backward", "_register_pre_backward_hook")
        self._state = SimpleNamespace(**dict.fromkeys(names), **state)

    def _get_fsdp_state(self) -> Any:
        return self._state


class Record:
    _unsharded_param: Any

    def __init__(self) -> None:
        self.sharded_param = self.padded_sharded_param_size = None
        self.unsharded_accumulated_grad = None


def test_one_group_or_several() -> None:
    first, second = SimpleNamespace(fsdp_params=[1, 2]), SimpleNamespace(fsdp_params=[3])
    older: Any = Module(_fsdp_param_group=first)
    newer: Any = Module(_fsdp_param_groups=[first, second])
    empty: Any = Module(_fsdp_param_group=None)
    assert list_groups(older) == [first]
    assert list_records(older) == [1, 2]
    assert list_records(newer) == [1, 2, 3]
    assert list_records(empty) == []


def build_group(record: Record) -> Any:
    names = ("post_backward", "reduce_grads", "_register_post_backward_hook")
    return SimpleNamespace(fsdp_params=[record], **dict.fromkeys(names))


def test_every_name_is_there() -> None:
    module: Any = Module(_fsdp_param_groups=[build_group(Record())])
    check_torch([module])


@pytest.mark.parametrize(
    "missing",
    ["FSDPState._fsdp_param_groups", "FSDPParamGroup.fsdp_params", "FSDPParam.sharded_param"],
)
def test_a_missing_name_is_refused_with_the_version(missing: str) -> None:
    record = Record()
    del record.sharded_param
    states: dict[str, dict[str, Any]] = {
        "FSDPState._fsdp_param_groups": {},
        "FSDPParamGroup.fsdp_params": {"_fsdp_param_groups": [SimpleNamespace()]},
        "FSDPParam.sharded_param": {"_fsdp_param_group": build_group(record)},
    }
    module: Any = Module(**states[missing])
    with pytest.raises(PacelineError, match="PL449") as caught:
        check_torch([module])
    assert missing in str(caught.value)
    assert torch.__version__ in str(caught.value)
