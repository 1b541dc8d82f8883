"""The first gradient that is not finite, as one process notices it, and as ranks do before the reduction."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from paceline.watch.protocol.report import NotFinite
from paceline.watch.rank import first_not_finite as watching
from paceline.watch.rank.first_not_finite import Gradients
from paceline.world import World
from tests.dist.pool import Pool

TIMEOUT_S = 25.0


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.body = nn.ModuleDict({"scale": Scale(5)})
        self.last = nn.Linear(5, 3)
        self.scores = nn.Linear(3, 2)

    def forward(self, x: Tensor, spoil: bool = False) -> Tensor:
        x = self.body["scale"](torch.tanh(self.first(x)))
        if spoil:  # its gradient is 0 / 0, and the numbers are well
            x = torch.sqrt(x.sum() * 0.0) + x
        return self.scores(torch.tanh(self.last(x)))


@pytest.fixture
def watched() -> Iterator[Gradients]:
    gradients = Gradients()
    gradients.install(torch)
    yield gradients
    gradients.remove()
    assert not hasattr(torch.optim.Optimizer.add_param_group, "__wrapped__") or (
        torch.optim.Optimizer.add_param_group is gradients._original
    )


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, spoil: bool = False, factor: float = 1.0
) -> None:
    optimizer.zero_grad()
    (model(torch.randn(4, 6), spoil=spoil).pow(2).mean() * factor).backward()
    optimizer.step()


def found_in(gradients: Gradients) -> NotFinite | None:
    gradients.settle()
    return gradients.found


# ---- what is found


def test_names_pass_module_and_line(watched):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        take_step(model, optimizer, spoil=step == 3)
    found = found_in(watched)
    assert (found.number, found.effect) == (4, "applied")
    assert (found.parameter, found.kind, found.is_at_end) == ("body.scale.factor", "Scale", False)
    assert found.frames[0].function == "take_step"
    assert ".backward()" in found.frames[0].text


def test_a_loss_that_is_not_finite_begins_at_the_end(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, optimizer, factor=float("inf"))
    found = watched.found  # at once: the script may end here, and let the model go
    assert (found.number, found.parameter, found.is_at_end) == (1, "scores.bias", True)


def test_nothing_is_found_in_a_healthy_run(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(30):
        take_step(model, optimizer)
    assert found_in(watched) is None
    assert watched.passes == 30


def test_large_sums_of_finite_numbers_are_finite(watched):
    weight = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    (weight * torch.full((64,), 6e4, dtype=torch.float16)).sum().backward()
    assert weight.grad.sum().isinf()
    optimizer.step()
    assert found_in(watched) is None


def test_weights_that_were_not_finite_before(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.last.weight[1, 1] = float("nan")
    take_step(model, optimizer)
    found = watched.found
    assert (found.number, found.effect, found.parameter) == (1, "inherited", "last.weight")


def test_one_parameters_gradient_is_seen_a_pass_later(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.last.bias.register_hook(lambda gradient: gradient * float("nan"))
    take_step(model, optimizer)
    assert found_in(watched) is None
    take_step(model, optimizer)
    assert (watched.found.number, watched.found.parameter) == (2, "last.bias")
    assert watched.found.effect == "inherited"


def test_frozen_parameters_may_be_infinite(watched):
    model = Net()
    model.mask = nn.Parameter(torch.full((3,), float("-inf")), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, optimizer, spoil=True)
    take_step(model, optimizer)
    assert (watched.found.effect, watched.found.parameter) == ("applied", "body.scale.factor")


def test_parameters_without_a_module(watched):
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.log(weight).sum().backward()
    optimizer.step()
    found = found_in(watched)
    assert (found.number, found.parameter, found.kind) == (1, "", "")


def test_wrappers_are_no_part_of_a_name(watched):
    model = nn.Sequential()
    model.module = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model.module, optimizer, spoil=True)
    assert found_in(watched).parameter == "body.scale.factor"


# ---- what is no news


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_the_script_that_mends_gradients(watched, when):
    model = Net()
    for _ in range(2):
        if when == "after":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.nan_to_num(0.0))
        when = "after" if when == "before" else "done"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        take_step(model, optimizer, spoil=step % 3 == 1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert found_in(watched) is None


def run_scaled(model: nn.Module, steps: int, spoilt: range, init_scale: float = 2.0**16) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6), spoil=step in spoilt).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_steps_that_a_scaler_skips(watched):
    model = Net()
    # The largest scale of which the first few passes overflow.
    run_scaled(model, 12, range(6, 8), init_scale=2.0**127)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert found_in(watched) is None


def test_steps_that_a_scaler_skips_for_ever(watched):
    run_scaled(Net(), 40, range(10, 40))
    found = watched.found
    assert (found.effect, found.number, found.parameter) == ("skipped", 11, "body.scale.factor")


def test_steps_that_the_script_skips(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 6), spoil=step % 4 == 1).pow(2).mean().backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        watched.settle()
    assert watched.found is None
    take_step(model, optimizer, spoil=True)
    assert found_in(watched).number == 13  # not one of those


@pytest.mark.parametrize("passes_between", [0, 1])
def test_an_exception_after_it(watched, passes_between):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    for spoil in (True, *[False] * passes_between):
        optimizer.zero_grad()
        model(torch.randn(4, 6), spoil=spoil).sum().backward()
    assert watched.note_error() == (passes_between == 0)
    assert (watched.found is not None and watched.found.effect == "raised") == (passes_between == 0)
    assert not watched.note_error()


# ---- what it must not change


def train(watch: bool) -> list[Tensor]:
    gradients = Gradients()
    torch.manual_seed(3)
    model = Net()
    if watch:
        gradients.install(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        take_step(model, optimizer)
    assert gradients.passes == (20 if watch else 0)
    gradients.remove()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_numbers_are_the_same_to_the_bit():
    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_autograd_keeps_the_gradient_without_a_copy(watched):
    model = Net()
    seen: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert optimizer.param_groups
    model.first.bias.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    model(torch.randn(4, 6)).sum().backward()
    assert seen == [model.first.bias.grad.data_ptr()]


def test_models_are_copied_and_saved_without_a_word(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps((model, optimizer)))[0]
        buffer = io.BytesIO()
        torch.save(model, buffer)
    for other in (twin, again):
        assert torch.equal(other.first.bias, model.first.bias)
        assert not other.first.bias._backward_hooks


def test_a_model_that_is_let_go_is_free(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, optimizer, factor=float("nan"))
    gone = [weakref.ref(model), weakref.ref(model.first.bias), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_few_and_small_parameters_are_watched(watched):
    large = nn.Parameter(torch.zeros(40_000))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    nets = [nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(9)) for _ in range(4)]
    optimizers = [torch.optim.SGD([large, frozen, *net], lr=0.1) for net in nets]
    assert len(optimizers) == 4
    hooked = [[n for n, p in enumerate(net) if p._backward_hooks] for net in nets]
    assert hooked == [[0, 2, 4, 6], [0, 2, 4, 6], [], []]
    assert not large._backward_hooks
    assert not frozen._backward_hooks


@pytest.mark.parametrize("last", [10, 11])
def test_optimizers_that_are_made_anew(watched, last):
    model = Net()
    for step in range(last + 1):
        optimizer = torch.optim.SGD([{"params": model.first.parameters()}, {"params": [model.last.bias]}])
        assert len(model.first.bias._backward_hooks) == 1
        take_step(model, optimizer, spoil=step == last)
    assert watched.found.number == last + 1


def test_parameters_can_be_swapped(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.randn(4, 6)).sum() * float("inf")).backward()  # so that all of the model is known
        optimizer.zero_grad()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(torch.float64).to(torch.float32)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert watched.passes >= 1


def test_hooks_go_with_the_finding(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, optimizer, spoil=True)
    take_step(model, optimizer)
    assert watched.found.number == 1
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert torch.optim.Optimizer.add_param_group is watched._original


def test_gradients_of_gradients(watched):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(torch.randn(4, 6)).pow(2).mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(gradient.pow(2).sum() for gradient in first).backward()
    optimizer.step()
    assert watched.passes == 2


@pytest.mark.parametrize("compiles_backward", [False, True])
def test_compiled_models_have_no_graph_break_more(watched, compiles_backward):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(compiled_autograd=compiles_backward):
        for step in range(3):
            take_step(compiled, optimizer, spoil=step == 1)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"]
    if not compiles_backward:
        assert graphs == 2  # with and without `spoil`
        assert found_in(watched).parameter == "body.scale.factor"


def count_breaks_of_a_compiled_step() -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for n in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 6), spoil=n == 1).pow(2).mean().backward()
        step()
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # upon the import of Inductor
def test_a_compiled_optimizer_has_no_graph_break_more(watched):
    breaks = count_breaks_of_a_compiled_step()
    assert watched.found.number == 2
    watched.remove()
    assert breaks == count_breaks_of_a_compiled_step()


def test_a_compiled_function_that_calls_backward(watched):
    torch._dynamo.reset()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(take_step, backend="eager")
    for n in range(4):
        compiled(model, optimizer, spoil=n == 1)
    assert (watched.found.number, watched.found.parameter) == (2, "body.scale.factor")


# ---- where sums are read later


@pytest.fixture
def late(watched: Gradients, monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """As if gradients were on a GPU: what isn't shown by this is that the copy has no need to wait."""
    monkeypatch.setattr(watching, "_is_here", lambda gradient: False)
    monkeypatch.setattr(watching, "_make_sums", lambda torch: torch.zeros(watching._LATE))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return watched


def test_late_sums_name_the_pass(late):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        take_step(model, optimizer, spoil=step == 4)
    assert found_in(late) is None
    take_step(model, optimizer)
    assert (late.found.number, late.found.effect, late.found.parameter) == (5, "applied", "")


def test_late_sums_name_the_module_where_weights_report_it(late):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        take_step(model, optimizer, spoil=step == 4)
    late.settle()
    take_step(model, optimizer)
    assert (late.found.number, late.found.parameter) == (5, "body.scale.factor")


def test_late_sums_of_skipped_steps_are_no_news(late):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2100):
        optimizer.zero_grad()
        model(torch.randn(4, 6), spoil=step == 3).pow(2).mean().backward()
        if step != 3:
            optimizer.step()
        if step % 50 == 9:
            late.settle()
    assert late.found is None
    assert late.passes == 2100
    assert model.first.bias._backward_hooks  # it still looks


# ---- ranks


def train_on_ranks(world: World, spoilt: tuple[int, int, int], micro: int, view: bool) -> NotFinite | None:
    """Spoil one microbatch: of a rank, in a step, with a number."""
    gradients = Gradients()
    gradients.install(torch)
    torch.manual_seed(world.rank)
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for n in range(micro):
            with nullcontext() if n == micro - 1 else model.no_sync():
                spoil = (world.rank, step, n) == spoilt
                model(torch.randn(4, 6), spoil=spoil).pow(2).mean().backward()
        optimizer.step()
    gradients.settle()
    gradients.remove()
    return gradients.found


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("micro", "number"), [(1, 3), (3, 8)])
def test_only_the_rank_that_had_it_states_so(ranks, micro, number, view):
    args = ((1, 2, 1 if micro > 1 else 0), micro, view)
    other, own = ranks.run(train_on_ranks, nproc=2, args=args, timeout_s=TIMEOUT_S)
    assert (own.effect, own.number, own.parameter) == ("applied", number, "body.scale.factor")
    assert (other.effect, other.number) == ("inherited", 3 * micro + 1)


def test_ranks_that_are_well_state_nothing(ranks):
    assert ranks.run(train_on_ranks, args=((-1, 0, 0), 2, False), timeout_s=TIMEOUT_S) == [None, None]


def train_parts(
    world: World, kind: str, spoilt: tuple[int, int], watch: bool
) -> tuple[NotFinite | None, list[Tensor]]:
    """Return what a rank finds in a model whose parameters are DTensors, and its parts of the weights."""
    gradients = Gradients()
    if watch:
        gradients.install(torch)
    torch.manual_seed(1)
    model = Net()
    model.last, model.scores = nn.Linear(5, 4), nn.Linear(4, 2)
    mesh = init_device_mesh("cpu", (world.world_size,))
    if kind == "split":
        parallelize_module(model, mesh, {"last": ColwiseParallel(), "scores": RowwiseParallel()})
    else:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "bf16" else MixedPrecisionPolicy()
        for part in (model.first, model.last, model):
            fully_shard(part, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(step if kind == "split" else 2 * step + world.rank)
        for n in range(2 if kind == "accumulated" else 1):
            if kind == "accumulated":
                model.set_requires_gradient_sync(n == 1)
            model(torch.randn(4, 6), spoil=(world.rank, step) == spoilt).pow(2).mean().backward()
        optimizer.step()
    gradients.settle()
    gradients.remove()
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    return gradients.found, [one.detach().clone() for one in parts]


@pytest.mark.parametrize("kind", ["sharded", "bf16", "accumulated", "split"])
def test_ranks_with_parts_of_the_parameters(ranks: Pool, kind: str) -> None:
    """They state their own gradients as with DDP, and their numbers are those without the watch."""
    found = ranks.run(train_parts, nproc=2, args=(kind, (1, 2), True), timeout_s=TIMEOUT_S)
    own = found[1][0]
    assert own is not None
    assert own.number == (5 if kind == "accumulated" else 3)
    assert own.effect == "applied"
    others = found[0][0]
    assert others is None or (kind == "split" and others.number == own.number) or others.number > own.number
    well = [
        ranks.run(train_parts, nproc=2, args=(kind, (-1, 0), watch), timeout_s=TIMEOUT_S)
        for watch in (True, False)
    ]
    for (finding, parts), (_, bare) in zip(*well, strict=True):
        assert finding is None
        assert all(torch.equal(one, other) for one, other in zip(parts, bare, strict=True))
