"""A Llama-style decoder whose weights are those of Hugging Face's `LlamaForCausalLM`, one for one.

Names: put `model.` before every parameter's name except `lm_head.weight`, and it is the Hugging Face
name. Shapes and meanings are equal (separate q, k, v, gate, up and down matrices without biases;
rotary positions turn the first half of a head's features against the second half). With
`tie_embeddings` there is no `lm_head.weight`, as in Hugging Face's files.

Sources: Touvron et al. 2023, "LLaMA", section 2.2 (pre-norm, SwiGLU, rotary); Su et al. 2021,
"RoFormer", section 3.2; Shazeer 2020, "GLU Variants"; Ainslie et al. 2023, "GQA"; Radford et al.
2019, section 2.3 (residual outputs scaled by 1/sqrt(2 layers) at the start).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.recipe.schema import DecoderFields, GptModel, default_ffn_hidden


class Decoder(nn.Module):
    """The parts that all decoders share: embedding, positions, a list of blocks, and the head.

    Args:
        section: the recipe's `[model]`.
        vocab_size: number of token ids.
        max_seq_len: longest sequence that `forward` takes.
    """

    def __init__(self, section: DecoderFields, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.section = section
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.embed_tokens = nn.Embedding(vocab_size, section.hidden)
        self.rotary = Rotary(section.hidden // section.heads, max_seq_len, section.rope_theta)
        self.layers = nn.ModuleList(self.build_block(number) for number in range(section.layers))
        self.norm = nn.RMSNorm(section.hidden, eps=section.norm_eps)
        self.lm_head = None if section.tie_embeddings else nn.Linear(section.hidden, vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        std = self.section.init_std
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # the norms' weights start at one
            # Each block adds two outputs to the residual stream; with this scale the variance does not grow
            # with depth.
            scale = 1 / math.sqrt(2 * self.section.layers) if _is_residual_output(name) else 1.0
            nn.init.normal_(parameter, std=std * scale)

    def build_block(self, number: int) -> nn.Module:
        """Return a new block, by its place in the list."""
        return GptBlock(self.section)

    def embed(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of the first block [batch, seq_len, hidden], and the cosines and sines."""
        check_seq_len(ids, self.max_seq_len)
        x = F.dropout(self.embed_tokens(ids), self.section.dropout, self.training)
        return x, *self.rotary(ids.shape[1])

    def unembed(self, x: Tensor) -> Tensor:
        """Return the logits for the output of the last block."""
        x = self.norm(x)
        return F.linear(x, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)


class Gpt(Decoder):
    """A decoder that returns next-token logits.

    Args:
        section: the recipe's `[model]`.
        vocab_size: number of token ids.
        max_seq_len: longest sequence that `forward` takes.
    """

    section: GptModel

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token at every position.

        Args:
            ids: token ids, int64 [batch, seq_len], seq_len at most `max_seq_len`.

        Returns:
            [batch, seq_len, vocab_size].
        """
        x, cos, sin = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.unembed(x)


def _is_residual_output(name: str) -> bool:
    return name.endswith(
        ("self_attn.o_proj.weight", "mlp.down_proj.weight", "experts.down_proj", "shared.down_proj.weight")
    )


def check_seq_len(ids: Tensor, max_seq_len: int) -> None:
    """Raise PL220 if `ids` [batch, seq_len] is longer than a model has positions."""
    if ids.shape[1] > max_seq_len:
        raise PacelineError(
            "PL220",
            saw=f"a sequence of {ids.shape[1]} tokens for a model of {max_seq_len} positions.",
            rule="A model has positions for data.seq_len tokens.",
            fix=f"Set data.seq_len={ids.shape[1]} and train, or shorten the sequence to {max_seq_len}.",
        )


class Rotary(nn.Module):
    """The cosines and sines of rotary positions.

    Computed in fp32 as Hugging Face does, so that an export computes the same numbers.

    Args:
        head_dim: width of a head (even).
        max_seq_len: number of positions.
        theta: base of the frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        # Not persistent: they follow from the recipe and do not belong in a checkpoint.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the first positions, each [seq_len, head_dim]."""
        return self.cos[:seq_len], self.sin[:seq_len]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [batch, heads, seq_len, head_dim] by their positions."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).type_as(x)  # under autocast x is 16 bits wide, cos and sin are 32


class GptBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, section: DecoderFields, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.dropout = section.dropout
        self.input_layernorm = nn.RMSNorm(section.hidden, eps=section.norm_eps)
        self.self_attn = Attention(section)
        self.post_attention_layernorm = nn.RMSNorm(section.hidden, eps=section.norm_eps)
        inner = section.ffn_hidden or default_ffn_hidden(section.hidden)
        self.mlp = FeedForward(section.hidden, inner) if mlp is None else mlp

    def drop(self, x: Tensor) -> Tensor:
        """Apply the dropout of the block's outputs."""
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `x` [batch, seq_len, hidden] with both outputs added."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.drop(attended)
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head."""

    def __init__(self, section: DecoderFields) -> None:
        super().__init__()
        self.head_dim = section.hidden // section.heads
        self.dropout = section.dropout
        kv_heads = section.kv_heads or section.heads
        self.shares_heads = kv_heads != section.heads
        self.q_proj = nn.Linear(section.hidden, section.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(section.hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(section.hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(section.heads * self.head_dim, section.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention over `x` [batch, seq_len, hidden], in the same shape."""
        batch, seq_len, _ = x.shape

        def heads(projected: Tensor) -> Tensor:  # [batch, heads, seq_len, head_dim]
            return projected.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)

        queries = rotate(heads(self.q_proj(x)), cos, sin)
        keys = rotate(heads(self.k_proj(x)), cos, sin)
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            heads(self.v_proj(x)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.shares_heads,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, seq_len, -1))
        return output


class FeedForward(nn.Module):
    """The SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for `x` [batch, seq_len, hidden], in the same shape."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output
