"""A factory's tensors, made one by one, against the model that it builds when it is called."""

from __future__ import annotations

import hashlib
import math
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.construct.build import Construction, construct
from paceline.parallel.construct.replay import have_same_bits

Factory = Callable[[], nn.Module]


def read_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors by every full name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def group_by_memory(
    tensors: dict[str, Tensor], construction: Construction | None = None
) -> set[tuple[str, ...]]:
    """Return which names share memory."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        key = construction.windows[name].storage if construction else tensor.untyped_storage()._cdata
        groups.setdefault(key, []).append(name)
    return {tuple(group) for group in groups.values()}


def check_structure(eager: nn.Module, construction: Construction) -> None:
    """Compare all but the values."""
    model, tensors = construction.model, read_tensors(eager)
    assert list(tensors) == list(construction.names)
    # A parametrised module has a class of its own, so names are compared.
    kinds = [[(n, type(m).__name__) for n, m in built.named_modules()] for built in (eager, model)]
    assert kinds[0] == kinds[1]
    assert eager.state_dict().keys() == model.state_dict().keys()
    assert group_by_memory(tensors) == group_by_memory(read_tensors(model), construction)
    on_meta = read_tensors(model)
    for name, tensor in tensors.items():
        filled = construction.fill(name)
        assert on_meta[name].device.type == "meta"
        assert type(tensor) is type(on_meta[name])
        assert tensor.requires_grad == on_meta[name].requires_grad, name
        for other in (on_meta[name], filled):
            assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        assert tensor.stride() == on_meta[name].stride(), name
        # A part of a larger tensor gets memory of its own.
        if construction.windows[name].is_dense():
            assert tensor.stride() == filled.stride(), name


def check_same_draws(factory: Factory) -> None:
    """Check that, if the factory seeds torch itself, every tensor is the eager one, bit by bit."""

    def seeded() -> nn.Module:
        torch.manual_seed(7)
        return factory()

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as tensors are made by one: a matrix product's bits depend on their number
    with torch.random.fork_rng():
        eager = seeded()
    torch.set_num_threads(num_threads)
    construction = construct(seeded, 0)
    check_structure(eager, construction)
    for name, tensor in read_tensors(eager).items():
        assert have_same_bits(tensor.detach(), construction.fill(name)), name


def check_statistics(factory: Factory, num_builds: int = 6) -> None:
    """Seeded by name, tensors have the eager one's mean, deviation and bounds; constants are the same."""
    eager: dict[str, list[Tensor]] = {}
    filled: dict[str, list[Tensor]] = {}
    for seed in range(num_builds):
        with torch.random.fork_rng():
            torch.manual_seed(100 + seed)
            built = read_tensors(factory())
        construction = construct(factory, seed)
        for name, tensor in built.items():
            eager.setdefault(name, []).append(tensor.detach())
            filled.setdefault(name, []).append(construction.fill(name))
    for name, tensors in eager.items():
        constant = have_same_bits(tensors[0], tensors[1])
        # Constants are constant with us too, and what is random differs from seed to seed.
        assert constant == have_same_bits(filled[name][0], filled[name][1]), name
        if constant:
            assert have_same_bits(tensors[0], filled[name][0]), name
            continue
        left, right = torch.stack(tensors).double(), torch.stack(filled[name]).double()
        spread = left.std().item()
        noise = spread / math.sqrt(left.numel())
        assert abs(left.mean() - right.mean()).item() < 7 * noise, name
        assert abs(spread - right.std().item()) < 7 * noise, name
        assert right.abs().max() < 2 * left.abs().max(), name


def initialised(function: Callable[..., object], shape: tuple[int, ...], *args: object) -> Factory:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(*shape))
        function(module.weight, *args)
        return module

    return build


INITS: dict[str, Factory] = {
    "kaiming_uniform_": initialised(nn.init.kaiming_uniform_, (16, 12)),
    "kaiming_normal_": initialised(nn.init.kaiming_normal_, (16, 12)),
    "xavier_uniform_": initialised(nn.init.xavier_uniform_, (16, 12)),
    "xavier_normal_": initialised(nn.init.xavier_normal_, (16, 12)),
    "normal_": initialised(nn.init.normal_, (16, 12), 1.0, 0.5),
    "uniform_": initialised(nn.init.uniform_, (16, 12)),
    "trunc_normal_": initialised(nn.init.trunc_normal_, (16, 12), 0.0, 0.02, -0.04, 0.04),
    "trunc_normal_ far out": initialised(nn.init.trunc_normal_, (16, 12), 0.0, 1.0, 2.0, 3.0),
    "orthogonal_": initialised(nn.init.orthogonal_, (16, 12)),
    "sparse_": initialised(nn.init.sparse_, (16, 12), 0.5),
    "dirac_": initialised(nn.init.dirac_, (8, 4, 3)),
    "eye_": initialised(nn.init.eye_, (8, 4)),
    "constant_": initialised(nn.init.constant_, (8, 4), 0.3),
    "ones_": initialised(nn.init.ones_, (8,)),
    "zeros_": initialised(nn.init.zeros_, (8,)),
}


@pytest.mark.parametrize("name", INITS)
def test_all_of_torch_nn_init(name: str) -> None:
    check_same_draws(INITS[name])
    check_statistics(INITS[name])


class Views(nn.Module):
    """Tensors made by views, slices, copies and arithmetic in place."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.copied = nn.Parameter(torch.empty(8, 8))
        with torch.no_grad():
            self.copied.copy_(self.drawn).mul_(0.5)
            self.copied[2:4] = 0
            self.copied[:, [1, 3]] = 2.0
            self.copied.t()[0].add_(1)
            self.copied[self.copied > 1.5] = 1.5
        self.legacy = nn.Parameter(torch.FloatTensor(4, 4))
        self.legacy.data.normal_().mul_(3)
        self.frozen = nn.Parameter(torch.rand(6), requires_grad=False)
        self.halves = nn.Parameter(torch.empty(6, 4))
        nn.init.normal_(self.halves.data[:3])
        nn.init.zeros_(self.halves.data[3:])
        flat = torch.randn(24)
        self.first = nn.Parameter(flat[:12].view(3, 4))
        self.second = nn.Parameter(flat[12:].view(4, 3))
        self.tied = self.first
        self.columns = nn.Parameter(torch.randn(3, 4).t())
        self.embedding = nn.Embedding(50, 8, padding_idx=3)
        self.register_buffer("part", self.drawn.detach()[1:3].t())


class Constants(nn.Module):
    """Tensors without random numbers, and values of them that the construction reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.65))
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0]).mul_(2))
        self.array = nn.Parameter(torch.from_numpy(np.arange(3, dtype=np.float32)))
        self.swapped = nn.Parameter(torch.zeros(3))
        self.swapped.data = torch.from_numpy(np.full(3, 7, np.float32))
        angles = torch.outer(torch.arange(4.0), 1 / 100 ** (torch.arange(0, 6, 2) / 6))
        self.register_buffer("rotary", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("conjugate", self.rotary.conj(), persistent=False)
        self.register_buffer("causal", torch.tril(torch.ones(5, 5)).bool(), persistent=False)
        masked = torch.zeros(4, 4)
        masked[torch.ones(4, 4).triu(1) == 1] = -1e9
        self.register_buffer("masked", masked)
        self.register_buffer("steps", torch.linspace(0, 1, 5).flip(0))
        self.register_buffer("full", torch.full((3,), 7))
        self.register_buffer("diagonal", torch.nonzero(torch.eye(4)))
        self.register_buffer("unique", torch.unique(torch.arange(6) % 3))
        self.register_buffer("chosen", torch.arange(6)[torch.arange(6) > 2])
        self.register_buffer("picked", torch.arange(6)[np.array([4, 1])][[1, 0]])
        self.register_buffer("new", torch.zeros(3).new_tensor([1, 2, 3]))
        self.register_buffer("mixed", torch.tensor([torch.tensor(1.0), torch.arange(3)[1]]))
        places = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
        self.register_buffer("relative", (places[:, :, None] - places[:, None]).permute(1, 2, 0).contiguous())
        self.register_buffer("same", torch.eye(2).cpu().to("cpu", torch.float64))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.numbers = torch.arange(3).tolist() + torch.arange(3).numpy().tolist()
        self.is_equal = torch.equal(torch.eye(2), torch.eye(2)) and bool((torch.ones(2) > 0).all())
        self.text = f"{torch.tensor(3.0):.2f}"
        self.plain = torch.arange(5.0)
        self.inner = {"eyes": [torch.eye(2)]}
        own = torch.Generator().manual_seed(3)
        self.register_buffer("drawn", torch.randn(5, generator=own))
        self.register_buffer("drawn_next", torch.randn(5, generator=own))
        self.is_cpu_like = (self.steps.device.type, self.steps.is_meta)


class Seeding(nn.Module):
    """Seeds torch's generator more than once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        torch.manual_seed(5)
        self.again = nn.Linear(4, 4)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.register_buffer("aside", torch.randn(3))
        self.register_buffer("after", torch.randn(3))


def build_in_double() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(3, 3)
        model.register_buffer("thirds", torch.arange(3) / 3)
    finally:
        torch.set_default_dtype(before)
    return model


def build_tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
    model[1].weight = model[0].weight
    return model


def build_and_run() -> nn.Module:
    """Run itself, as models do to find out shapes or statistics, and take a step.

    The loss must have a gradient: without the targets, BatchNorm's output has the same sum of squares for any
    weights, so that the step would add nothing but rounding, which has no distribution to compare.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    (model(torch.randn(5, 3)) - torch.randn(5, 4)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()
    return model


def build_from_weights() -> nn.Module:
    model = nn.Linear(3, 3)
    model.load_state_dict({"weight": torch.eye(3), "bias": torch.ones(3)})
    return model


MODULES: dict[str, Factory] = {
    "views": Views,
    "lstm": lambda: nn.LSTM(8, 8, 2),
    "gru": lambda: nn.GRU(8, 8, 2, bidirectional=True),
    "batchnorm": lambda: nn.BatchNorm2d(4),
    "attention": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
    "half": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).half(),
    "bfloat16": lambda: nn.Linear(8, 8).to("cpu", torch.bfloat16),
    "double": build_in_double,
    "tied": build_tied,
    "run": build_and_run,
    "from weights": build_from_weights,
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch(name: str) -> None:
    check_same_draws(MODULES[name])
    check_statistics(MODULES[name])


def test_what_is_not_random_is_the_same_to_the_bit() -> None:
    eager, construction = Constants(), construct(Constants, 1)
    check_structure(eager, construction)
    for name, tensor in read_tensors(eager).items():
        assert have_same_bits(tensor.detach(), construction.fill(name)), name
    model = construction.model
    for attribute in ("rates", "numbers", "is_equal", "text", "is_cpu_like"):
        assert getattr(model, attribute) == getattr(eager, attribute)
    assert torch.equal(model.plain, eager.plain)
    assert torch.equal(model.inner["eyes"][0], torch.eye(2))


def test_a_factory_that_seeds_gets_its_own_numbers_in_any_order() -> None:
    eager = read_tensors(Seeding())
    for names in (list(eager), list(reversed(eager))):
        construction = construct(Seeding, 1)
        for name in names:
            assert have_same_bits(eager[name].detach(), construction.fill(name)), name


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)

    def build() -> nn.Module:
        torch.manual_seed(random.randrange(9) + int(np.random.randint(9)))
        return nn.Linear(3, 3)

    construct(build, 1).fill("weight")
    assert torch.equal(expected[0], torch.rand(2))
    assert expected[1:] == (random.random(), np.random.rand())


def test_python_and_numpy_draw_alike_in_every_construction() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.register_buffer("order", torch.tensor(random.sample(range(50), 50)))
        model.register_buffer("noise", torch.from_numpy(np.random.rand(5)))
        return model

    random.seed(1)
    first, again = construct(build, 4), construct(build, 4)
    for name in first.names:
        assert torch.equal(first.fill(name), again.fill(name))
    assert not torch.equal(first.fill("order"), construct(build, 5).fill("order"))


def build_several() -> nn.Module:
    """Build the models that the tests of order and of processes fill."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.ModuleDict({"encoder": encoder, "views": Views(), "tied": build_tied()})


def hash_tensors(seed: int, backwards: bool = False) -> str:
    """Return the hashes of all tensors by name, filled in an order."""
    construction = construct(build_several, seed)
    names = sorted(construction.names, reverse=backwards)
    hashes = {
        name: hashlib.sha256(bytes(construction.fill(name).contiguous().numpy().data)) for name in names
    }
    return hashlib.sha256(b"".join(hashes[name].digest() for name in sorted(names))).hexdigest()


def test_order_and_other_fills_change_nothing() -> None:
    assert hash_tensors(1) == hash_tensors(1, backwards=True) != hash_tensors(2)


def test_another_process_gets_the_same_bits() -> None:
    code = """if True:
        import tests.parallel.test_construct as t
        print(t.hash_tensors(1))
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [hash_tensors(1)]


def test_copies_stay_equal_and_ties_are_one() -> None:
    construction = construct(build_several, 1)
    for name in construction.names:
        if "layers.0" in name:
            assert torch.equal(
                construction.fill(name), construction.fill(name.replace("layers.0", "layers.1"))
            )
    assert torch.equal(construction.fill("tied.0.weight"), construction.fill("tied.1.weight"))
    copied = construction.fill("views.copied")
    assert torch.equal(copied[4, 4:], construction.fill("views.drawn")[4, 4:] * 0.5)


def test_a_tensor_does_not_depend_on_what_else_is_in_the_model() -> None:
    small = construct(lambda: nn.ModuleDict({"b": nn.Linear(4, 4)}), 1)
    large = construct(lambda: nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(4, 4)}), 1)
    assert torch.equal(small.fill("b.weight"), large.fill("b.weight"))
    assert not torch.equal(
        small.fill("b.weight"), construct(lambda: nn.ModuleDict({"c": nn.Linear(4, 4)}), 1).fill("c.weight")
    )


def test_placing_is_part_of_the_record() -> None:
    construction = construct(Views, 1, place=lambda model: model.to("cpu").to(torch.float64))
    single = construct(Views, 1)
    for name in construction.names:
        assert torch.equal(construction.fill(name), single.fill(name).double())
    assert {p.dtype for p in construction.model.parameters()} == {torch.float64}


def test_filling_ignores_what_is_around_it() -> None:
    construction = construct(build_several, 1)
    expected = {name: construction.fill(name) for name in construction.names}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            filled = {name: construction.fill(name) for name in construction.names}
    finally:
        torch.set_default_dtype(before)
    for name, tensor in expected.items():
        assert have_same_bits(tensor, filled[name]), name
        assert not filled[name].requires_grad


def test_the_number_of_threads_changes_nothing() -> None:
    construction = construct(initialised(nn.init.orthogonal_, (300, 200)), 1)
    before = torch.get_num_threads()
    filled = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            filled.append(construction.fill("weight"))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*filled)


def test_an_initialised_model_trains() -> None:
    construction = construct(build_several, 1)
    model = construction.model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in read_tensors(model).items():
            tensor.copy_(construction.fill(name))
    model["encoder"](torch.randn(2, 3, 16)).square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model["encoder"].parameters())


MEMORY = """
import torch
from torch import nn
from paceline.parallel.construct.build import construct

def megabytes(peak):
    if peak:  # of this program alone: what getrusage tells may be of the process before exec
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

construct(lambda: nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(9)), 0).fill("0.weight")
before = megabytes(False)
construction = construct(lambda: nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(64)]), 0)
built = megabytes(False)
for name in construction.names[:6]:
    construction.fill(name)
print(built - before, max(0, megabytes(True) - built))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_one_tensor() -> None:
    # 64 x 64 MiB = 4 GiB, of which 6 tensors are filled one after the other.
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=60
    )
    construction, fill = map(float, done.stdout.split())
    assert construction < 16
    assert fill < 2.5 * 64
