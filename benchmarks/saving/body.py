"""One measurement of run.py, on every rank: saves in all ways in turn, around the steps of one trainer."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from paceline.train.state.saving import Saving
from paceline.train.trainer import Trainer

WIDTH = 1024
# Steps between two saves, and the most that are taken until a save is durable.
BASE_STEPS, MOST_STEPS = 4, 400


class Samples:
    """Random vectors."""

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Measurement:
    """A trainer, and the ways to save its state.

    Args:
        world: the ranks.
        num_millions: parameters of the model, in millions.
        layout: of the trainer.
        folder: for all that is saved.
    """

    def __init__(self, world: Any, num_millions: float, layout: str, folder: Path) -> None:
        self.world, self.folder = world, folder
        num_layers = max(1, round(num_millions * 1e6 / WIDTH**2))
        self.trainer = Trainer(
            lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]),
            forward=lambda model, batch: model(batch),
            loss=lambda output, batch: (output.square().sum(), output.numel()),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4, foreach=True),
            layout=layout,
            microbatch_size=4,
            reduction="fast",
            keep=1,
        )
        self._loader = self.trainer.loader(Samples(), global_batch_size=4 * world.world_size)
        self.trainer.resume(folder / "run")
        self._batches = iter(self._loader)
        # A group of its own: on the training group, an asynchronous DCP save can hang.
        self._group = dist.new_group(backend="gloo")
        self._stager: Any = None
        self._waited_s = 0.0
        self._savings = {
            "paceline full": Saving(world, "full", False, 3),
            "paceline sharded": Saving(world, "sharded", False, 3),
            "paceline full, asynchronous": Saving(world, "full", True, 3),
            "paceline sharded, asynchronous": Saving(world, "sharded", True, 3),
        }
        for saving in self._savings.values():
            saving.start()
        for _ in range(3):
            self.step()

    def step(self) -> float:
        """Take a step; return its seconds, all ranks together."""
        begin_s = time.perf_counter()
        try:
            share = next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            share = next(self._batches)
        self.trainer.step(share)
        return time.perf_counter() - begin_s

    def state(self) -> dict[str, Tensor]:
        """Return weights and optimizer state as torch keeps them: DTensors under dp_shard."""
        found = dict(self.trainer.models["model"].named_parameters())
        optimizer = self.trainer._updates["model"].optimizer
        names = {parameter: name for name, parameter in found.items()}
        for parameter, held in optimizer.state.items():
            found |= {f"{names[parameter]}.{key}": value for key, value in held.items() if value.dim()}
        return {name: value.detach() for name, value in found.items()}

    def ways(self) -> dict[str, Callable[[int], Callable[[], bool]]]:
        """Return by name a function that saves and returns another: whether the save is durable."""
        return {
            "torch.save, barrier": self._torch_save,
            "dcp.save": self._dcp_save,
            "dcp.async_save, thread": self._dcp_thread,
            "dcp.async_save, process": self._dcp_process,
            **{name: self._make_paceline(name) for name in self._savings},
        }

    def _path(self, number: int) -> Path:
        return self.folder / f"other-{number}"

    def _torch_save(self, number: int) -> Callable[[], bool]:
        whole = {}
        for name, tensor in self.state().items():
            value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.world.is_main:
                whole[name] = value
        if self.world.is_main:
            torch.save(whole, self._path(number))
        dist.barrier()
        return lambda: True

    def _dcp_save(self, number: int) -> Callable[[], bool]:
        dcp.save(self.state(), checkpoint_id=self._path(number))
        return lambda: True

    def _dcp_thread(self, number: int) -> Callable[[], bool]:
        future = dcp.async_save(self.state(), checkpoint_id=self._path(number), process_group=self._group)
        return future.done  # type: ignore[union-attr]

    def _dcp_process(self, number: int) -> Callable[[], bool]:
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(False, True, False, False))
        response: Any = dcp.async_save(
            self.state(),
            checkpoint_id=self._path(number),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        return getattr(response, "upload_completion", response).done

    def _make_paceline(self, name: str) -> Callable[[int], Callable[[], bool]]:
        saving = self._savings[name]

        def save(number: int) -> Callable[[], bool]:
            handle = self.trainer.save()

            def is_done() -> bool:
                if handle.outcome is None:
                    saving._receive(0.0)
                return handle.outcome is not None or saving._outcome is not None or not saving._is_writing

            return is_done

        return save

    def select(self, name: str) -> Saving | None:
        """Make the trainer save in one of Paceline's ways, after ending the previous save."""
        saving = self._savings.get(name)
        if saving is not None:
            self.trainer._saver.saving = saving
            self.trainer._saver._last = None

        def wait() -> None:
            begin_s = time.perf_counter()
            if saving is not None:
                saving.before_write()
            self._waited_s += time.perf_counter() - begin_s

        self.trainer.wait_before_writing(wait)
        return saving

    def measure(self, name: str, number: int) -> dict[str, float]:
        """Measure one save, with the steps before and after it; the slowest rank counts."""
        saving = self.select(name)
        base_s = statistics.median(self.step() for _ in range(BASE_STEPS))
        dist.barrier()
        begin_s = time.perf_counter()
        is_done = self.ways()[name](number)
        stall_s = time.perf_counter() - begin_s
        flag, later = torch.zeros(1), []
        durable_s = None
        while len(later) < MOST_STEPS:
            done = is_done()
            if done and durable_s is None:
                durable_s = time.perf_counter() - begin_s
            flag[0] = not done
            dist.all_reduce(flag)
            if flag.item() == 0 and later:
                break
            self._waited_s = 0.0
            took_s = self.step()
            stall_s += self._waited_s  # the optimizer's step waits for the copy
            later.append(took_s - self._waited_s)
        if saving is not None and saving._pending is not None:
            saving.finish(saving._pending)
        numbers = torch.tensor(
            [stall_s, durable_s or 0.0, sum(max(0.0, each - base_s) for each in later), base_s]
        )
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        dist.barrier()
        if self.world.is_main:
            shutil.rmtree(self._path(number), ignore_errors=True)
            with suppress(OSError):
                self._path(number).unlink()
        return dict(zip(("stall_s", "durable_s", "excess_s", "step_s"), numbers.tolist(), strict=True))

    def count(self) -> dict[str, Any]:
        """Return bytes and memory of one asynchronous sharded save on this rank."""
        saving = self.select("paceline sharded, asynchronous")
        assert saving is not None
        background = saving.background
        assert background is not None
        self.step()
        before = background.num_copied_bytes
        path = self.trainer.save(wait=True).wait()
        sizes = {each.name: each.stat().st_size for each in path.iterdir()}
        whole = sum(value.numel() * value.element_size() for value in self.state().values())
        return {
            "rank": self.world.rank,
            "state_bytes": whole,
            "copied_bytes": background.num_copied_bytes - before,
            "written_bytes": sizes[f"part-{self.world.rank:05d}.safetensors"],
            "memory_bytes": background._memory.num_bytes,
        }

    def close(self) -> None:
        """Wait for the last saves."""
        for saving in self._savings.values():
            saving.close()
