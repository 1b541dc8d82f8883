"""A decoder whose feed-forwards are mixtures of experts: each token goes through a few of many.

With no shared expert and no dense layers it computes what Hugging Face's `MixtralForCausalLM` does. Each
expert takes all tokens that choose it.

Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2; Fedus et al. 2021, "Switch
Transformers", section 2.2 (auxiliary loss); Jiang et al. 2024, "Mixtral of Experts", section 2.1 (weights
normalised over the chosen); Dai et al. 2024, "DeepSeekMoE", section 3.2 (shared expert).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.gpt import Decoder, FeedForward, GptBlock
from paceline.models.grouped import multiply_groups
from paceline.recipe.schema import MoeModel, default_ffn_hidden
from paceline.torch_seams.tensors import is_fake

# Of `balance_loss` and `bias_rate`.
DEFAULT_LOSS = 0.01
DEFAULT_RATE = 0.001


class MoeOutput(NamedTuple):
    """The result of a decoder with experts, for one microbatch.

    Attributes:
        logits: of the next token at every position, [batch, seq_len, vocab_size].
        balance: the auxiliary loss, weighted by `model.balance_loss`: a mean over the mixtures. Zero in eval
            mode.
        fullest: the share of the choices that the fullest expert gets; a mean over the mixtures.
    """

    logits: Tensor
    balance: Tensor
    fullest: Tensor


class MoeGpt(Decoder):
    """A decoder with experts, which returns next-token logits, the auxiliary loss and the balance.

    Args:
        section: the recipe's `[model]`.
        vocab_size: number of token ids.
        max_seq_len: longest sequence that `forward` takes.
    """

    section: MoeModel

    def __init__(self, section: MoeModel, vocab_size: int, max_seq_len: int) -> None:
        super().__init__(section, vocab_size, max_seq_len)
        self.num_mixtures = section.layers - section.dense_layers

    def build_block(self, number: int) -> MoeBlock:
        """Return a new block; the first `dense_layers` of them have no experts."""
        return MoeBlock(self.section, is_dense=number < self.section.dense_layers)

    def forward(self, ids: Tensor) -> MoeOutput:
        """Return logits and balance.

        Args:
            ids: token ids, int64 [batch, seq_len], seq_len at most `max_seq_len`.
        """
        x, cos, sin = self.embed(ids)
        balance = fullest = torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, balance, fullest = layer(x, cos, sin, balance, fullest)
        weight = self.section.balance_loss
        if weight is None:
            weight = 0.0 if self.section.balance == "bias" else DEFAULT_LOSS
        factor = weight / self.num_mixtures if self.training else 0.0
        return MoeOutput(self.unembed(x), balance * factor, fullest / self.num_mixtures)


class MoeBlock(GptBlock):
    """Attention and a mixture (or, in a dense layer, one feed-forward), each added to the residual stream."""

    def __init__(self, section: MoeModel, *, is_dense: bool) -> None:
        super().__init__(section, None if is_dense else Mixture(section))
        self.is_dense = is_dense

    def forward(  # type: ignore[override]  # it adds to the sums over mixtures, too
        self, x: Tensor, cos: Tensor, sin: Tensor, balance: Tensor, fullest: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `x` [batch, seq_len, hidden] with both outputs added, and the sums over mixtures so far."""
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        fed = self.mlp(self.post_attention_layernorm(x))
        if not self.is_dense:
            fed, own_balance, own_fullest = fed
            balance, fullest = balance + own_balance, fullest + own_fullest
        return x + self.drop(fed), balance, fullest


class Mixture(nn.Module):
    """Experts, a router that chooses a few of them for each token, and an optional expert for all tokens."""

    def __init__(self, section: MoeModel) -> None:
        super().__init__()
        self.num_choices = section.experts_per_token
        rate = section.bias_rate or DEFAULT_RATE
        self.balance = Balance(
            section.experts,
            rate if section.balance == "bias" else 0.0,
            remembers=section.balance == "global",
        )
        self.gate = nn.Linear(section.hidden, section.experts, bias=False)
        inner = section.expert_hidden or default_ffn_hidden(section.hidden)
        self.experts = Experts(section.experts, section.hidden, inner)
        self.shared = None
        if section.shared_hidden is not None:
            self.shared = FeedForward(section.hidden, section.shared_hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix the experts' outputs.

        Args:
            x: [batch, seq_len, hidden].

        Returns:
            The output in the same shape, the auxiliary loss (1 if all experts get the same), and the share of
            the choices that the fullest expert gets.
        """
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.gate(tokens)
        chances = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        chosen = self.balance(chances).topk(self.num_choices, dim=-1).indices
        weights = chances.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = count_choices(chosen, self.gate.out_features)
        self.balance.note(counts)
        answers = ask_experts(tokens, chosen, lambda rows: self.experts(rows, counts))
        output = (answers * weights.unsqueeze(-1).type_as(answers)).sum(1).view_as(x)
        if self.shared is not None:
            output = output + self.shared(x)
        shares = counts / chosen.numel()
        over = self.balance.share(counts).type_as(chances)
        balance = self.gate.out_features * (over * chances.mean(0)).sum()
        return output, balance, shares.max()


class Balance(nn.Module):
    """The choices that a mixture's router has made, and the bias by which it evens them out.

    Args:
        rate: how far the bias moves per step; 0 for no bias.
        remembers: whether the auxiliary loss takes the choices of the last global batch.

    Attributes:
        counts: how often each expert was chosen since the trainer set it to `None`, int64 [num_experts].
        bias: added to the probabilities to choose by; `None` for none.
        last: the choices of the last global batch, int64 [num_experts]; `None` unless they are remembered.
    """

    bias: Tensor | None
    last: Tensor | None

    def __init__(self, num_experts: int, rate: float, *, remembers: bool = False) -> None:
        super().__init__()
        self.num_experts, self.rate = num_experts, rate
        self.counts: Tensor | None = None
        self.register_buffer("bias", torch.zeros(num_experts) if rate else None)
        last = torch.zeros(num_experts, dtype=torch.int64) if remembers else None
        self.register_buffer("last", last)

    def forward(self, chances: Tensor) -> Tensor:
        """Return the numbers by which to choose, [tokens, num_experts], from probabilities."""
        return chances if self.bias is None else chances + self.bias.type_as(chances)

    def share(self, counts: Tensor) -> Tensor:
        """Return the share of each expert that the auxiliary loss takes, from the choices of a microbatch."""
        if self.last is None:
            return counts / counts.sum()
        # In the first step there is no last one.
        over = torch.where(self.last.sum() > 0, self.last, counts)
        return over / over.sum()

    def note(self, counts: Tensor) -> None:
        """Add the choices of a forward in training to `counts`; trial forwards make none."""
        if self.training and not is_fake(counts):
            self.counts = counts if self.counts is None else self.counts + counts

    @torch.no_grad()
    def move(self, counts: Tensor) -> None:
        """Move the bias by a step, up for experts with fewer choices than the mean, and remember the choices.

        Args:
            counts: of a global batch, whole numbers of any type [num_experts].
        """
        if self.bias is not None:
            # Compared as whole numbers: no mean is rounded.
            less = counts.sum() - counts * self.num_experts
            self.bias += self.rate * less.sign().to(self.bias.device, self.bias.dtype)
        if self.last is not None:
            self.last.copy_(counts)


def count_choices(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, int64 [num_experts].

    Args:
        chosen: numbers of experts, of any shape.
    """
    numbers = torch.arange(num_experts, device=chosen.device)
    return (chosen.reshape(-1, 1) == numbers).sum(0)


def ask_experts(tokens: Tensor, chosen: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the answers of its experts to each token, [tokens, choices, width].

    Rows are sorted by expert, and in their order within an expert. Each row is moved, never added to another
    one, so no order of sums depends on the device.

    Args:
        tokens: [tokens, width].
        chosen: the numbers of each token's experts, int64 [tokens, choices].
        answer: from rows that are sorted by expert to their answers.
    """
    num_choices, width = chosen.shape[-1], tokens.shape[-1]
    order = chosen.reshape(-1).argsort(stable=True)
    rows = tokens.unsqueeze(1).expand(-1, num_choices, -1).reshape(-1, width)
    answers = answer(rows.index_select(0, order))
    return answers.index_select(0, order.argsort()).view(-1, num_choices, answers.shape[-1])


class Experts(nn.Module):
    """SwiGLU feed-forwards side by side; those of `gate_up_proj` are gate and up, one above the other.

    Args:
        hidden: width of a token.
        inner: width inside an expert.
    """

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return each expert's answers to its rows.

        Args:
            rows: [rows, hidden], sorted by expert.
            counts: rows of each expert, int64 [num_experts].
        """
        # Read once, and not by each product and its backward.
        return self.multiply(rows, counts.cpu(), self.gate_up_proj, self.down_proj)

    @staticmethod
    def multiply(rows: Tensor, counts: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
        """Return the answers of the experts that have these weights; see `forward`."""
        gate, up = multiply_groups(rows, gate_up_proj, counts).chunk(2, dim=-1)
        return multiply_groups(F.silu(gate) * up, down_proj, counts)
