"""The place of each planted fault, and the report expected of verify.

docs/tables/verify-faults.md is made of it.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.verifying.faults import FAULTS


class Expected(NamedTuple):
    """A planted fault and the finding expected for it.

    Attributes:
        kind: of model: a recipe's, or `tied` (`models.py`).
        layout: that is faulty.
        code: of the cause.
        place: in the finding's `where`.
        words: in the message.
    """

    kind: str
    layout: str
    code: str
    place: str
    words: list[str]


EXPECTED: dict[str, Expected] = {
    "not_summed_on_one_rank": Expected(
        "gpt", "dp_replicate=2", "PL703", "step 1", ["on rank 1 only", "by no common factor"]
    ),
    "averaged_twice": Expected(
        "gpt", "dp_replicate=2", "PL703", "step 1", ["1/2 of", "dp_replicate=2", "on all 2 ranks"]
    ),
    "summed_twice": Expected(
        "gpt", "dp_replicate=4", "PL703", "step 1", ["4 times", "summed over dp_replicate=4 again"]
    ),
    "clipped_before_reduction": Expected("gpt", "dp_replicate=2", "PL703", "step 1", ["by no common factor"]),
    "microbatch_dropped": Expected("gpt", "dp_replicate=2", "PL704", "step 1", ["Microbatch 2 of 4"]),
    "gradient_overwritten": Expected("gpt", "dp_replicate=2", "PL703", "step 1", ["overwritten"]),
    "mean_of_means": Expected(
        "encoder", "dp_replicate=2", "PL707", "step 1", ["arrives at the output of the model itself"]
    ),
    "dropout_by_rank": Expected(
        "gpt",
        "dp_replicate=2",
        "PL702",
        "step 1",
        ["after rotary and before layers.0", "Other elements are 0", "rank 1 only"],
    ),
    "wrong_seed": Expected(
        "encoder", "dp_replicate=2", "PL702", "step 1, dropout", ["Dropout has dropout 0.1", "on all 2 ranks"]
    ),
    "dropout_the_same_every_step": Expected(
        "encoder", "dp_replicate=2", "PL702", "step 2, dropout", ["dropout 0.1"]
    ),
    "statistics_unsynchronised": Expected(
        "resnet", "dp_replicate=2", "PL710", "stem_norm.running", ["on all 2 ranks"]
    ),
    "norm_of_a_part": Expected("gpt", "dp_replicate=2", "PL708", "step 1", ["times the reference's"]),
    "another_start_on_one_rank": Expected(
        "gpt", "dp_replicate=2", "PL700", "before step 1", ["on rank 1 only"]
    ),
    "rounded_to_bf16": Expected("gpt", "dp_replicate=2", "PL712", "the sum of gradients", ["bf16"]),
    "row_sum_missing": Expected(
        "gpt", "tp=2", "PL701", "layers.0.self_attn.o_proj", ["in the output of layers.0.self_attn.o_proj"]
    ),
    "row_sum_twice": Expected("gpt", "tp=2", "PL701", "layers.0.self_attn.o_proj", ["2 times", "tp=2"]),
    "bias_on_every_rank": Expected("encoder", "tp=2", "PL701", "encoder.layers.0.linear2", ["in the output"]),
    "entry_sum_missing": Expected(
        "gpt", "tp=2", "PL707", "layers.1.self_attn.v_proj", ["gives to its input"]
    ),
    "entry_sum_twice": Expected(
        "gpt", "tp=2", "PL707", "layers.1.input_layernorm", ["arrives at the output", "2 times", "tp=2"]
    ),
    "summed_over_tp_in_place_of_dp": Expected(
        "gpt", "dp_replicate=2 tp=2", "PL703", "the sum of gradients", ["another group"]
    ),
    "norm_per_part": Expected("gpt", "tp=2", "PL708", "the global norm", ["a shard's own norm"]),
    "whole_parts_counted_on_every_rank": Expected(
        "gpt", "tp=2", "PL708", "the global norm", ["copies counted on every rank"]
    ),
    "tied_weights_untied": Expected(
        "tied", "tp=2", "PL711", "head.weight", ["Only the gradients of tied parameters"]
    ),
    "heads_share_masks": Expected(
        "gpt",
        "tp=2",
        "PL701",
        "layers.0.self_attn",
        ["on rank 1 only", "before layers.0.self_attn.o_proj", "dropout 0.1"],
    ),
    "residual_masks_differ": Expected(
        "gpt", "tp=2", "PL702", "step 1", ["on rank 1 only", "before layers.0", "Other elements are 0"]
    ),
    "partial_gradients_not_summed": Expected(
        "gpt", "tp=2 sequence=true", "PL707", "layers", ["summed over them"]
    ),
    "sequence_takes_another_part": Expected(
        "gpt", "tp=2 sequence=true", "PL701", "step 1", ["before layers.0"]
    ),
    "sequence_scatters_without_sum": Expected(
        "gpt", "tp=2 sequence=true", "PL701", "layers.0.self_attn.o_proj", ["in the output"]
    ),
    "rows_off_by_one": Expected("tied", "tp=2", "PL701", "table", ["in the output of table"]),
    "ignored_targets_counted": Expected(
        "tied", "tp=2", "PL718", "the loss", ["The result of the loss function"]
    ),
    "maximum_of_a_part": Expected("tied", "tp=2", "PL718", "the loss", ["a split vocabulary"]),
    "vocabulary_gradient_of_own_part": Expected(
        "tied", "tp=2", "PL707", "step 1", ["at the output of the model itself"]
    ),
    "start_by_rank": Expected(
        "gpt", "tp=2", "PL700", "before step 1", ["on rank 1 only", "depend on the rank"]
    ),
    "resumed_with_old_masks": Expected("gpt", "tp=2", "PL702", "step 2", ["Other elements are 0"]),
    "sums_rounded_to_bf16": Expected("encoder", "tp=2", "PL712", "encoder.layers.0.self_attn", ["bf16"]),
    "averaged_over_shards": Expected(
        "gpt", "dp_shard=2", "PL703", "the sum of gradients", ["1/2 of", "dp_shard=2"]
    ),
    "own_gradient_only": Expected("gpt", "dp_shard=2", "PL703", "the sum of gradients", ["missing"]),
    "chunk_of_another_rank": Expected(
        "gpt",
        "dp_shard=2",
        "PL703",
        "the sum of gradients",
        ["no common factor"],
    ),
    "shard_gradients_in_bf16": Expected("gpt", "dp_shard=2", "PL712", "the sum of gradients", ["bf16"]),
    "gathered_in_bf16": Expected("gpt", "dp_shard=2", "PL712", "embed_tokens", ["bf16"]),
    "gathered_once_for_all": Expected(
        "gpt", "dp_shard=2 zero=2", "PL714", "step 2, embed_tokens", ["gathered once and not again"]
    ),
    "sharded_microbatch_dropped": Expected(
        "gpt", "dp_shard=2", "PL704", "the global batch", ["Microbatch 2 of 4"]
    ),
    "gradient_of_a_microbatch_lost": Expected(
        "gpt", "dp_shard=2", "PL707", "step 1", ["arrives at the output of the model itself", "microbatch 2"]
    ),
    "idle_round_counted": Expected("gpt", "dp_shard=3", "PL703", "the sum of gradients", ["idle round"]),
    "sharded_gradient_overwritten": Expected(
        "gpt", "dp_shard=2 zero=3", "PL703", "the sum of gradients", ["overwritten"]
    ),
    "replicas_not_summed": Expected(
        "gpt", "dp_replicate=2 dp_shard=2", "PL703", "the sum of gradients", ["reduction that is missing"]
    ),
    "optimizer_skips_a_shard": Expected(
        "gpt", "dp_shard=2", "PL709", "layers", ["on rank 1 only", "Gradients and their norm agree"]
    ),
    "positions_from_zero": Expected(
        "gpt",
        "cp=2",
        "PL701",
        "layers.0.self_attn",
        ["before layers.0.self_attn.o_proj"],
    ),
    "mask_lost": Expected("gpt", "cp=2", "PL701", "layers.0.self_attn", ["o_proj"]),
    "mask_rows_of_another_rank": Expected(
        "gpt", "cp=2", "PL701", "layers.0.self_attn", ["o_proj", "Masks and positions"]
    ),
    "heads_in_another_order": Expected(
        "gpt", "cp=2", "PL701", "layers.0.self_attn", ["before layers.0.self_attn.o_proj", "rows for heads"]
    ),
    "heads_of_one_rank_twice": Expected(
        "gpt", "cp=2", "PL701", "layers.0.self_attn", ["before layers.0.self_attn.o_proj", "rows for heads"]
    ),
    "rows_in_another_order": Expected(
        "gpt", "cp=2", "PL701", "layers.0.self_attn.q_proj", ["in the output", "rows for heads"]
    ),
    "keys_of_one_rank_twice": Expected(
        "gpt", "cp=2", "PL701", "layers.0.self_attn.k_proj", ["in the output", "rows for heads"]
    ),
    "rows_of_another_rank": Expected("gpt", "cp=2", "PL701", "step 1", ["before layers.0"]),
    "rows_joined_in_another_order": Expected(
        "gpt", "cp=2", "PL701", "layers.1", ["in the output of layers.1"]
    ),
    "zigzag_not_undone": Expected(
        "gpt", "cp=2 cp_by=gather", "PL701", "layers.1", ["in the output of layers.1"]
    ),
    "dropout_from_position_zero": Expected(
        "gpt", "cp=2", "PL701", "layers.0", ["on rank 1 only", "after layers.0.self_attn"]
    ),
    "labels_shifted_across_the_cut": Expected(
        "gpt", "cp=2", "PL718", "the loss", ["The result of the loss function"]
    ),
    "gradient_of_keys_lost": Expected(
        "gpt", "cp=2", "PL707", "layers.1.self_attn", ["only layers.1.self_attn.k_proj.weight", "over cp"]
    ),
    "gradient_of_rows_lost": Expected(
        "gpt", "cp=2", "PL707", "embed_tokens", ["arrives at the output of embed_tokens", "over cp"]
    ),
    "weights_not_summed_over_cp": Expected(
        "gpt", "cp=2", "PL703", "the sum of gradients", ["reduction that is missing"]
    ),
    "weights_summed_twice_over_cp": Expected(
        "gpt", "cp=2", "PL703", "the sum of gradients", ["2 times", "cp=2", "second sum"]
    ),
    "weights_averaged_over_cp": Expected(
        "gpt", "cp=2", "PL703", "the sum of gradients", ["1/2 of", "averaged"]
    ),
    "causal_by_local_index": Expected(
        "gpt",
        "cp=2 cp_by=gather",
        "PL701",
        "layers.0.self_attn",
        ["before layers.0.self_attn.o_proj"],
    ),
    "causal_rows_of_another_rank": Expected(
        "gpt", "cp=2 cp_by=gather", "PL701", "layers.0.self_attn", ["o_proj", "Masks and positions"]
    ),
    "positions_of_the_first_rank": Expected(
        "gpt",
        "cp=2 cp_by=gather",
        "PL701",
        "step 1",
        ["on rank 1 only", "before layers.0"],
    ),
    "gathered_keys_of_one_rank_twice": Expected(
        "gpt", "cp=2 cp_by=gather", "PL701", "layers.0.self_attn", ["before layers.0.self_attn.o_proj"]
    ),
    "gradient_of_gathered_keys_not_summed": Expected(
        "gpt", "cp=2 cp_by=gather", "PL707", "layers.1.self_attn", ["v_proj", "over cp"]
    ),
    "experts_gradient_scaled_by_ep": Expected(
        "moe", "dp_replicate=2 ep=2", "PL707", "layers.1.mlp.experts", ["2 times", "ranks of ep=2"]
    ),
    "experts_not_summed_over_copies": Expected(
        "moe", "dp_replicate=4 ep=2", "PL707", "layers.1.mlp.experts", ["their 2 copies", "must be summed"]
    ),
    "experts_averaged_over_ep": Expected(
        "moe", "dp_replicate=2 ep=2", "PL707", "layers.1.mlp.experts", ["nothing is summed or averaged"]
    ),
    "answers_in_another_order": Expected(
        "moe", "dp_replicate=2 ep=2", "PL701", "layers.1.mlp.experts", ["in the output"]
    ),
    "tokens_of_another_expert": Expected(
        "moe", "dp_replicate=2 ep=2", "PL701", "layers.1.mlp.experts", ["in the output"]
    ),
    "norm_counts_copies_on_every_rank_of_ep": Expected(
        "moe", "dp_replicate=2 ep=2", "PL708", "the global norm", ["copies counted on every rank"]
    ),
    "norm_of_own_experts": Expected(
        "moe", "dp_replicate=2 ep=2", "PL708", "the global norm", ["a shard's own norm"]
    ),
    "weights_of_another_token": Expected(
        "moe", "dp_replicate=2 ep=2", "PL701", "layers.1.mlp", ["in the output"]
    ),
    "router_by_rank": Expected("moe", "dp_replicate=2", "PL701", "layers.1.mlp.balance", ["on rank 1 only"]),
    "bias_by_rank": Expected("moe bias", "dp_replicate=2 ep=2", "PL710", "layers.1.mlp.balance.bias", []),
    "mixture_of_own_rows": Expected("moe", "cp=2", "PL701", "layers.1.mlp", ["before layers.1.mlp.gate"]),
    "mixture_cut_as_another_rank": Expected("moe", "cp=2", "PL701", "layers.1.mlp", ["in the output"]),
    "answers_of_runs_in_another_order": Expected(
        "moe", "cp=2 ep=2", "PL701", "layers.1.mlp.experts", ["in the output"]
    ),
    "rows_gradient_of_own_experts": Expected("moe", "cp=2 ep=2", "PL707", "layers.1.mlp", ["gradient"]),
    "activations_swapped": Expected(
        "gpt",
        "pp=2",
        "PL701",
        "layers.0",
        ["in the output of layers.0, microbatch 0", "received"],
    ),
    "stale_buffer": Expected(
        "gpt",
        "pp=2",
        "PL701",
        "layers.0",
        ["in the output of layers.0, microbatch 1", "received"],
    ),
    "activations_in_bf16": Expected("gpt", "pp=2", "PL712", "layers.0", ["bf16", "on rank 1 only"]),
    "skip_gradient_dropped": Expected(
        "routed",
        "pp=2 schedule=interleaved chunks=2",
        "PL707",
        "blocks.2",
        ["arrives at the output of blocks.2", "lost or doubled between stages"],
    ),
    "shared_use_dropped": Expected(
        "gpt", "pp=2", "PL707", "embed_tokens", ["the gradient of embed_tokens.weight", "several stages use"]
    ),
    "shared_use_twice": Expected(
        "gpt", "pp=2", "PL707", "embed_tokens", ["the gradient of embed_tokens.weight", "several stages use"]
    ),
    "auxiliary_loss_on_every_stage": Expected(
        "routed", "pp=2", "PL707", "blocks.2", ["2 times the reference's", "lost or doubled between stages"]
    ),
    "late_gradients_lost": Expected(
        "gpt", "pp=2 schedule=zero_bubble", "PL703", "the sum of gradients", ["left out"]
    ),
    "late_gradients_twice": Expected(
        "gpt", "pp=2 schedule=zero_bubble", "PL703", "the sum of gradients", ["2 times", "second backward"]
    ),
    "loss_divided_by_microbatches": Expected(
        "gpt", "pp=2", "PL707", "", ["0.25 times the reference's", "what the loss is divided by"]
    ),
    "last_microbatch_twice": Expected("gpt", "pp=2", "PL703", "the sum of gradients", ["no common factor"]),
    "microbatch_lost_on_a_stage": Expected(
        "gpt", "pp=2", "PL703", "the sum of gradients", ["on rank 1 only"]
    ),
    "replicas_of_a_stage_not_summed": Expected(
        "gpt",
        "pp=2 dp_replicate=2",
        "PL703",
        "the sum of gradients",
        ["on ranks 2 and 3 of 4"],
    ),
    "statistics_of_a_stage_lost": Expected("resnet", "pp=2", "PL710", "blocks.1.norm1.running", ["buffers"]),
    "norm_of_own_stage": Expected("gpt", "pp=2", "PL708", "the global norm", ["times the reference's"]),
    "dropout_by_stage": Expected(
        "gpt", "pp=2", "PL701", "layers.1.self_attn", ["on rank 1 only", "dropout 0.1"]
    ),
    "stage_not_updated": Expected(
        "gpt", "pp=2", "PL709", "layers.1", ["on rank 1 only", "Gradients and their norm agree"]
    ),
}


def table() -> str:
    """All of them, in Markdown."""
    lines = ["| planted | in | found at | cause |", "|---|---|---|---|"]
    for name, fault in FAULTS.items():
        expected = EXPECTED[name]
        what = (fault.__doc__ or "").strip().rstrip(".")
        place = expected.place if not expected.place.startswith(("step", "before")) else expected.words[0]
        lines.append(f"| {what} | {expected.kind}, `{expected.layout}` | {place} | {expected.code} |")
    return "\n".join(lines)
