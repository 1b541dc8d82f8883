"""Models and layouts that cp and ep cannot take are refused at once, with value, rule, next move and code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from paceline.errors import PacelineError
from paceline.models.moe import Experts
from paceline.parallel.context.find import find_context_plan
from paceline.recipe import Layout, parse_recipe
from paceline.recipe.legal import Rules
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.parallel.context.test_context_refusals import LENGTH, REFUSED, Attend, Model, _plain
from tests.train.test_expert_lists import Everything


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        run: returns the message; on every rank of `num_ranks`, or in this process if that is 0.
        code: in the message.
        saw, fix: words of the message: the value, and what works.
        num_ranks: that the trainer is built on.
    """

    run: Callable[[], str]
    code: str
    saw: str
    fix: str
    num_ranks: int = 0


# ---- ways to pass bad input


def message_of(function: Callable[[], Any]) -> str:
    with pytest.raises(PacelineError) as caught:
        function()
    return str(caught.value)


def lay_out(model: nn.Module, num_ranks: int = 2, by: str = "heads") -> Callable[[], str]:
    """Plan cp for a model, as each rank does before it changes it."""
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    return lambda: message_of(lambda: find_context_plan(model, lambda m: m(ids), num_ranks, by=by))


def check(text: str, **model: Any) -> Callable[[], str]:
    """Check a recipe's layout, as every command does before it starts ranks; return all problems."""
    table = {
        "model": {"kind": "moe", "layers": 2, "hidden": 32, "heads": 4, "experts": 4, **model},
        "data": {"kind": "text", "files": ["python-stdlib"], "seq_len": 16},
        "train": {"steps": 1, "global_batch_size": 8, "microbatch_size": 2},
    }
    if table["model"]["kind"] == "gpt":  # type: ignore[index]
        del table["model"]["experts"]  # type: ignore[attr-defined]

    def run() -> str:
        try:
            recipe = parse_recipe(table)
        except PacelineError as error:
            return str(error)
        layout = Layout.parse(text).close()
        return "\n".join(map(str, Rules.of(recipe).check(layout, layout.num_ranks)))

    return run


def train(
    build: Callable[[], nn.Module], layout: str = "dp_replicate=2 ep=2", **given: Any
) -> Callable[[], str]:
    """Build a trainer; the model's forward does not run."""

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(**batch)

    def start() -> Any:
        return Trainer(
            build(),
            forward=forward,
            loss=lambda output, batch: (output.sum(), torch.tensor(1.0)),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            layout=layout,
            microbatch_size=2,
            **given,
        )

    return lambda: message_of(start)


# ---- models


def with_attention(kind: type[nn.Module]) -> nn.Module:
    model = Model(_plain)
    for block in model.blocks:
        block.attend = kind()
    return model


@torch.library.custom_op("paceline_tests::masked_attention", mutates_args=())
def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).contiguous()


@masked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(q)


class OwnKernel(Attend):
    """Attention in a kernel that takes any mask and returns no logsumexp."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        result: Tensor = torch.ops.paceline_tests.masked_attention(q, k, v, mask)
        return result

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, 4, 8).transpose(1, 2) for y in self.qkv(x).split(32, dim=-1))
        result: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, 32))
        return result


class Flex(OwnKernel):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings():  # torch warns that it is not compiled
            warnings.simplefilter("ignore")
            result: Tensor = flex_attention(q, k, v)
        return result


class Written(OwnKernel):
    """Attention by matrix products."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def llama(**given: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            **given,
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
        return model

    return build


def kernel_of(name: str) -> nn.Module:
    model = Model(_plain)
    model.config = type("Config", (), {"_attn_implementation": name})()  # as models of transformers have it
    return model


def tied() -> nn.Module:
    model = nn.Module()
    model.first, model.second = Experts(4, 16, 16), Experts(4, 16, 16)
    model.second.down_proj = model.first.down_proj
    return model


def of(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind())


IDS = torch.zeros(2, LENGTH, dtype=torch.int64)
NO_CP = "Set cp=1 and give its ranks to dp_shard, dp_replicate or tp."
SDPA = "F.scaled_dot_product_attention"

CASES: dict[str, Case] = {
    # ---- cp
    "cp above the length of a recipe": Case(
        check("cp=32"), "PL631", "data.seq_len=16", "Set cp to at most 16"
    ),
    "cp above the length of the example": Case(
        lay_out(Model(_plain), 16), "PL631", "a sequence of 12 positions on cp=16", "Set cp to at most 12"
    ),
    "cp above the length, by gather": Case(
        lay_out(Model(_plain), 16, "gather"), "PL631", "12 positions on cp=16", "Set cp to at most 12"
    ),
    **{
        name: Case(lay_out(Model(REFUSED[name][0])), "PL630", REFUSED[name][1], NO_CP)
        for name in ("convolution along the sequence", "scan along the sequence", "pooling inside a block")
    },
    "the line of a scan": Case(
        lay_out(Model(REFUSED["scan along the sequence"][0])),
        "PL630",
        "positions of the sequence (tests/parallel/context/test_context_refusals.py:",
        NO_CP,
    ),
    "flash_attention_2": Case(
        lay_out(kernel_of("flash_attention_2")),
        "PL640",
        'attn_implementation="flash_attention_2"',
        'attn_implementation="sdpa"',
    ),
    "flex_attention of transformers": Case(
        lay_out(kernel_of("flex_attention"), by="gather"),
        "PL640",
        'attn_implementation="flex_attention"',
        'attn_implementation="sdpa"',
    ),
    "flex_attention of torch": Case(
        lay_out(with_attention(Flex)), "PL640", "in blocks.0.attend, which calls flex_attention", SDPA
    ),
    "gather with a kernel of another library": Case(
        lay_out(with_attention(OwnKernel), by="gather"),
        "PL640",
        "paceline_tests::masked_attention in blocks.0.attend (tests/train/test_misuse_axes.py:",
        SDPA,
    ),
    "gather with attention by products": Case(
        lay_out(with_attention(Written), by="gather"), "PL634", "bmm in blocks.0.attend", 'cp_by="heads"'
    ),
    "hidden states of blocks": Case(
        train(llama(), "cp=2", example={"input_ids": IDS, "output_hidden_states": True}),
        "PL630",
        "returns a tensor from inside of its blocks",
        "output_hidden_states",
        num_ranks=2,
    ),
    "sequence with cp": Case(
        check("cp=2 sequence=true"), "PL492", "layout.cp=2 with layout.sequence=true", "Leave sequence out"
    ),
    "cp without an example": Case(
        train(llama(), "cp=2"), "PL463", "cp=2 without an example", "Pass example=batch", num_ranks=2
    ),
    "heads that cp does not divide": Case(
        check("cp=8 cp_by=heads"), "PL632", "model.heads=4", 'cp_by="gather"'
    ),
    "cp_by without cp": Case(
        check("dp_replicate=2 cp_by=gather"), "PL138", "cp_by=gather", "Set cp=2 or more"
    ),
    # ---- ep
    "ep that does not divide the experts": Case(
        check("dp_replicate=8 ep=8"), "PL655", "ep=8 does not divide 4 experts", "Set ep to 1, 2 or 4"
    ),
    "ep that does not divide the experts of a model": Case(
        train(lambda: nn.Sequential(Experts(3, 16, 16))),
        "PL655",
        "ep=2 does not divide 3 experts",
        "Set ep to 1",
        num_ranks=2,
    ),
    "ep that does not divide the ranks of data": Case(
        check("dp_replicate=3 ep=2"), "PL654", "does not divide layout.dp_replicate=3", "multiple of 2"
    ),
    "ep beside cp": Case(
        check("dp_replicate=3 cp=2 ep=3"), "PL654", "layout.ep=3 with layout.cp=2", "Set ep to 1 or 2"
    ),
    "no experts found": Case(
        train(lambda: nn.Linear(3, 2)),
        "PL653",
        "ep=2 for a model without experts",
        "Leave ep out",
        num_ranks=2,
    ),
    "ep on a dense model": Case(
        check("dp_replicate=2 ep=2", kind="gpt"), "PL653", "ep=2 for a model without experts", "Leave ep out"
    ),
    "mixtures that share weights": Case(
        train(tied), "PL659", "first.down_proj, second.down_proj", "its own experts", num_ranks=2
    ),
    "experts in a list": Case(
        train(of(Everything)), "PL658", "0.experts (ModuleList of 4 Expert)", "leave ep out", num_ranks=2
    ),
    "a rate without a bias": Case(check("", bias_rate=0.01), "PL660", "bias_rate=0.01", 'balance = "bias"'),
    "balance by bias of a model without one": Case(
        check("", kind="gpt", balance="bias"), "PL100", "model.balance", 'kind="moe"'
    ),
}


def run_on_ranks(world: Any, name: str) -> str:
    return CASES[name].run()


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused(ranks: Pool, name: str) -> None:
    case = CASES[name]
    found = ranks.run(run_on_ranks, case.num_ranks, (name,)) if case.num_ranks else [case.run()]
    for text in found:
        assert f"[{case.code}]" in text, text
        assert case.saw in text
        assert case.fix in text


def test_all_problems_of_a_layout_are_told_together() -> None:
    text = check("dp_replicate=3 cp=32 cp_by=heads sequence=true ep=5")()
    for code in ("PL631", "PL632", "PL492", "PL654", "PL655"):
        assert f"[{code}]" in text, text
