"""A factory's model on all ranks, against the model that the factory builds when it is called."""

from __future__ import annotations

import io
import logging
import pickle
import random
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.generators import preserved_generators, seed_generators
from paceline.models.encoder import Encoder
from paceline.models.gpt import Gpt
from paceline.models.resnet import Resnet
from paceline.parallel.construct.build import _attempt_without_values, construct
from paceline.parallel.construct.hand_out import place_values
from paceline.parallel.construct.structure import describe_tensors, read_tensors
from paceline.recipe.schema import EncoderModel, GptModel, ResnetModel
from paceline.seeds import derive_seed
from tests.dist.pool import Pool, RankError

Factory = Callable[[], nn.Module]
SEED = 3
CPU = torch.device("cpu")


def build_eagerly(factory: Factory, seed: int = SEED) -> nn.Module:
    """Call a factory as a script would, with the seed of a construction."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with preserved_generators():
        seed_generators(derive_seed(seed, 0, "construction"), CPU)
        model = factory()
    torch.set_num_threads(before)
    return model


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (a, b))
    same_kind = (a.shape, a.dtype) == (b.shape, b.dtype)
    return same_kind and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


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
        self.register_buffer("diagonal", torch.nonzero(torch.eye(4)))
        self.register_buffer("chosen", torch.arange(6)[torch.arange(6) > 2])
        self.register_buffer("picked", torch.arange(6)[np.array([4, 1])][[1, 0]])
        self.register_buffer("mixed", torch.tensor([torch.tensor(1.0), torch.arange(3)[1]]))
        self.register_buffer("large", torch.tril(torch.ones(300, 300)))
        self.register_buffer("order", torch.tensor(random.sample(range(50), 50)))
        self.register_buffer("noise", torch.from_numpy(np.random.rand(5)))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.numbers = torch.arange(3).tolist() + torch.arange(3).numpy().tolist()
        self.is_equal = torch.equal(torch.eye(2), torch.eye(2)) and bool((torch.ones(2) > 0).all())
        self.text = f"{torch.tensor(3.0):.2f}"
        self.plain = torch.arange(5.0)
        self.inner = {"eyes": [torch.eye(2)]}


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
        self.register_buffer("after", torch.randn(3, generator=torch.Generator().manual_seed(3)))


class Doing(nn.Module):
    """Does something with a weight while it is built."""

    def __init__(self, do: Callable[[Doing], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        do(self)


def build_tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
    model[1].weight = model[0].weight
    return model


def build_over_the_same_bytes() -> nn.Module:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def build_from_weights() -> nn.Module:
    model = nn.Linear(3, 3)
    model.load_state_dict({"weight": torch.eye(3), "bias": torch.ones(3)})
    return model


def build_from_file() -> nn.Module:
    file = io.BytesIO()
    torch.save(nn.Linear(4, 4).state_dict(), file)
    file.seek(0)
    model = nn.Linear(4, 4)
    model.load_state_dict(torch.load(file))
    return model


def build_and_run() -> nn.Module:
    """Run itself, as models do to find out shapes or statistics, and take a step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    (model(torch.randn(5, 3)) - torch.randn(5, 4)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()
    return model


def read_a_weight(model: Doing) -> None:
    model.largest = model.weight.max().item()


def branch_on_a_weight(model: Doing) -> None:
    with suppress(Exception):
        model.head = nn.Linear(2, 3 if model.weight.sum() > -1e9 else 4)


def initialised(function: Callable[..., object], shape: tuple[int, ...], *args: object) -> Factory:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(*shape))
        function(module.weight, *args)
        return module

    return build


# They can be built without values.
MODULES: dict[str, Factory] = {
    "views": Views,
    "constants": Constants,
    "seeding": Seeding,
    "lstm": lambda: nn.LSTM(8, 8, 2),
    "attention": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
    "bfloat16": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("cpu", torch.bfloat16),
    "tied": build_tied,
    "same bytes": build_over_the_same_bytes,
    "from weights": build_from_weights,
    "from a file": build_from_file,
    "pickled": lambda: pickle.loads(pickle.dumps(nn.Linear(2, 2))),
    "run": build_and_run,
    "trunc_normal_": initialised(nn.init.trunc_normal_, (16, 12), 0.0, 0.02, -0.04, 0.04),
    "orthogonal_": initialised(nn.init.orthogonal_, (300, 200)),
    "sparse_": initialised(nn.init.sparse_, (16, 12), 0.5),
    "dirac_": initialised(nn.init.dirac_, (8, 4, 3)),
    "gpt": lambda: Gpt(GptModel(kind="gpt", layers=2, hidden=32, heads=4), 64, 16),
    "encoder": lambda: Encoder(EncoderModel(kind="encoder", layers=2, hidden=32, heads=4), 64, 16),
    "resnet": lambda: Resnet(ResnetModel(kind="resnet"), 3, 10),
}
# They cannot.
READERS: dict[str, Factory] = {
    "item": lambda: Doing(read_a_weight),
    "swallowed": lambda: Doing(branch_on_a_weight),
    "numpy": lambda: Doing(lambda m: m.weight.data.copy_(torch.from_numpy(m.weight.detach().numpy() * 2))),
    "boolean index": lambda: Doing(lambda m: m.weight.data.__setitem__(m.weight > 0, m.weight[m.weight > 0])),
    "random attribute": lambda: Doing(lambda m: setattr(m, "noise", torch.randn(3))),
    "written in place": lambda: Doing(lambda m: setattr(m, "noise", torch.zeros(3).normal_())),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
}
ALL = MODULES | READERS


@pytest.mark.parametrize("name", ALL)
def test_one_process_gets_the_eager_model(name: str) -> None:
    eager, construction = build_eagerly(ALL[name]), construct(ALL[name], SEED)
    before = {key: id(tensor) for key, tensor in read_tensors(construction.model).items()}
    assert all(tensor.is_meta for tensor in read_tensors(construction.model).values())
    model = place_values(construction)
    tensors = read_tensors(model)
    assert eager.state_dict().keys() == model.state_dict().keys()
    for key, tensor in read_tensors(eager).items():
        assert same_bits(tensor, tensors[key]), key
        assert (tensor.requires_grad, type(tensor)) == (tensors[key].requires_grad, type(tensors[key]))
        assert id(tensors[key]) == before[key]


@pytest.mark.parametrize("name", ALL)
def test_a_model_without_values_is_described_alike_or_not_made(name: str) -> None:
    built = _attempt_without_values(ALL[name], derive_seed(SEED, 0, "construction"))
    assert built.error is None
    assert built.model is not None
    is_alike = describe_tensors(read_tensors(built.model)) == describe_tensors(
        read_tensors(build_eagerly(ALL[name]))
    )
    assert is_alike == (name != "swallowed")
    assert bool(built.obstacle) == (name in READERS and name != "swallowed"), built.obstacle


def test_ties_lists_attributes_and_hooks_stay() -> None:
    calls: list[str] = []

    def build() -> nn.Module:
        model = nn.ModuleDict({"tied": build_tied(), "lstm": nn.LSTM(4, 4)})
        weight = model["tied"][0].weight
        weight.no_decay = True
        weight.register_hook(lambda grad: calls.append("hook"))
        weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
        return model

    construction = construct(build, 0)
    weak = weakref.ref(construction.model["tied"][0].weight)
    model = place_values(construction)
    assert weak is not None
    weight = model["tied"][0].weight
    assert weight is model["tied"][1].weight
    assert weight.no_decay
    assert all(a is b for a, b in zip(model["lstm"]._flat_weights, model["lstm"].parameters(), strict=True))
    model["tied"](torch.tensor([1])).sum().backward()
    assert calls == ["hook", "accumulated"]
    model["lstm"](torch.randn(2, 1, 4))[0].sum().backward()
    assert model["lstm"].weight_hh_l0.grad is not None


def test_parameters_over_the_same_bytes_share_them_and_others_do_not() -> None:
    model = place_values(construct(build_over_the_same_bytes, 0))
    assert model[0].weight is not model[1].weight
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    views = read_tensors(place_values(construct(Views, 0)))
    assert views["tied"] is views["first"]
    storages = {name: each.untyped_storage().data_ptr() for name, each in views.items() if name != "tied"}
    assert len(set(storages.values())) == len(storages)


def test_a_cut_keeps_only_its_part() -> None:
    eager = read_tensors(build_eagerly(Views))
    model = place_values(construct(Views, SEED), cut=lambda name, value: value[:1])
    for name, tensor in read_tensors(model).items():
        assert torch.equal(tensor, eager[name][:1])
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_generators_threads_and_modes_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_num_threads()
    construct(lambda: Doing(lambda m: torch.manual_seed(random.randrange(9) + np.random.randint(9))), 1)
    with pytest.raises(PacelineError):
        construct(lambda: Doing(lambda m: 1 / 0), 1)  # type: ignore[arg-type, return-value]
    assert torch.equal(expected[0], torch.rand(2))
    assert expected[1:] == (random.random(), np.random.rand())
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_seed_gives_other_numbers() -> None:
    one, other = (read_tensors(place_values(construct(Constants, seed))) for seed in (1, 2))
    assert not torch.equal(one["order"], other["order"])
    assert torch.equal(one["causal"], other["causal"])


# ---- several ranks


def raising_on_one_rank() -> nn.Module:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("no data here")
    return nn.Linear(3, 3)


def communicating() -> nn.Module:
    """Rank 0 decides, and the others wait for it."""
    width = torch.tensor(5 if dist.get_rank() == 0 else 0)
    dist.broadcast(width, 0)
    return nn.Linear(3, int(width))


def knowing_its_rank() -> nn.Module:
    model = nn.Linear(3, 3)
    model.rank = dist.get_rank()
    return model


ON_RANKS = ALL | {"communicating": communicating, "rank": knowing_its_rank}


def hand_out_all(world: Any, names: list[str]) -> dict[str, tuple[list[Tensor], int]]:
    """Return each model's tensors, and how often its factory ran here."""
    found = {}
    for name in names:
        runs = []

        def factory(name: str = name, runs: list[int] = runs) -> nn.Module:
            runs.append(1)
            return ON_RANKS[name]()

        construction = construct(factory, SEED, group=dist.group.WORLD)
        place_values(construction)
        found[name] = [each.detach() for each in read_tensors(construction.model).values()], len(runs)
    return found


def test_all_ranks_get_the_values_of_one_process(ranks: Pool) -> None:
    names = list(ON_RANKS)
    for rank, found in enumerate(ranks.run(hand_out_all, 3, (names,), timeout_s=90)):
        for name in ALL:
            tensors, num_runs = found[name]
            for tensor, expected in zip(
                tensors, read_tensors(build_eagerly(ALL[name])).values(), strict=True
            ):
                assert same_bits(tensor, expected), name
            assert num_runs == (2 if rank and name in READERS else 1), name
        assert found["communicating"][0][0].shape == (5, 3)
        assert found["rank"][1] == (2 if rank else 1)


def build_on_ranks(world: Any, name: str) -> None:
    construct(
        {"raising": raising_on_one_rank, "lazy": lambda: nn.LazyLinear(3)}[name], 0, group=dist.group.WORLD
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raising", "On rank 1 alone: The factory raised ZeroDivisionError: no data here.*PL457"),
        ("lazy", "PL458"),
    ],
)
def test_an_error_of_one_rank_ends_all(ranks: Pool, name: str, said: str) -> None:
    with pytest.raises(RankError, match=said):
        ranks.run(build_on_ranks, 3, (name,), timeout_s=60)


# ---- refusals


def build_partly_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def fill_first_row(model: Doing) -> None:
    model.partly = nn.Parameter(torch.empty(3, 3))
    nn.init.zeros_(model.partly.data[0])


REFUSED: dict[str, tuple[Factory, str, str]] = {
    "raises": (lambda: Doing(lambda m: 1 / 0), "PL457", "ZeroDivisionError: division by zero"),  # type: ignore[arg-type, return-value]
    "no module": (lambda: None, "PL457", "NoneType"),  # type: ignore[arg-type, return-value]
    "lazy": (lambda: nn.LazyLinear(3), "PL458", "weight, bias"),
    "on meta": (build_partly_on_meta, "PL458", "weight, bias"),
    "sparse": (
        lambda: Doing(lambda m: m.register_buffer("table", torch.eye(3).to_sparse())),
        "PL458",
        "table",
    ),
    "attribute that is part of a parameter": (
        lambda: Doing(lambda m: setattr(m, "rows", {"first": (m.weight.data[0],)})),
        "PL458",
        "rows['first'][0] is a tensor that shares its memory with weight",
    ),
    "never initialised": (
        lambda: Doing(lambda m: setattr(m, "bare", nn.Parameter(torch.empty(3)))),
        "PL459",
        "bare",
    ),
    "partly initialised": (lambda: Doing(fill_first_row), "PL459", "partly"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    factory, code, named = REFUSED[name]
    with pytest.raises(PacelineError) as caught:
        construct(factory, 0)
    assert caught.value.code == code
    assert named in caught.value.saw


def test_a_scratch_buffer_starts_as_zeros(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        construction = construct(lambda: Doing(lambda m: m.register_buffer("scratch", torch.empty(5))), 0)
    assert torch.equal(place_values(construction).scratch, torch.zeros(5))
    assert "scratch" in caplog.text


def build_foreign(name: str) -> nn.Module:
    """Return a small model of transformers, from its configuration."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    configs = {
        "LlamaForCausalLM": ("LlamaConfig", {**sizes, "vocab_size": 128, "num_key_value_heads": 2}),
        "GPT2LMHeadModel": (
            "GPT2Config",
            {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **ids},
        ),
        "T5ForConditionalGeneration": (
            "T5Config",
            {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        ),
        "BertForMaskedLM": ("BertConfig", {**sizes, "vocab_size": 128}),
        "ViTForImageClassification": ("ViTConfig", {**sizes, "image_size": 32, "patch_size": 8}),
    }
    config, arguments = configs[name]
    return getattr(transformers, name)(getattr(transformers, config)(**arguments))


FOREIGN = [
    *("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM"),
    "ViTForImageClassification",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_transformers(name: str) -> None:
    eager = read_tensors(build_eagerly(lambda: build_foreign(name)))
    model = place_values(construct(lambda: build_foreign(name), SEED))
    for key, tensor in read_tensors(model).items():
        assert same_bits(tensor, eager[key]), key
    built = _attempt_without_values(lambda: build_foreign(name), SEED)
    assert built.model is not None
    assert (built.obstacle, describe_tensors(read_tensors(built.model))) == ("", describe_tensors(eager))
