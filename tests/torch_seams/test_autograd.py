"""The nodes of autograd that only view their input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.torch_seams.autograd import is_view


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(6),
        lambda x: x.reshape(3, 2),
        lambda x: x.T,
        lambda x: x.t(),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x.unsqueeze(0),
        lambda x: x[None].squeeze(0),
        lambda x: x[None].squeeze(),
        lambda x: x[None].squeeze((0,)),
        lambda x: x.expand(4, 2, 3),
        lambda x: x.clone(),
        lambda x: x.double(),
        lambda x: x[1:],
        lambda x: x[0],
        lambda x: x.split(1)[0],
        lambda x: x.split([1, 1])[0],
        lambda x: x.chunk(2)[0],
        lambda x: x.unbind()[0],
        lambda x: x.T.reshape(6),
        lambda x: torch.view_as_complex(x.view(3, 2)),
        lambda x: torch.view_as_real(x.cfloat()),
    ],
)
def test_views(view: Callable[[Tensor], Tensor]) -> None:
    assert is_view(view(torch.ones(2, 3, requires_grad=True)).grad_fn)


@pytest.mark.parametrize("change", [torch.tanh, torch.tan, torch.tril, torch.trunc, torch.sum, torch.relu])
def test_what_changes_values_is_no_view(change: Callable[[Tensor], Tensor]) -> None:
    assert not is_view(change(torch.ones(2, 3, requires_grad=True)).grad_fn)
