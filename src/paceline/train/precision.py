"""Applies a training dtype to weights, batches, forwards and gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_seams.modules import convert_tensors
from paceline.torch_seams.trees import tree_map_only

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """A training dtype on one device: fp64, fp32, bf16 or fp16.

    With fp64 and fp32, everything is stored and computed in that type. With bf16 and fp16, weights and
    gradients are fp32 and forwards run under autocast; fp16 also needs a gradient scaler (`build_scaler`).
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self._storage = torch.float64 if name == "fp64" else torch.float32
        self._autocast = DTYPES[name] if name in ("bf16", "fp16") else None

    def place_model(self, model: nn.Module) -> None:
        """Move a model to the device and its tensors to the storage type, as `cast_model`, in place."""
        model.to(device=self.device)
        self.cast_model(model)

    def cast_model(self, model: nn.Module) -> None:
        """Convert a model's floating-point and complex tensors to the storage type, in place."""
        # In fp64 always: buffers may have another type where parameters have this one.
        if self.name == "fp64" or any(self._cast(p).dtype != p.dtype for p in model.parameters()):
            convert_tensors(model, self._cast)
        if any(each.is_conj() or each.is_neg() for each in [*model.parameters(), *model.buffers()]):
            # Ranks and files exchange bytes, which such a view does not have.
            convert_tensors(model, lambda each: each.resolve_conj().resolve_neg())

    def _cast(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the storage type, or the complex type of its width; others as they are."""
        if tensor.is_complex():
            return tensor.to(dtype=self._storage.to_complex())
        return tensor.to(dtype=self._storage) if tensor.is_floating_point() else tensor

    def place_batch(self, batch: Any) -> Any:
        """Move a batch to the device; in fp64 also convert its floating-point and complex tensors."""

        def place(tensor: Tensor) -> Tensor:
            placed = tensor.to(device=self.device, non_blocking=True)
            return self._cast(placed) if self.name == "fp64" else placed

        return tree_map_only(Tensor, place, batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forwards and losses."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def build_scaler(self) -> LossScaler | None:
        """Return a scaler of losses if small gradients would vanish (fp16), else `None`."""
        return LossScaler() if self.name == "fp16" else None


class LossScaler:
    """The scale of fp16 losses, by the rule of torch's GradScaler.

    torch's own check reads the gradients on one rank, so ranks with different parts of a model would choose
    different scales, and its scale is on the device, which a step would wait for. Here all ranks use the one
    global norm. Gradients are unscaled in the next pass that multiplies them anyway.
    """

    _GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000

    def __init__(self) -> None:
        self._scale, self._num_finite = 65536.0, 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, which keeps small gradients from vanishing."""
        return loss.float() * self._scale

    def scale_of_gradients(self) -> float:
        """Return the factor that turns the scaled gradients into those of the loss."""
        return 1.0 / self._scale

    def update(self, *, found_finite: bool) -> None:
        """Update the scale after a step: smaller if a gradient was not finite, larger from time to time."""
        self._num_finite = self._num_finite + 1 if found_finite else 0
        if not found_finite:
            self._scale *= self._BACKOFF
        elif self._num_finite == self._INTERVAL:
            self._num_finite = 0
            self._scale = min(self._scale * self._GROWTH, 2.0**127)  # the largest of fp32

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch's scaler has it."""
        return {
            "scale": self._scale,
            "growth_factor": self._GROWTH,
            "backoff_factor": self._BACKOFF,
            "growth_interval": self._INTERVAL,
            "_growth_tracker": self._num_finite,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returns."""
        self._scale, self._num_finite = float(state["scale"]), int(state["_growth_tracker"])
