"""Steps on a simulated GPU: tensors of two devices never meet, and the host waits for it once per step.

It has no numbers, no kernels and no other ranks, so it shows neither results nor speed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.checkpoint.tensors import FilePlan
from paceline.checkpoint.writing.state_copy import CopyMemory, StateCopy, measure
from paceline.mesh import Axis
from paceline.parallel import norm
from paceline.parallel.dropout import rounding
from paceline.parallel.norm import measure_norm
from paceline.parallel.placement import Placement
from paceline.parallel.stages.transfer import Form, StageTransfer, StrideOrder
from paceline.pipeline.messages import Message, Payload, list_needs, list_results
from paceline.pipeline.orders import make_schedule
from paceline.train import whole_batch
from paceline.train.agreement import Agreement, RankMessage
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


def test_the_exact_reduction_switches_determinism_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
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


def test_attention_with_dropout_says_once_that_it_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    rounding._report_unfused.cache_clear()
    with simulated_gpu():
        for _ in range(2):
            query = torch.zeros(2, 4, 8, 16, device=GPU)
            assert rounding.weigh(query, query, None, True, None, False).shape == (2, 4, 8, 8)
    assert caplog.text.count("runs unfused") == 1


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
