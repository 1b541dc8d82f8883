"""Comparing layouts: PL700 to PL729."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL700": Page(
        title="A layout starts from other weights",
        why="Every layout starts from the same weights and buffers, to the bit: a built model's are rank "
        "0's, a factory's follow from the seed and the parameter's name.",
        fix="Look for random numbers that depend on the rank when the model is built, and for tensors "
        "that are neither parameters nor buffers.",
    ),
    "PL701": Page(
        title="A module's output differs",
        why="The module that the message names is the first, in the order of the forward, whose output is"
        " not that of one process although its input is.",
        fix="Look at how this module is laid out. Under tp the usual causes are a sum left out after a "
        "matrix product that was split by rows, and heads that are not divided as their weights are.",
    ),
    "PL702": Page(
        title="Random numbers depend on the layout",
        why="Dropout masks depend on seed, step, sample and position only. Where they don't, a run can't "
        "be repeated on other ranks, and under tp a mask that differs where it should be one leaves "
        "ranks with different activations.",
        fix="Draw random numbers through nn.Dropout or torch's functions inside the forward. A generator "
        "of your own must be seeded by what is computed, never by the rank.",
    ),
    "PL703": Page(
        title="Gradients are off by a factor",
        why="The gradient is the sum over all microbatches, divided once by the weight of the global "
        "batch. A factor of a degree is a sum where there should be a mean; one over it, a mean on "
        "top of the division.",
        fix="Look for a second reduction over the axis that the message names, or a division by its degree.",
    ),
    "PL704": Page(
        title="A microbatch is lost or counted twice",
        why="Each microbatch of the global batch runs on one place of dp, and its gradient goes into the "
        "sum once.",
        fix="Look at how the batch is shared out, and at what is kept between the microbatches of a step:"
        " a gradient that is overwritten where it should be added to.",
    ),
    "PL705": Page(
        title="A rank's gradient is missing from the sum",
        why="Every rank that computes on samples of its own gives its gradient to the sum, and every rank"
        " applies the sum.",
        fix="Look for a reduction that is left out: no_sync around the last backward, a communication "
        "hook that returns what it got, a group with other ranks than the layout's axis.",
    ),
    "PL706": Page(
        title="Ranks or microbatches count with weights of their own",
        why="The loss is the sum of all losses over the sum of all weights. A mean of means gives a "
        "microbatch with few targets as much say as one with many; clipping before the reduction "
        "scales every rank's part by another number.",
        fix="Sum losses and weights over the global batch, divide once, and clip what is summed.",
    ),
    "PL707": Page(
        title="Backward differs",
        why="All outputs agree, and a gradient inside the model doesn't: backward through a split module "
        "must give what the whole one gives, and a parameter that is whole on ranks which compute on "
        "parts needs its gradient summed.",
        fix="Look at the backward of the module that the message names: a sum over tp left out or done "
        "twice, a tensor changed in place.",
    ),
    "PL708": Page(
        title="The global norm differs",
        why="The norm is over all gradients, each element once. A norm over a shard is too small; one "
        "that counts copies on several ranks is too large. What it clips is then wrong by the same "
        "factor.",
        fix="Sum squares over the axes that shard, and over no axis that replicates.",
    ),
    "PL709": Page(
        title="Weights differ after the update",
        why="Gradients and norm agree, so what comes after them is different: clipping, the optimizer, or"
        " the weights that it wrote to.",
        fix="Look at clipping and at the optimizer's settings on this layout. Where the message has a "
        "factor, that is how much more the optimizer saw than it should have.",
    ),
    "PL710": Page(
        title="A buffer is not the same on all ranks",
        why="Buffers change in forwards, each rank's by its own samples, unless something brings them "
        "together. BatchNorm's running statistics are merged over all microbatches of a step.",
        fix="Let a module of your own compute its buffer from what all ranks share, or leave it to "
        "BatchNorm.",
    ),
    "PL711": Page(
        title="Tied parameters went apart",
        why="Tied parameters are one tensor: its gradient is the sum of what all places give, and it is "
        "updated once.",
        fix="Look for a place that holds a copy, made when the model was moved, sharded or split.",
    ),
    "PL712": Page(
        title="A layout computes or sends in a narrower type",
        why="This layout computes or sends in a narrower type than one process does: bf16 or fp16, or "
        "fp32 in a run of fp64. It was seen at the operations, or the values have no more digits than "
        "this type has.",
        fix="Look for a cast or an autocast, and for a reduction that sends this type. If it is wanted, "
        "verify with --dtype bf16, where this is the rounding to be expected.",
    ),
    "PL713": Page(
        title="Only padding differs",
        why="Positions that the batch marks as padding differ, and no others. Nothing that counts depends"
        " on them yet, and it easily does later: in a statistic, a mean, an attention that forgot its"
        " mask.",
        fix="Look for a mask that is split or shifted another way than the tokens.",
    ),
    "PL714": Page(
        title="A forward used other weights",
        why="The weights that the module's forward found are not those that the last update left, or the "
        "module keeps a copy of a weight as it was after an earlier step.",
        fix="Look for weights that are gathered once and kept, or a copy that is not refreshed.",
    ),
    "PL715": Page(
        title="Bits differ where the exact reduction promises them",
        why='With reduction = "exact" every layout without tp has the bits of one process. This one '
        "differs by rounding.",
        fix="Look for a sum whose order depends on the ranks, another number of threads, or kernels that "
        "choose by the shape of what a rank holds.",
    ),
    "PL716": Page(
        title="Another batch went into the model",
        why="Every layout trains on the same global batches in the same order.",
        fix="Look at the data: an order, an augmentation or a step that depends on the rank; a batch "
        "function that doesn't give the same batch for the same step.",
    ),
    "PL717": Page(
        title="A rank failed under a layout",
        why="One process trains this, and the layout doesn't.",
        fix="Read the message of the rank that failed first. `paceline verify` goes on with the other "
        "layouts.",
    ),
    "PL718": Page(
        title="The loss differs",
        why="The model's output agrees. Either the loss of a microbatch depends on the layout, or the "
        "losses are not added up to the sum over the global batch.",
        fix="Look at the loss function (a mean over what a rank has; a sum over a split vocabulary) and "
        "at how losses and weights are added up.",
    ),
    "PL719": Page(
        title="Settings differ between ranks",
        why="The module that is the first to differ has another setting, hook or code on exactly the ranks "
        "that differ, or a function of torch was replaced on them.",
        fix="Look for what sets it by rank or by world size: a configuration that is read on one rank, a "
        "patch of a function, an if on the rank.",
    ),
    "PL720": Page(
        title="Nothing to verify",
        why="`verify` compares layouts with one process over some steps.",
        fix='Name a layout, for example --layout "dp_replicate=2", or --all --nproc 4; steps count from 1.',
    ),
    "PL721": Page(
        title="A data set without a batch size",
        why="A data set gives samples; a function from the step to a global batch knows its own size.",
        fix="Pass global_batch_size=16 beside the data set.",
    ),
    "PL722": Page(
        title="The reference can't be repeated",
        why="One process trained twice on the same batches, with microbatches in another order, gave "
        "numbers that are apart by more than rounding. Nothing can be compared with such a reference.",
        fix="Draw random numbers from the global generators of torch, numpy or Python, which are seeded "
        "per microbatch; give the same batch for the same step; keep no state from one forward to the"
        " next.",
    ),
    "PL723": Page(
        title="A forward writes to a weight",
        why="In one process a forward (or a hook at it) changes a weight in place, and the change stays. A "
        "layout that gathers the weight for the forward, or gives each rank a part, loses it or makes it "
        "twice.",
        fix="Change the weight after the step, or compute what the forward needs from the weight without "
        "writing to it, for example with torch.nn.utils.parametrize.",
    ),
    "PL724": Page(
        title="Verified in fp32",
        why="The model fails in fp64 and trains in fp32: some operation has no kernel for fp64. This is a "
        "remark and no fault. Everything was compared in fp32.",
        fix='Nothing needs to be done. With dtype="fp64" or --dtype fp64 the failure is shown as it is.',
    ),
    "PL725": Page(
        title="Parts of the model compute in a narrower type",
        why="The model casts to a narrower type inside, for example to fp32 for a norm or a scan while it "
        "trains in fp64. A layout that adds up such a part in another order is apart by rounding of that "
        "type. This is a remark and no fault: the first difference is in the code of such a part, what "
        "goes into it agrees to the training's precision, and everything after it is within what noise "
        "of that type in these parts does to one process.",
        fix="Nothing needs to be done. To compare more strictly, have the model compute in the type of its "
        "weights.",
    ),
    "PL726": Page(
        title="A layout differs, and where is not known",
        why="The layout gives other numbers than one process. `verify` runs such a layout again with every "
        "module watched, and this run failed.",
        fix="Train with another layout, and report the message.",
    ),
}
