"""Recipe and layout: PL1xx."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL100": Page(
        title="Unknown key in a recipe",
        why=("Every key of a recipe is known, so that a typing error can't leave a setting without effect."),
        fix=(
            "Compare with the keys that the message lists, or with docs/recipe.md. A near match is suggested."
        ),
    ),
    "PL101": Page(
        title="A key is missing or has a value of the wrong kind",
        why=(
            "Types and ranges are checked before anything starts. Values are never converted: 3 "
            'is an integer, "3" and 3.0 are not.'
        ),
        fix=(
            "Give the key a value of the kind that the message names. docs/recipe.md has every "
            "key with its type and default."
        ),
    ),
    "PL102": Page(
        title="heads does not divide hidden",
        why="Attention cuts the width of the model into heads of equal width, hidden / heads.",
        fix=(
            "Choose heads among the divisors of hidden: hidden = 128 with heads = 4 gives heads of width 32."
        ),
    ),
    "PL103": Page(
        title="Heads of odd width",
        why="Rotary positions turn features in pairs, so hidden / heads has to be even.",
        fix="Choose for example hidden = 128 and heads = 4.",
    ),
    "PL104": Page(
        title="kv_heads does not divide heads",
        why=("In grouped-query attention every key and value head serves the same number of query heads."),
        fix="Set kv_heads to a divisor of heads, or leave it out for one per query head.",
    ),
    "PL105": Page(
        title="vocab_size and tokenizer don't fit",
        why=(
            'vocab_size is the size that tokenizer = "bpe" is trained to. The byte tokenizer '
            "always has 256 tokens, and a tokenizer.json brings its own size."
        ),
        fix='Set tokenizer = "bpe" together with vocab_size = 4096, or leave vocab_size out.',
    ),
    "PL106": Page(
        title="vocab_size too small",
        why="A byte-level BPE starts from the 256 bytes and adds merged pairs to them.",
        fix='Set vocab_size to 257 or more, or use tokenizer = "bytes".',
    ),
    "PL107": Page(
        title="The length of the run is not clear",
        why=(
            "A run ends after train.steps optimizer steps or after train.epochs passes over the "
            "data. One of them has to be set, and only one."
        ),
        fix="Keep one. If the recipe sets steps: --set train.steps=none --set train.epochs=2.",
    ),
    "PL108": Page(
        title="Microbatch larger than the global batch",
        why="A global batch is cut into microbatches, which the ranks share out among them.",
        fix="Lower train.microbatch_size or raise train.global_batch_size.",
    ),
    "PL109": Page(
        title="Linear learning rate scaling lacks its base",
        why=(
            'lr_scaling = "linear" multiplies lr by global_batch_size / base_batch_size. Without '
            "that number it can't scale, and without the scaling the number would do nothing."
        ),
        fix='Set both, for example lr_scaling = "linear" and base_batch_size = 256, or neither.',
    ),
    "PL110": Page(
        title="Not a layout",
        why=(
            "A layout in text is word=value pairs with spaces between, each word once, for example "
            '"dp_replicate=2 tp=2 sequence=true".'
        ),
        fix="Use the words that the message lists; docs/layouts.md says what each of them does.",
    ),
    "PL111": Page(
        title="An axis that this version can't lay out",
        why=(
            "The axes cp, pp and ep have their names already, so that recipes stay valid, but this version "
            "lays out dp_replicate, dp_shard and tp only."
        ),
        fix="Leave the axis out, or set it to 1, and give its ranks to the other axes.",
    ),
    "PL112": Page(
        title="A degree below 1",
        why="A degree counts the ranks along an axis. 1 means that the axis is not used.",
        fix="Set it to 1 or more, or leave it out.",
    ),
    "PL113": Page(
        title="The layout doesn't fit the number of ranks",
        why=("Every rank has its place in the layout, so the degrees multiply to the number of ranks."),
        fix=('Start as many ranks as the layout has places (--nproc), or set dp_replicate = "auto".'),
    ),
    "PL114": Page(
        title="Nesterov without momentum",
        why=("Nesterov's method evaluates ahead along the momentum; with momentum = 0 it would do nothing."),
        fix="Set momentum = 0.9, or nesterov = false.",
    ),
    "PL115": Page(
        title="static_graph and find_unused_parameters together",
        why=(
            "DDP either trusts that every step uses the same parameters (static_graph) or "
            "searches for those unused in each step. Together one of them would do nothing."
        ),
        fix=("Set static_graph = true where the promise holds, otherwise find_unused_parameters = true."),
    ),
    "PL116": Page(
        title="This model does not learn from this data",
        why=(
            'gpt predicts the next token (data.kind = "text"), encoder the masked tokens '
            '("masked_text"), resnet the class of an image ("digits", "cifar10").'
        ),
        fix="Change data.kind, or model.kind.",
    ),
    "PL117": Page(
        title="Warm-up longer than the run",
        why=("The learning rate would never reach lr, and what follows the warm-up would never begin."),
        fix="Lower optimizer.warmup_steps, or raise train.steps.",
    ),
    "PL118": Page(
        title="A word of a layout has a value that it doesn't take",
        why=(
            "zero, sequence, recompute and offload say how the axes of a layout are carried out. Each "
            "takes one of a few values, which docs/layouts.md lists."
        ),
        fix="Use one of the values that the message lists, or leave the word out for its default.",
    ),
    "PL120": Page(
        title="The recipe does not exist",
        why="A run starts from a recipe, a TOML file.",
        fix="Check the path. The folder recipes/ holds complete ones.",
    ),
    "PL121": Page(
        title="The recipe can't be read",
        why="A recipe is a text file in UTF-8 that this user may read.",
        fix="Check its permissions and its encoding, and that it is not a folder.",
    ),
    "PL122": Page(
        title="The recipe is not TOML",
        why=(
            'The message gives line and column where reading stopped. Often quotes are missing: kind = "gpt".'
        ),
        fix="Mend that place. The whole of TOML is on one page: https://toml.io.",
    ),
    "PL123": Page(
        title="Malformed --set",
        why=(
            "A setting is section.key=value. The value is TOML; what is not TOML is taken as a "
            "string, and none leaves an optional key out."
        ),
        fix="Write for example --set train.steps=100 or --set 'data.files=[\"notes/*.txt\"]'.",
    ),
    "PL130": Page(
        title="Parameters gathered in another type than the run's",
        why=(
            "shard.param_dtype is the type that parameters are gathered in, and blocks compute in it. "
            "train.dtype says what a run computes in: fp32 and fp64 mean all of it."
        ),
        fix='Set both, for example train.dtype = "bf16" and shard.param_dtype = "bf16", or leave it out.',
    ),
    "PL131": Page(
        title="A type of sums that has no effect",
        why=(
            "shard.reduce_dtype chooses whether gradients of 16 bits are widened before they are summed over "
            "ranks. Gradients have 16 bits only where shard.param_dtype gathers parameters in such a type."
        ),
        fix="Leave shard.reduce_dtype out, or set shard.param_dtype too.",
    ),
}
