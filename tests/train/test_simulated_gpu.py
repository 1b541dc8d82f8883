"""Steps on a simulated GPU: tensors of two devices never meet, and the host waits for it once per step.

It has no numbers, no kernels and no other ranks, so it shows neither results nor speed.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline
from paceline.checkpoint.tensors import FilePlan
from paceline.checkpoint.writing.state_copy import CopyMemory, StateCopy, measure
from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel import norm
from paceline.parallel.batchnorm import ForwardBuffer, list_forward_buffers
from paceline.parallel.context import gather
from paceline.parallel.context.division import Division
from paceline.parallel.context.row_exchange import Rows
from paceline.parallel.dropout import rounding
from paceline.parallel.norm import measure_norm
from paceline.parallel.placement import Placement
from paceline.parallel.stages.transfer import Form, StageTransfer, StrideOrder
from paceline.pipeline.messages import Message, Payload, list_needs, list_results
from paceline.pipeline.orders import make_schedule
from paceline.torch_seams import operators
from paceline.train import whole_batch
from paceline.train.agreement import Agreement, RankMessage
from paceline.train.cut_probe import Probe
from paceline.train.tasks import class_loss
from paceline.world import current_world
from tests.dist.simulated_gpu import GPU, simulated_gpu

THE_WAIT = ["train/agreement.py:wait"]
pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


def build(**settings: Any) -> paceline.Trainer:
    return paceline.Trainer(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1),
        forward=lambda model, batch: model(batch["x"]),
        microbatch_size=2,
        clip_norm=1.0,
        **settings,
    )


LOSSES: dict[str, Any] = {
    "a mean": lambda output, batch: output.square().mean(),
    "a sum and a number": lambda output, batch: (output.square().sum(), len(output)),
    "a sum and a tensor on the device": lambda output, batch: (output.square().sum(), (output > 0).sum()),
    "a sum and a tensor on the CPU": class_loss,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "fp16", "reduction": "fast"}, {"dtype": "bf16", "ema": 0.9}],
    ids=lambda settings: " ".join(map(str, settings.values())) or "exact",
)
def test_a_step_waits_for_the_device_once(loss: str, settings: dict[str, Any]) -> None:
    with simulated_gpu() as waits:
        trainer = build(loss=LOSSES[loss], **settings)
        batch = {"x": torch.randn(8, 8), "labels": torch.zeros(8, dtype=torch.int64)}
        for number in range(3):  # the first one counts operations
            waits.places.clear()
            assert trainer.step(batch).skipped is None
            assert waits.places == THE_WAIT, number


def test_a_step_of_a_users_own_loop_waits_for_loss_and_norm() -> None:
    with simulated_gpu(2, 1) as waits:
        model = nn.Linear(8, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        example = {"x": torch.zeros(2, 8), "y": torch.zeros(2, dtype=torch.int64)}
        loop = paceline.Loop(model, optimizer, layout="dp_replicate=2", example=example, microbatch_size=2)
        samples = torch.utils.data.DataLoader(
            [{"x": torch.zeros(8), "y": torch.tensor(0)}] * 24, batch_size=12
        )
        for step in loop.loader(samples, epochs=1, pin_memory=False):
            waits.places.clear()
            for batch in step:
                torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            step.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert waits.places == [*THE_WAIT, "train/own_step.py:clip_grad_norm_"]
        assert waits.streams.races == []


def test_an_agreement_is_filled_without_waiting() -> None:
    with simulated_gpu() as waits:
        agreement = Agreement(2, 0, 3, GPU, None)
        agreement.put_microbatch(0, torch.ones((), device=GPU), torch.tensor(2.0))
        agreement.put_microbatch(1, torch.ones((), device=GPU), torch.ones((), device=GPU))
        agreement.put_used([True, False, True])
        agreement.launch(RankMessage(0, 3, copies=torch.ones(4, dtype=torch.int64, device=GPU)))
        assert waits.places == []
        agreement.wait(torch.ones((), device=GPU))
        assert waits.places == THE_WAIT


@pytest.mark.parametrize("exact", [True, False])
def test_the_norm_of_offloaded_gradients_is_on_the_device(exact: bool) -> None:
    """With `offload=cpu`, some gradients are on the CPU; ranks exchange numbers on the device."""
    placement = Placement(nn.Module(), None)
    mesh: Any = SimpleNamespace(device=GPU, dp_shard=SimpleNamespace(size=1))
    with simulated_gpu():
        parameters = [torch.zeros(4, 3), torch.zeros(5), torch.zeros(4, 3, device=GPU), torch.zeros(2)]
        gradients = [*(torch.ones_like(p) for p in parameters[:3]), None]
        named = list(zip("abcd", gradients, strict=True))
        found = measure_norm(named, parameters, placement, mesh, exact=exact)
        assert found.device == GPU
        agreement = Agreement(1, 0, 0, GPU, None)
        agreement.launch(RankMessage(0, 0))
        agreement.wait(found)


def test_norms_of_rows_take_kernels_of_one_shape() -> None:
    """On a GPU the order of a row's sum follows from the shape of the call, and shards have fewer rows."""
    shapes: list[tuple[int, ...]] = []
    measure = torch.linalg.vector_norm

    def recording(tensor: Tensor, **settings: Any) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return measure(tensor, **settings)

    with simulated_gpu(), mock.patch.object(torch.linalg, "vector_norm", recording):
        for num_rows in (1, 7, 2000, 5000):
            found = norm._measure_rows(
                torch.zeros(num_rows, 771, device=GPU), torch.zeros(num_rows, 771), GPU
            )
            assert found.shape == (num_rows,)
    assert set(shapes) == {((1 << 20) // 771, 784)}


def test_the_exact_reduction_switches_determinism_on(caplog: pytest.LogCaptureFixture) -> None:
    with simulated_gpu():
        world = current_world()
        for reduction, expected in (("fast", False), ("exact", True)):
            world.deterministic = False
            build(loss=LOSSES["a mean"], reduction=reduction)
            assert torch.are_deterministic_algorithms_enabled() == expected
            warned = [record for record in caplog.records if "deterministic kernels" in record.getMessage()]
            assert len(warned) == expected
        world._undo.close()
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_before_the_start_leave_only_the_fast_reduction() -> None:
    """torch decides at the first product of a process whether cuBLAS is deterministic."""
    message = "you must set an environment variable: CUBLAS_WORKSPACE_CONFIG=:4096:8"
    with simulated_gpu(), mock.patch.object(torch, "mm", side_effect=RuntimeError(message)):
        current_world().deterministic = False
        with pytest.raises(PacelineError) as caught:
            build(loss=LOSSES["a mean"], reduction="exact")
        assert caught.value.code == "PL314"
        assert not torch.are_deterministic_algorithms_enabled()
        assert not current_world().deterministic
        build(loss=LOSSES["a mean"], reduction="fast")


def test_a_start_on_cuda_makes_cublas_deterministic_before_any_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given, expected in (("", ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
        if not given:
            monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        with (
            mock.patch.object(paceline.world, "agree_on_device", return_value=GPU),
            mock.patch.object(torch.cuda, "set_device"),
            paceline.start(backend="gloo"),
        ):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected  # also for the next start in this process


def test_attention_with_dropout_says_once_that_it_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    rounding._report_unfused.cache_clear()
    with simulated_gpu():
        for _ in range(2):
            query = torch.zeros(2, 4, 8, 16, device=GPU)
            assert rounding.weigh(query, query, None, True, None, False).shape == (2, 4, 8, 8)
    assert caplog.text.count("runs unfused") == 1


class Kept(nn.Module):
    """A layer with buffers that its forward changes: in place, by a new tensor, and by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        for name in ("replaced", "hidden"):
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.hidden.data.add_(1)
        return self.spectral(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("brings", ["a loader", "batches of its own"])
def test_kept_buffers_and_own_batches_cost_no_wait(brings: str) -> None:
    def find(*args: Any) -> list[ForwardBuffer]:  # by values, which this GPU lacks
        return list_forward_buffers(trainer.model)

    with simulated_gpu(2, 1) as waits, mock.patch.object(Probe, "find_buffers", find):
        trainer = paceline.Trainer(
            nn.Sequential(Kept(), nn.Linear(8, 2)),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1),
            forward=lambda model, batch: model(batch["x"]),
            loss=LOSSES["a mean"],
            microbatch_size=2,
            layout="dp_replicate=2",
        )
        batches: Any = trainer.loader([{"x": torch.zeros(8)}] * 32, global_batch_size=8, pin_memory=False)
        if brings != "a loader":
            batches = [{"x": torch.randn(4, 8)} for _ in range(4)]
        for batch in batches:
            waits.places.clear()
            trainer.step(batch)
        assert len(trainer._statistics._kept) == 4
        assert waits.places == THE_WAIT
        trainer.close()


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("is_zigzag", [True, False])
def test_rows_attend_to_their_keys_without_a_mask_in_memory(kernel: str, is_zigzag: bool) -> None:
    """Both kernels align the last query with the last key: a call's keys must end where its rows do."""
    num_ranks, own, seen = 2, 8, []
    division = Division((own,) * num_ranks, is_zigzag)
    name = {"flash": "_scaled_dot_product_flash_attention", "efficient": "_efficient_attention_forward"}[
        kernel
    ]

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = call(*args, **(kwargs or {}))
            if name in call.name():
                positions = -2 if kernel == "flash" else -3
                seen.append(
                    (args[0].shape[positions], args[1].shape[positions], args[4 if kernel == "flash" else 9])
                )
            shapes = [tuple(leaf.shape) for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            assert not [shape for shape in shapes if shape[-2:] in {(8, 16), (4, 16), (4, 12), (4, 8)}], call
            return found

    for rank in range(num_ranks):
        seen.clear()
        rows = Rows(Axis("cp", num_ranks, rank, mock.Mock()))
        rows.division = division
        with (
            simulated_gpu(),
            mock.patch.object(operators, "can_use_flash_attention", return_value=kernel == "flash"),
            mock.patch.object(operators, "can_use_efficient_attention", return_value=True),
            mock.patch.object(gather, "_gather_both", lambda key, value, rows: (key, value)),
        ):
            half = {"dtype": torch.bfloat16, "device": GPU}
            query, keys = torch.zeros(1, 2, own, 32, **half), torch.zeros(1, 2, own * num_ranks, 32, **half)
            attend = gather.attend_by_rows(rows, gathers=True, is_causal=True)
            with Watching():
                found = attend(None, (query, keys, keys), {"is_causal": True}, mock.Mock())
            assert found.shape == query.shape
        # Of (queries, keys), the causal mask at the end shows row i the keys before keys - queries + i + 1.
        last = [keys - queries + i for queries, keys, _ in seen for i in range(queries)]
        assert last == division.list_positions(rank).tolist()
        assert {kind for *_, kind in seen} == {True if kernel == "flash" else 2}


def test_a_copy_for_a_save_waits_for_nothing() -> None:
    """Neither for weights nor for buffers; a ResNet has 159 of these."""
    ended: list[tuple[Any, list[Tensor]]] = []
    thread: Any = SimpleNamespace(begin=lambda task: task())
    with simulated_gpu() as waits:
        weight, buffers = torch.zeros(64, device=GPU), [torch.zeros(3, device=GPU) for _ in range(4)]
        memory = CopyMemory()
        plans = [FilePlan("a", (b"head", weight, *buffers))]
        memory.reserve(measure(plans), torch.device("cpu"))

        def end(copied: StateCopy, error: Any, digests: Any) -> None:
            ended.append((error, [copy for copy, *_ in copied._late]))

        copied = StateCopy(thread, memory, plans, {id(weight)}, [], GPU, end)
        copied.wait()
        assert waits.places == []
        assert waits.streams.races == []
    assert [error for error, _ in ended] == [None]
    assert [piece.shape for piece in copied.plans[0].pieces if isinstance(piece, Tensor)] == [
        (64,),
        *[(3,)] * 4,
    ]


def test_all_ranks_gather_a_leaf_from_one_device() -> None:
    """Also a rank without microbatches, which cannot see where the others have it."""
    sent = []
    described = [[(torch.Size([2]), torch.float32, "cpu")], []]
    with (
        simulated_gpu(2, 1),
        mock.patch.object(dist, "get_backend", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(dist, "all_gather", lambda found, own, group: sent.append(own.device.type)),
    ):
        for own in ([torch.zeros(2)], []):
            (found,) = whole_batch._gather_leaf(own, described, Axis("dp", 2, 0, mock.Mock()))
            assert found.device.type == "cpu"
    assert sent == ["cuda", "cuda"]


def test_only_the_first_gradient_of_a_shape_is_waited_for() -> None:
    """Both of its ranks copy its order in memory; later messages follow it, also in later steps."""
    schedule, one = make_schedule("gpipe", 2, 3), Form((4, 3), torch.float32)
    waited: list[list[str]] = []
    orders: list[Any] = [{}, {}]

    def read(order: StrideOrder) -> list[int]:
        if order.dims is None:
            assert order.first is not None
            waits.places.append("the order")  # this GPU has no numbers to read
            order.dims = [0, 1]
        return order.dims

    with (
        simulated_gpu() as waits,
        mock.patch.multiple(dist, irecv=mock.DEFAULT, isend=mock.DEFAULT),
        mock.patch.object(StrideOrder, "read", read),
    ):
        for rank in (0, 1, 0, 1):
            waits.places.clear()
            axis, own = Axis("pp", 2, rank, mock.Mock()), torch.zeros(4, 3, device=GPU)
            recorded = Form(one.shape, one.dtype, (3, 1))

            def describe(message: Message, recorded: Form = recorded) -> list[Form]:
                return [recorded if message.content is Payload.OUTPUT else one]

            transfer = StageTransfer(axis, schedule, 3, {}, describe, GPU, orders[rank])
            for action in schedule.actions[rank]:
                for message in list_needs(action, 2, {}):
                    assert transfer.take(message)[0].device == GPU
                for message in list_results(action, 2, {}):
                    transfer.give(message, [own])
            transfer.finish()
            waited.append(list(waits.places))
    assert [len(places) for places in waited] == [1, 1, 0, 0]
