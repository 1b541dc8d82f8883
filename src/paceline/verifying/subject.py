"""The subject of a verification: a recipe, or the user's model, batches and loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paceline.data import build_data
from paceline.data.share import Share, count_owned, owned_microbatches, split_microbatches
from paceline.errors import PacelineError
from paceline.recipe import Layout, Recipe, Rules
from paceline.recipe.compress import CompressSection
from paceline.recipe.explain import SectionT, validate_section
from paceline.recipe.islands import IslandsSection
from paceline.recipe.section import Section
from paceline.torch_seams.trees import tree_map_only
from paceline.train.batches import count_samples
from paceline.train.run import build_loader, build_trainer, count_steps
from paceline.train.trainer import Trainer

# A user's global batch is cut into this many microbatches if no size is given, as the trainer does it.
_NUM_MICROBATCHES = 8
_NAMES: dict[type[Section], str] = {CompressSection: "compress", IslandsSection: "islands"}


class Opened(Protocol):
    """A subject opened on a rank, with its data loaded."""

    def build_trainer(self, layout: Layout, *, reduction: str, clip_norm: float) -> Trainer:
        """Build a fresh trainer on the current world; collective."""

    def give_shares(self, trainer: Trainer) -> Iterator[Share]:
        """Yield this rank's share of one global batch after another; batches are equal on every layout."""


class Subject(Protocol):
    """The model and data that are verified; sent to every rank.

    Attributes:
        dtype: of training, see `Precision`.
        reduction: `"fast"` or `"exact"`.
        clip_norm: global gradient norm to clip to, 0 for none.
        num_steps: optimizer steps to compare.
        start: arguments of `paceline.start`.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def reduction(self) -> str: ...
    @property
    def clip_norm(self) -> float: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def start(self) -> dict[str, Any]: ...

    def open(self) -> Opened:
        """Read the data; called once on every rank."""

    def with_dtype(self, dtype: str) -> Subject:
        """Return the same subject, trained in another dtype."""

    def read(self, section: type[SectionT]) -> SectionT:
        """Return its compression of gradients, or its islands."""

    def with_section(self, section: Section, num_steps: int) -> Subject:
        """Return the same subject with another section, and this number of steps to compare."""


@dataclass(frozen=True)
class RecipeSubject:
    """A recipe; its own layout is replaced by those that are verified."""

    recipe: Recipe
    num_steps: int

    @property
    def dtype(self) -> str:
        return self.recipe.train.dtype

    @property
    def reduction(self) -> str:
        return self.recipe.train.reduction

    @property
    def clip_norm(self) -> float:
        return self.recipe.train.clip_norm

    @property
    def start(self) -> dict[str, Any]:
        train = self.recipe.train
        threads = train.threads_per_rank
        return {
            "device": train.device,
            "timeout_s": train.timeout_s,
            "seed": train.seed,
            # The number of threads is fixed for any number of ranks, because it changes the last bits of
            # results.
            "threads_per_rank": 1 if threads == "auto" else threads,
            "deterministic": train.deterministic,
        }

    def open(self) -> _OpenedRecipe:
        return _OpenedRecipe(self.recipe)

    def with_dtype(self, dtype: str) -> RecipeSubject:
        train = self.recipe.train.model_copy(update={"dtype": dtype})
        return replace(self, recipe=self.recipe.model_copy(update={"train": train}))

    def read(self, section: type[SectionT]) -> SectionT:
        found: SectionT = getattr(self.recipe, _NAMES[section])
        return found

    def with_section(self, section: Section, num_steps: int) -> RecipeSubject:
        recipe = self.recipe.model_copy(update={_NAMES[type(section)]: section})
        return replace(self, recipe=recipe, num_steps=num_steps)


class _OpenedRecipe:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._data = build_data(recipe)
        # The schedule is that of the whole run, although only its first steps are taken.
        self._num_steps = count_steps(recipe, len(self._data.train))  # type: ignore[arg-type]

    def build_trainer(self, layout: Layout, *, reduction: str, clip_norm: float) -> Trainer:
        return build_trainer(self._adapt(layout, reduction, clip_norm), self._data, self._num_steps)

    def give_shares(self, trainer: Trainer) -> Iterator[Share]:
        section = self._recipe.loader.model_copy(update={"num_workers": 0})  # they change speed alone
        train = self._recipe.train.model_copy(update={"epochs": None, "steps": self._num_steps})
        recipe = self._recipe.model_copy(update={"loader": section, "train": train})
        loader = build_loader(recipe, trainer, self._data.train, train=True)
        while True:
            yield from loader

    def _adapt(self, layout: Layout, reduction: str, clip_norm: float) -> Recipe:
        train = self._recipe.train.model_copy(update={"reduction": reduction, "clip_norm": clip_norm})
        _, run = Rules.of(self._recipe).settle(layout, layout.num_ranks)
        return self._recipe.with_layout(layout, train=train, shard=run.shard, ddp=run.ddp)


@dataclass(frozen=True)
class UserSubject:
    """A model and what to train it on, as `paceline.verify` takes them."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Any
    loss: Callable[[Any, Any], Any]
    forward: Callable[[Any, Any], Any] | None
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    num_steps: int
    dtype: str
    reduction: str
    clip_norm: float
    microbatch_size: int | None
    global_batch_size: int | None
    seed: int
    device: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> dict[str, Any]:
        return {"device": self.device, "seed": self.seed, "threads_per_rank": 1}

    def open(self) -> _OpenedUser:
        return _OpenedUser(self)

    def with_dtype(self, dtype: str) -> UserSubject:
        return replace(self, dtype=dtype)

    def settle_type(self) -> UserSubject:
        """Return it in fp64 if its type is `"auto"`, or in fp32 if gradients are compressed."""
        if self.dtype != "auto":
            return self
        return self.with_dtype("fp64" if self.read(CompressSection).kind == "none" else "fp32")

    def read(self, section: type[SectionT]) -> SectionT:
        name = _NAMES[section]
        found: SectionT = validate_section(name, section, self.settings.get(name))
        return found

    def with_section(self, section: Section, num_steps: int) -> UserSubject:
        return replace(self, settings=self.settings | {_NAMES[type(section)]: section}, num_steps=num_steps)

    def check_data(self) -> None:
        """Raise PL721 for data that give no global batches."""
        data = self.batch_fn
        is_data_set = self.global_batch_size and (hasattr(data, "__iter__") or hasattr(data, "__getitem__"))
        if not callable(data) and not is_data_set:
            raise PacelineError(
                "PL721",
                saw=f"batch_fn={type(data).__name__} with global_batch_size={self.global_batch_size}.",
                rule="A data set provides samples, so the size of a global batch must be given.",
                fix="Pass a data set and global_batch_size=16, or a function from step to global batch.",
            )


class _OpenedUser:
    def __init__(self, subject: UserSubject) -> None:
        self._subject = subject

    def build_trainer(self, layout: Layout, *, reduction: str, clip_norm: float) -> Trainer:
        subject = self._subject
        given: dict[str, Any] = {"example": self._give_example()} | subject.settings
        given |= {"dtype": subject.dtype, "reduction": reduction}
        return Trainer(
            subject.model_fn,
            forward=subject.forward,
            loss=subject.loss,
            optimizer=subject.optimizer,
            layout=layout,
            microbatch_size=self._choose_microbatch_size(),
            clip_norm=clip_norm,
            seed=subject.seed,
            **given,
        )

    def _choose_microbatch_size(self) -> int | None:
        """Return the microbatch size asked for, or the one that a loader would choose.

        It is always passed on, so that no trainer tries out whether a size fits.
        """
        size, total = self._subject.microbatch_size, self._subject.global_batch_size
        if size is None and total is not None and not callable(self._subject.batch_fn):
            return max(1, total // _NUM_MICROBATCHES)
        return size

    def _give_example(self) -> Any:
        """Return a batch from which `Trainer` reads how the model can be split."""
        source = self._subject.batch_fn
        if callable(source):
            return source(1)
        samples = (
            iter(source) if hasattr(source, "__iter__") else (source[place] for place in itertools.count())
        )
        return default_collate(list(itertools.islice(samples, 2)))

    def give_shares(self, trainer: Trainer) -> Iterator[Share]:
        subject = self._subject
        if not callable(subject.batch_fn):
            loader = trainer.loader(subject.batch_fn, global_batch_size=subject.global_batch_size)
            while True:
                yield from loader
        start = 0
        for step in itertools.count(1):
            batch = subject.batch_fn(step)
            share = self._share_out(batch, step, start, trainer)
            start += share.num_samples
            yield share

    def _share_out(self, batch: Any, step: int, start: int, trainer: Trainer) -> Share:
        num_samples = count_samples(batch)
        size = self._subject.microbatch_size or max(1, num_samples // _NUM_MICROBATCHES)
        cuts = split_microbatches(num_samples, size)
        layout = trainer.layout

        def cut(first: int, last: int) -> Any:
            return tree_map_only(Tensor, lambda tensor: tensor[first:last] if tensor.dim() else tensor, batch)

        owned = owned_microbatches(
            len(cuts), layout.dp, layout.find_dp_rank(trainer.world.rank), trainer.num_slots, trainer.turns
        )
        return Share(
            epoch=0,
            number=step - 1,
            num_samples=num_samples,
            num_owned=count_owned(len(cuts), layout.dp, trainer.num_slots),
            microbatches=[(number, cut(*cuts[number])) for number in owned],
            samples=[range(*cuts[number]) for number in owned],
            start=start,
            turns=trainer.turns,
        )
