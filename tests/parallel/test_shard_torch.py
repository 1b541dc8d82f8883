"""torch's records of a sharded model, under the names of several versions of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.parallel.shard.torch_records import check_torch, list_groups, list_records


class Module:
    def __init__(self, **state: Any) -> None:
        self._state = SimpleNamespace(_pre_forward=None, _post_forward=None, **state)

    def _get_fsdp_state(self) -> Any:
        return self._state


class Record:
    _unsharded_param: Any

    def __init__(self) -> None:
        self.sharded_param = self.sharded_size = self.padded_sharded_param_size = None
        self.unsharded_accumulated_grad = self._sharded_param_data = None


def test_one_group_or_several() -> None:
    first, second = SimpleNamespace(fsdp_params=[1, 2]), SimpleNamespace(fsdp_params=[3])
    older: Any = Module(_fsdp_param_group=first)
    newer: Any = Module(_fsdp_param_groups=[first, second])
    empty: Any = Module(_fsdp_param_group=None)
    assert list_groups(older) == [first]
    assert list_records(older) == [1, 2]
    assert list_records(newer) == [1, 2, 3]
    assert list_records(empty) == []


def test_every_name_is_there() -> None:
    module: Any = Module(
        _fsdp_param_groups=[SimpleNamespace(fsdp_params=[Record()], post_backward=1, reduce_grads=1)]
    )
    check_torch([module])


@pytest.mark.parametrize(
    "missing",
    ["FSDPState._fsdp_param_groups", "FSDPParamGroup.fsdp_params", "FSDPParam.sharded_size"],
)
def test_a_missing_name_is_refused_with_the_version(missing: str) -> None:
    record = Record()
    del record.sharded_size
    states: dict[str, dict[str, Any]] = {
        "FSDPState._fsdp_param_groups": {},
        "FSDPParamGroup.fsdp_params": {"_fsdp_param_groups": [SimpleNamespace()]},
        "FSDPParam.sharded_size": {
            "_fsdp_param_group": SimpleNamespace(fsdp_params=[record], post_backward=1, reduce_grads=1)
        },
    }
    module: Any = Module(**states[missing])
    with pytest.raises(PacelineError, match="PL449") as caught:
        check_torch([module])
    assert missing in str(caught.value)
    assert torch.__version__ in str(caught.value)
