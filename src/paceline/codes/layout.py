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
        why="In grouped-query attention every key and value head serves the same number of query heads.",
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
        why="Every rank has its place in the layout, so the degrees multiply to the number of ranks.",
        fix='Start as many ranks as the layout has places (--nproc), or set dp_replicate = "auto".',
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
        fix="Set static_graph = true where the promise holds, otherwise find_unused_parameters = true.",
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
        why="The learning rate would never reach lr, and what follows the warm-up would never begin.",
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
        why=(
            "A recipe is a text file in UTF-8 that this user may read, of at most a megabyte. A pipe or a "
            "device has no end that could be waited for."
        ),
        fix="Check its permissions and its encoding, and that it is a file. Save a pipe's output as a file.",
    ),
    "PL122": Page(
        title="The recipe is not TOML",
        why=(
            'The message gives line and column where reading stopped. Often quotes are missing: kind = "gpt".'
        ),
        fix="Fix that place. The whole of TOML is on one page: https://toml.io.",
    ),
    "PL123": Page(
        title="Malformed --set",
        why=(
            "A setting is section.key=value. The value is TOML; what is not TOML is taken as a "
            "string, and none leaves an optional key out."
        ),
        fix="Write for example --set train.steps=100 or --set 'data.files=[\"notes/*.txt\"]'.",
    ),
    "PL124": Page(
        title="A value that no key of a recipe can have",
        why=(
            "A recipe holds short tables and lists, integers of 64 bits and UTF-8 text. Deeper nesting, "
            "larger integers and text with NUL characters have no meaning in it."
        ),
        fix="Write a value as docs/recipe.md describes it for this key.",
    ),
    "PL125": Page(
        title="The model does not fit into this machine",
        why=(
            "The weights that the ranks of this machine would hold take more bytes than it has memory, "
            "before gradients, optimizer state and activations. Building them would end in the middle."
        ),
        fix=(
            "Lower model.layers or model.hidden, or divide the weights over more machines with "
            "layout.dp_shard or layout.tp."
        ),
    ),
    "PL126": Page(
        title="More ranks than a layout can have",
        why=(
            "All layouts on a number of ranks are compared to find those that work, which takes long for "
            "numbers that no cluster has."
        ),
        fix="Lower the degrees of the layout, or the number of ranks.",
    ),
    "PL130": Page(
        title="Parameters gathered in another type than the run's",
        why=(
            "shard.param_dtype is the type that sharded parameters are gathered in, and the model "
            "computes in it. train.dtype says what a run computes in: fp32 and fp64 mean all of it."
        ),
        fix=(
            'Set both, for example train.dtype = "bf16" and shard.param_dtype = "bf16", or leave '
            "param_dtype out."
        ),
    ),
    "PL131": Page(
        title="More ranks than microbatches",
        why=(
            "Ranks share out whole microbatches, so that a microbatch gives the same numbers wherever it "
            "is computed. Where a global batch has fewer of them than there are ranks of dp_replicate and"
            " dp_shard, some ranks add nothing. The run is right, but could be as fast on fewer ranks."
        ),
        fix=(
            "Lower train.microbatch_size or raise train.global_batch_size for a new run, or start fewer "
            "ranks."
        ),
    ),
    "PL132": Page(
        title="tp does not divide the heads",
        why=(
            "Under tp each rank computes whole attention heads, the same number of them on every rank "
            "(Shoeybi et al. 2019, Megatron-LM, section 3)."
        ),
        fix="Choose tp among the divisors of model.heads that the message lists.",
    ),
    "PL133": Page(
        title="tp does not divide the key and value heads",
        why=(
            "In grouped-query attention a rank of tp holds its query heads together with the key and "
            "value heads that these use. A key and value head is not copied to several ranks."
        ),
        fix="Choose tp among the divisors of model.kv_heads that the message lists.",
    ),
    "PL134": Page(
        title="tp does not divide the width inside the feed-forward",
        why=(
            "The first matrix of a feed-forward is split by its outputs and the second by its inputs, in "
            "equal parts."
        ),
        fix=(
            "Choose another tp, or make model.ffn_hidden a multiple of it. Its default follows from "
            "model.hidden."
        ),
    ),
    "PL135": Page(
        title="Nothing for tp to split",
        why=(
            "tp divides linear layers between wide features, attention heads and embeddings. A model of "
            "convolutions has none of these, so all ranks of tp would compute the same."
        ),
        fix="Leave tp out and give its ranks to dp_replicate or dp_shard.",
    ),
    "PL136": Page(
        title="sequence without tp",
        why=(
            "sequence = true splits the activations between the blocks along the sequence over the ranks "
            "of tp, where each rank would hold all of them otherwise (Korthikanti et al. 2022, section "
            "4.2.2)."
        ),
        fix="Set layout.tp = 2 or more, or leave sequence out.",
    ),
    "PL137": Page(
        title="tp does not divide the sequence",
        why="sequence = true gives each rank of tp an equal part of the sequence.",
        fix="Make data.seq_len a multiple of layout.tp, or leave sequence out.",
    ),
    "PL138": Page(
        title="zero without dp_shard",
        why=(
            "zero says what the ranks of dp_shard share out: the optimizer's state (1), gradients too "
            "(2), parameters too (3). With dp_shard = 1 there is nobody to share with, and the setting "
            "would have no effect."
        ),
        fix="Set layout.dp_shard = 2 or more, or leave zero out.",
    ),
    "PL139": Page(
        title="offload without dp_shard",
        why="What moves to the CPU or to disk are the shards that dp_shard makes.",
        fix="Set layout.dp_shard = 2 or more, or leave offload out.",
    ),
    "PL140": Page(
        title="Settings of sharding without sharding",
        why=(
            "The settings in [shard] say how dp_shard does its work. With dp_shard = 1 they would have no"
            " effect. A run of one rank, which has nobody to communicate with, is not refused."
        ),
        fix="Leave them out, or set layout.dp_shard = 2 or more.",
    ),
    "PL141": Page(
        title="Settings of DDP without DDP",
        why=(
            "DistributedDataParallel reduces gradients where dp_replicate is above 1 and dp_shard is 1. "
            "With dp_shard it is torch's fully_shard that reduces them, and the settings in [ddp] would "
            "have no effect."
        ),
        fix="Leave them out; [shard] has the settings of dp_shard.",
    ),
    "PL142": Page(
        title="A communication hook without DDP",
        why=(
            "A communication hook takes the place of DDP's all-reduce, and DDP is used where dp_replicate"
            " is above 1 and dp_shard is 1."
        ),
        fix="Leave the hook out, or use dp_replicate in place of dp_shard.",
    ),
    "PL143": Page(
        title="recompute for a model without blocks",
        why=(
            "recompute keeps a block's input and computes the rest of its activations again in backward. "
            "It needs to know what a block is: equal modules in an nn.ModuleList or nn.Sequential."
        ),
        fix="Leave recompute out, or put the repeated layers of the model into an nn.ModuleList.",
    ),
    "PL144": Page(
        title="More ranks of dp_shard than rows",
        why=(
            "dp_shard deals out each parameter by its first dimension. Ranks beyond the largest first "
            "dimension would hold no part of any parameter."
        ),
        fix="Lower layout.dp_shard and raise layout.dp_replicate.",
    ),
    "PL145": Page(
        title="Parameters freed that are not sharded",
        why=(
            "shard.reshard_after_forward = true frees a block's parameters after its forward. zero = 1 "
            "and zero = 2 say the opposite: parameters stay from a step's first forward to its last "
            "backward."
        ),
        fix='Set layout.zero = 3, or leave shard.reshard_after_forward at "auto".',
    ),
    "PL146": Page(
        title="A folder for offloading without offloading to disk",
        why=(
            'shard.offload_folder is where layout.offload = "disk" keeps its memory-mapped files. Nothing'
            " else is written there."
        ),
        fix='Set layout.offload = "disk", or leave the folder out.',
    ),
    "PL147": Page(
        title="Offloading from the CPU to the CPU",
        why=(
            'layout.offload = "cpu" keeps shards in the CPU\'s memory and moves them to the GPU for their '
            'use. With train.device = "cpu" they are there all the time.'
        ),
        fix='Use layout.offload = "disk", or leave it out.',
    ),
    "PL148": Page(
        title="Rounding beside the exact reduction",
        why=(
            'train.reduction = "exact" promises the same bits on any number of ranks, one included. '
            "shard.param_dtype and a narrower shard.reduce_dtype round what is gathered and summed, which"
            " one process doesn't do."
        ),
        fix='Leave these types out, or set train.reduction = "fast".',
    ),
    "PL149": Page(
        title="sync_batchnorm has nothing to synchronise",
        why=(
            "train.sync_batchnorm gathers the statistics of BatchNorm over all ranks that see different "
            "samples. It needs a model with BatchNorm and more than one such rank."
        ),
        fix="Leave sync_batchnorm out.",
    ),
    "PL150": Page(
        title="The vocabulary stays whole",
        why=(
            "Under tp the embedding is split by its rows and the logits and the loss with it, if tp "
            "divides the vocabulary. If not, every rank of tp holds and computes all of them. The numbers"
            " are the same; memory and time are not saved."
        ),
        fix="Pad the vocabulary to a multiple of tp where you choose it (data.vocab_size), or leave it.",
    ),
    "PL151": Page(
        title="Exact bits are those of one tp",
        why=(
            "The exact reduction fixes the order in which microbatches and ranks of data are added up. tp"
            " splits sums inside a matrix product, whose order is another one for every tp. Under one tp "
            "the weights have the same bits for any dp_replicate, dp_shard and zero."
        ),
        fix="Nothing. Compare `paceline checkpoint hash` among runs of the same tp.",
    ),
    "PL152": Page(
        title="Settings that wait for ranks",
        why=(
            "[ddp] and [shard] say how ranks communicate. On one rank they have no effect, and are not "
            "refused, so that one recipe serves a laptop and a cluster."
        ),
        fix="Nothing, if the recipe is meant for several ranks too; otherwise leave the settings out.",
    ),
}
