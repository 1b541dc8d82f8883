"""What a training dtype means for weights, batches, forwards and gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.torch_seams.scaling import has_scaled, set_found_inf
from paceline.torch_seams.trees import tree_map_only

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """One of fp64, fp32, bf16 and fp16 on one device.

    fp64 and fp32 hold and compute everything in that type. bf16 and fp16 keep fp32 weights and
    gradients and run forwards under autocast; fp16 also needs a gradient scaler (`build_scaler`).

    Raises:
        PacelineError: PL401 for another name.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in DTYPES:
            raise PacelineError(
                "PL401",
                saw=f"dtype={name!r}.",
                rule=f"A training dtype is one of {', '.join(DTYPES)}.",
                fix='Use "fp32", or "bf16" for speed on hardware that has it.',
            )
        self.name = name
        self.device = device
        self._storage = torch.float64 if name == "fp64" else torch.float32
        self._autocast = DTYPES[name] if name in ("bf16", "fp16") else None

    def place_model(self, model: nn.Module) -> None:
        """Moves a model to the device and its floating-point tensors to the storage type, in place."""
        model.to(device=self.device)
        self.cast_model(model)

    def cast_model(self, model: nn.Module) -> None:
        """Turns a model's floating-point tensors into the storage type, in place."""
        if any(t.is_floating_point() and t.dtype != self._storage for t in model.parameters()):
            model.to(dtype=self._storage)
        elif self.name == "fp64":
            model.to(dtype=self._storage)  # buffers too

    def place_batch(self, batch: Any) -> Any:
        """A batch on the device; in fp64 its floating-point tensors are converted."""

        def place(tensor: Tensor) -> Tensor:
            wanted = torch.float64 if self.name == "fp64" and tensor.is_floating_point() else tensor.dtype
            return tensor.to(device=self.device, dtype=wanted, non_blocking=True)

        return tree_map_only(Tensor, place, batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forwards and losses."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def build_scaler(self) -> LossScaler | None:
        """A scaler of losses where small gradients would vanish (fp16), else `None`."""
        return LossScaler(self.device) if self.name == "fp16" else None


class LossScaler:
    """torch's GradScaler, told from outside whether the gradients are finite.

    torch's own looks at the gradients that a rank has, so that ranks with different parts of a model would
    come to different scales. Here all go by the one global norm. Gradients are unscaled by whoever multiplies
    them next, see `scale_of_gradients`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, which keeps small gradients from vanishing."""
        return self._scaler.scale(loss)

    def scale_of_gradients(self) -> float:
        """What gradients must be multiplied with to be those of the loss."""
        return 1.0 / float(self._scaler.get_scale())

    def update(self, *, found_finite: bool) -> None:
        """After a step: a smaller scale where a gradient was not finite, a larger one now and then."""
        if not has_scaled(self._scaler):  # a first step without any microbatch
            return
        found = torch.full((), 0.0 if found_finite else 1.0, device=self._device)
        set_found_inf(self._scaler, self._device, found)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As torch's."""
        self._scaler.load_state_dict(state)
