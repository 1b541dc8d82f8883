"""Compares a model and its optimizer with those that a trainer was built from, before each step.

Layouts, sums of gradients and checkpoints follow from the modules, parameters and groups at the build. Two
later changes are followed: trained parameters may be frozen and trained again, and modules may change their
mode. Ranks compare both in each step (`same_settings.py`). Other changes are refused by name.

An unchanged model costs a walk over its modules, about a microsecond for each.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.parallel.parameter_hooks import check_hooks, count_hooks
from paceline.phrases import name_some
from paceline.torch_seams.modules import own_buffers, own_modules, own_parameters
from paceline.torch_seams.tensors import identify
from paceline.train.several import Several

log = logging.getLogger(__name__)

_CHANGED = (
    "The layout, the sums of gradients and the checkpoints follow from the modules and parameters that the "
    "trainer was built with."
)


class AsBuilt:
    """A model and its optimizer as a trainer was built from them.

    Args:
        name: of the model, for messages.
        model: laid out.
        optimizer: over its parameters.
        logs: whether this rank logs remarks.
        cuts_gradients: whether no rank has the gradient of a microbatch for a whole parameter.

    Attributes:
        changes: what has changed since the build and is followed; the same on all ranks.
    """

    def __init__(
        self, name: str, model: nn.Module, optimizer: Optimizer, *, logs: bool, cuts_gradients: bool
    ) -> None:
        self.changes: tuple[str, ...] = ()
        self._name = name
        self._model = model
        self._optimizer = optimizer
        self._logs = logs
        self._cuts_gradients = cuts_gradients
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._distinct = list(model.modules())
        self._modes = {module: module.training for module in self._distinct}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._dtypes = {name: p.dtype for name, p in self._parameters.items()}
        self._frozen = {name for name, p in self._parameters.items() if not p.requires_grad}
        self._shards = [(n, p) for n, p in self._parameters.items() if isinstance(p, DTensor)]
        self._memory = [_find_memory(p) for _, p in self._shards]
        self._groups = self._list_groups()
        # Buffers may be registered until the first step.
        self._buffers: set[str] | None = None
        self._seen: list[Any] = []

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that were frozen at the build."""
        return sorted(self._frozen)

    def check(self) -> None:
        """Find changes; called before each step."""
        seen = self._read()
        if seen == self._seen:
            return
        self._refuse_parts()
        self._refuse_training()
        self._refuse_buffers()
        if self._cuts_gradients:
            check_hooks(self._parameters.items())
        frozen = [n for n, p in self._parameters.items() if not p.requires_grad and n not in self._frozen]
        self.changes = (*(f"{name} is frozen" for name in frozen), *self._list_modes())
        is_first = not self._seen
        if not self._model.training and (is_first or self._modes[self._model]) and self._logs:
            log.warning("%s", _describe_eval(self._name, self._model))
        self._seen = seen

    def _read(self) -> list[Any]:
        """Return what an unchanged model has unchanged."""
        found: list[Any] = []
        for module in self._distinct:
            parameters = own_parameters(module)
            found.append(module.training)
            found += map(id, own_modules(module).values())
            found += parameters.keys()
            found += [
                (id(p), p.requires_grad, p.dtype, self._cuts_gradients and count_hooks(p))
                for p in parameters.values()
                if p is not None
            ]
            found += own_buffers(module).keys()
        found += map(_find_memory, (p for _, p in self._shards))
        found.append(self._list_groups())
        return found

    def _list_groups(self) -> list[list[int]]:
        parts = self._optimizer.parts.values() if isinstance(self._optimizer, Several) else ()
        return [
            list(map(id, group["params"]))
            for each in (self._optimizer, *parts)
            for group in each.param_groups
        ]

    def _refuse_parts(self) -> None:
        """Raise PL390 if modules or parameters are others than at the build."""
        for kind, before, now in (
            ("module", self._modules, dict(self._model.named_modules(remove_duplicate=False))),
            ("parameter", self._parameters, dict(self._model.named_parameters(remove_duplicate=False))),
        ):
            found = [f"{n} was added" for n in now.keys() - before.keys()]
            found += [f"{n} was removed" for n in before.keys() - now.keys()]
            found += [f"{n} was replaced" for n in now.keys() & before.keys() if now[n] is not before[n]]
            if found:
                # The outermost comes first, and the modules inside of it say the same.
                raise _changed_error(f"{kind} {name_some(sorted(found, key=_depth), 3)}", self._name)
        dtypes = {name: p.dtype for name, p in self._parameters.items()}
        cast = [f"{n} from {d} to {dtypes[n]}" for n, d in self._dtypes.items() if dtypes[n] != d]
        if cast:
            raise _changed_error(f"the dtype of {name_some(cast, 3)} changed", self._name)
        assigned = [n for (n, p), m in zip(self._shards, self._memory, strict=True) if _find_memory(p) != m]
        if assigned:
            raise _changed_error(
                f"`.data` of {name_some(assigned, 3)} was assigned, without an effect on its shards,",
                self._name,
                fix="Write into the parameter: `with torch.no_grad(): parameter.copy_(value)`.",
            )

    def _refuse_training(self) -> None:
        """Raise PL390 if more is trained than at the build."""
        fix = (
            "Build the trainer with requires_grad=True for all that is trained at some time, in the groups "
            "of the optimizer, and freeze after the build what is trained later. Or save, build a new "
            "trainer that trains it, and resume with accept=['frozen']."
        )
        thawed = [name for name in self.frozen if self._parameters[name].requires_grad]
        if thawed:
            saw = f"requires_grad of {name_some(thawed, 3)} was turned on"
            raise _changed_error(saw, self._name, fix=fix)
        if self._list_groups() != self._groups:
            held = {each for group in self._groups for each in group}
            added = [
                p for group in self._optimizer.param_groups for p in group["params"] if id(p) not in held
            ]
            names = {id(p): name for name, p in self._parameters.items()}
            shown = name_some([names.get(id(p), f"a tensor of shape {list(p.shape)}") for p in added], 3)
            what = f"the optimizer got {shown}" if added else "the groups of the optimizer changed"
            raise _changed_error(what, self._name, fix=fix)

    def _refuse_buffers(self) -> None:
        """Raise PL393 for buffers of the checkpoint that were made after the first step began."""
        now = {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        if self._buffers is None:
            self._buffers = now
        made = now - self._buffers
        if made and (saved := sorted(made & self._model.state_dict(keep_vars=True).keys())):
            raise PacelineError(
                "PL393",
                saw=f"{name_some(saved, 3)} of {self._name} became a buffer after the first step had begun.",
                rule="Each rank makes such a buffer from samples of its own, so the result depends on the "
                "number of ranks. A resumed start cannot load it, because its model has no such buffer yet.",
                fix="Register the buffer in __init__, and set its value before the trainer is built, for "
                "example with one forward on the same samples on every rank. With persistent=False, it is "
                "no part of checkpoints.",
            )

    def _list_modes(self) -> list[str]:
        """Return the modules whose mode has changed, without those whose parent has changed alike."""
        found, covered = [], set[str]()
        for name, module in self._modules.items():
            if module.training == self._modes[module]:
                continue
            parent = name.rpartition(".")[0]
            if not name or parent not in covered or self._modules[parent].training != module.training:
                found.append(f"{name or 'the model'} is in {'training' if module.training else 'eval'} mode")
            covered.add(name)
        return found


def _find_memory(shard: Tensor) -> int:
    return identify(shard.untyped_storage())


def _depth(text: str) -> tuple[int, str]:
    return text.partition(" ")[0].count("."), text


def _changed_error(what: str, model: str, *, fix: str = "") -> PacelineError:
    return PacelineError(
        "PL390",
        saw=f"{what} after the trainer was built ({model}).",
        rule=_CHANGED,
        fix=fix
        or "Change the model before you build the trainer. In the middle of a run, save, change the model "
        "and build a new trainer from it. To change values only, write into the parameters in place, under "
        "torch.no_grad().",
    )


def _describe_eval(name: str, model: nn.Module) -> Finding:
    kinds: dict[str, int] = {}
    for module in model.modules():
        kind = type(module).__name__
        if not module.training and ("Dropout" in kind or "BatchNorm" in kind):
            kinds[kind] = kinds.get(kind, 0) + 1
    shown = "".join(f", {count} {kind}" for kind, count in kinds.items())
    return Finding(
        "PL394",
        name,
        f"the model is trained in eval mode{shown and f' ({shown[2:]})'}.",
        "Dropout is off, and BatchNorm uses its running statistics and does not update them. The trainer "
        "keeps the mode of each module. `from_pretrained` returns models in eval mode.",
        "Call model.train() before the first step, then eval() on single layers that are to stay in this "
        "mode. Do nothing if it is on purpose.",
    )
