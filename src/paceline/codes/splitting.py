"""PL460 to PL469: tensor parallelism."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL460": Page(
        title="The trial forward failed",
        why=(
            "How a model can be split over tp is read off one forward on tensors that have shapes and no "
            "numbers. A forward that needs a number to go on (.item(), if x.any()) or that the example batch "
            "doesn't fit can't be read."
        ),
        fix=(
            "Pass an example batch that the forward accepts (example=...). Where a value decides what is "
            "computed, move that decision out of the forward."
        ),
    ),
    "PL461": Page(
        title="Nothing of the model can be split over tp",
        why=(
            "Tensor parallelism splits matrix products. Where none can be split, every rank of tp would "
            "compute the same, and the ranks would be wasted."
        ),
        fix=(
            "Use the ranks for dp_replicate or dp_shard. The message has the reason for each matrix: often a "
            "number of heads or features that tp does not divide."
        ),
    ),
    "PL462": Page(
        title="tp_plan asks for what can't be done",
        why=(
            "The plan for tp is found by itself; entries of tp_plan pin single modules to a style. They must "
            "name modules of the model and agree with what the neighbours of a module need."
        ),
        fix='Leave the entry out, or write "replicate": tp_plan={"layers.*.mlp": "replicate"}.',
    ),
    "PL463": Page(
        title="tp needs an example batch",
        why="How a model can be split is read off one forward, and a forward needs a batch.",
        fix=(
            "Pass example=batch to Trainer or parallelize: a nest of tensors as the training loop will give, "
            "a few samples are enough. `paceline train` and `paceline verify` do it by themselves."
        ),
    ),
    "PL464": Page(
        title="The sequence can't be split between the blocks",
        why=(
            "With sequence=true each rank of tp has a part of the sequence between attention and "
            "feed-forward. That works where the blocks pass on one tensor [batch, length, width] and do to "
            "it, outside of what tp splits, only what treats every place by itself."
        ),
        fix="Leave sequence out; the message says what is in the way.",
    ),
    "PL465": Page(
        title="Nothing to recompute",
        why=(
            "recompute drops the activations inside of the model's repeated blocks and computes "
            "them again in backward. The blocks are found by themselves: the modules of one kind in the "
            "model's lists."
        ),
        fix="Leave recompute out, or put the repeated part of the model into an nn.ModuleList.",
    ),
    "PL466": Page(
        title="An optimizer that works with whole tensors, in a layout that divides them",
        why=(
            "Under dp_shard and tp a rank has a part of each tensor and of its gradient. An optimizer that "
            "treats every element by itself (SGD, Adam and their kin) gives each rank its part of the right "
            "update. One that takes means over rows, norms of layers or products of matrices would take them "
            "over the part, and be wrong without a word."
        ),
        fix="Use AdamW or another elementwise optimizer, or give the ranks to dp_replicate.",
    ),
}
