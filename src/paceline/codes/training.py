"""Training: PL400 to PL439."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL400": Page(
        "An argument of the trainer is out of range",
        "Sizes and counts start at 1; the norm to clip to and the seed start at 0. A negative norm would "
        "turn every gradient around.",
        "Give the argument that the message names such a value, or leave it out for its default.",
    ),
    "PL401": Page(
        "Unknown training dtype",
        "fp64 and fp32 hold and compute everything in that type; bf16 and fp16 run forwards under "
        "autocast over "
        "fp32 weights. Nothing else is offered.",
        'Use "fp32", or "bf16" on hardware that computes in it.',
    ),
    "PL402": Page(
        "trainer.model with several models",
        "`trainer.model` is the one plain module. With named models there is no single one.",
        'Use trainer.models["generator"].',
    ),
    "PL403": Page(
        "Saving without a run folder",
        "Checkpoints and metrics live in a run's folder, which `trainer.resume(folder)` names. An empty "
        "or missing "
        "folder starts a fresh run.",
        'Call trainer.resume("runs/demo") before the first save().',
    ),
    "PL404": Page(
        "Models and optimizers don't match by name",
        "With named models, the optimizers are a dict whose names are among the models', and an update "
        "is for one "
        "of them. A model without an optimizer is never updated.",
        'Trainer({"student": s, "teacher": t}, optimizer={"student": build}, step=...).',
    ),
    "PL405": Page(
        "Evaluating without a loss",
        "`trainer.evaluate` means the loss of one model. Trainers of named models have no single loss.",
        "Pass loss= to Trainer, or evaluate trainer.models[name] yourself.",
    ),
    "PL406": Page(
        "loss= and step= mixed up",
        "One model trains on loss(output, batch). Several named models train through step(update), "
        "which says which "
        "losses are computed, in what order, for whom.",
        'step=lambda update: (update("discriminator", d_loss), update("generator", g_loss)).',
    ),
    "PL407": Page(
        "An optimizer or schedule that the trainer can't use",
        "The trainer builds the optimizer itself, after the model has been placed and laid out, from the "
        "list of "
        "(name, parameter). An optimizer built before could hold the wrong tensors. It steps the optimizer "
        "and "
        "the schedule once per global batch, without a closure and without a metric. LBFGS and SAM need a "
        "closure; ReduceLROnPlateau needs a metric.",
        "optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4). Step ReduceLROnPlateau "
        "yourself after trainer.evaluate() and pass it to trainer.track().",
    ),
    "PL408": Page(
        "A tracked object has no state",
        "What joins a checkpoint gives its state with state_dict() and takes it back with "
        "load_state_dict(state).",
        "Add the two methods to the object's class.",
    ),
    "PL409": Page(
        "A batch without countable samples",
        "Samples are counted along the first dimension of the first tensor of a batch.",
        "Make the batch a tensor, or a dict or tuple of tensors, with samples along dimension 0.",
    ),
    "PL410": Page(
        "A loss that is not a scalar or a pair",
        "The loss over the global batch is the sum of losses over the sum of weights, so a loss "
        "function gives both; "
        "one scalar counts as the mean over the microbatch's samples. A vector, or a mean over tokens, "
        "would weigh "
        "ragged batches wrongly.",
        "Return (losses.sum(), losses.numel()), for tokens (sum over targets that count, number of these).",
    ),
    "PL411": Page(
        "Nothing to evaluate",
        "A mean over no samples, or over samples without any target, is not a number.",
        "Give a loader over a data set with at least one target.",
    ),
    "PL412": Page(
        "A loss that no parameter reaches",
        "The loss has no graph back to a trained parameter: it was computed under torch.no_grad(), from "
        "detached tensors, or is a constant.",
        "Compute it from the model's output. Where a microbatch has no targets, output.sum() * 0 is a zero "
        "with a graph.",
    ),
    "PL413": Page(
        "A result that depends on a cut that nobody chose",
        "Without microbatch_size the trainer cuts a global batch into 8 microbatches. For a loss that is a "
        "sum over "
        "samples the cut changes nothing but rounding. A contrastive loss compares each sample with the "
        "others of "
        "its microbatch, and a mean over targets (ignore_index) weighs microbatches alike, whatever number "
        "of "
        "targets they have. Before the first step the trainer computes the loss of one microbatch whole "
        "and cut in "
        "two, and refuses where they differ. BatchNorm normalizes with the statistics of a microbatch; for "
        "it a "
        "remark is logged.",
        'Pass loss_over="global_batch" for a loss that compares samples. Return (sum, number of targets) '
        "for a mean over targets. Or choose the cut yourself with microbatch_size=.",
    ),
    "PL414": Page(
        "BatchNorm with a single sample",
        "In training, BatchNorm normalizes with mean and variance of a microbatch. One value per channel "
        "has no "
        "variance, so torch refuses a microbatch of one sample. That happens with a small global batch, "
        "which is cut "
        "into 8 microbatches by default, and at the end of an epoch, where one sample can be left over.",
        "Set microbatch_size to 2 or more such that none is left over, or pass drop_last=True to the loader.",
    ),
    "PL415": Page(
        "A loss that can't be computed on the global batch",
        'With loss_over="global_batch" forward of every microbatch runs without a graph, the outputs of all '
        "samples are gathered on every rank, the loss is computed on them once, and forward runs again to "
        "backpropagate. "
        "So outputs and the fields that the loss uses have a row per sample, or are the same in all "
        "microbatches. "
        "What the loss learns from comes out of forward=, parameters such as a temperature included.",
        "forward=lambda model, batch: (model.images(batch[0]), model.texts(batch[1]), model.scale.exp()).",
    ),
    "PL416": Page(
        "A buffer that forward changes on each rank by itself",
        "A buffer such as an average of activations or the code book of a VQ-VAE is changed in every "
        "forward by values "
        "that depend on the samples. Ranks run other samples, so their buffers go apart, and with one "
        "process the "
        "order of microbatches counts. The trainer merges BatchNorm's running statistics; a buffer that "
        "changes "
        "alike for any samples (the power iteration of spectral_norm) changes once per step on all ranks. "
        "It can't "
        "know how to merge others.",
        "Update the buffer between steps, from values that all ranks have. The remark stops nothing.",
    ),
    "PL417": Page(
        "Ranks with different settings",
        "All ranks train one model, so their settings are the same: the trainer's arguments, the "
        "model's parameters and modules, the bytecode of the loss and of hooks, the optimizer's "
        "groups, the loader. They are compared when the trainer is built and at its first step. "
        "Hyperparameters, hooks and the loader are compared in every step.",
        "Look for an argument, a file, an environment variable or a line that depends on the rank or "
        "on the machine. A value that differs on purpose, such as a path, does not belong among the "
        "arguments of Trainer.",
    ),
    "PL418": Page(
        "Copies that differ between ranks",
        "Ranks of dp_replicate hold copies of weights and optimizer state, and ranks of tp hold "
        "copies of the parameters that tp does not divide. Every rank applies the same update to its "
        "copy, so the bits stay the same. Every step compares a digest of all weights and of a "
        "quarter of the optimizer's state, and every save compares everything. The message names the "
        "tensors. With three or more copies it also names the rank that differs from the others.",
        "Look for what changes weights, gradients or optimizer state on some ranks only: a gradient "
        "hook that depends on the rank, an in-place change between steps, a library of another "
        "version. If there is nothing of that kind, suspect the memory or the processor of the "
        "machine that is named. Go on from the newest checkpoint, which was compared before it was "
        "written.",
    ),
    "PL419": Page(
        "The same samples on several ranks",
        "Batches given to step() are this rank's samples, and together they make the global batch. "
        "Three different batches in a row were the same on several ranks, so each rank reads the "
        "whole data set in the same order: an epoch takes as long as on one rank, and every sample "
        "counts once per rank. Only the first 16 batches are compared.",
        "Use trainer.loader(dataset, global_batch_size=N), which gives each rank its share. Or build "
        "the DataLoader with sampler=DistributedSampler(dataset), and call its set_epoch in every "
        "epoch.",
    ),
    "PL420": Page(
        "Nothing to train",
        "An update needs at least one parameter that requires a gradient.",
        "Set requires_grad=True on the parameters to train.",
    ),
    "PL421": Page(
        "Parameters without a gradient under static_graph",
        "Ranks sum gradients in buckets, and a bucket is sent when all of its parameters have theirs. With "
        "ddp.static_graph = true every step uses what the first one used. A parameter that it leaves out "
        "keeps its bucket waiting, and with it every rank.",
        "Leave ddp.static_graph out, or set requires_grad=False where the parameter is never used.",
    ),
    "PL422": Page(
        "sync_batchnorm on the CPU",
        "torch's SyncBatchNorm has CUDA kernels only. Without it statistics are those of each "
        "microbatch, which are "
        "the same on every layout.",
        "Leave sync_batchnorm off, or train on CUDA.",
    ),
    "PL423": Page(
        "Several models in a layout that divides a model",
        "With named models a step runs several of them in one loss. Sharding and tensor parallelism gather "
        "and add up in the middle of a forward, in an order that all ranks must share; with several models "
        "it would depend on your step function.",
        "Use dp_replicate for all ranks, or train one model.",
    ),
    "PL424": Page(
        "sync_batchnorm together with accumulation",
        "Statistics over all ranks are taken while every rank runs one microbatch. With several "
        "microbatches per rank, "
        "or a rank without any, they would be over a part of the global batch that depends on the "
        "number of ranks.",
        "Set microbatch_size to global_batch_size / ranks and drop the ragged end, or leave "
        "sync_batchnorm off.",
    ),
    "PL425": Page(
        "Sparse gradients in an exact reduction",
        "The exact reduction adds dense gradients, element by element, in a fixed order. A sparse gradient "
        "(nn.Embedding(sparse=True)) holds rows in the order in which they were seen.",
        'Build the layer with sparse=False, or use reduction="fast".',
    ),
    "PL426": Page(
        "A communication hook beside the exact reduction",
        "The exact reduction is itself what happens to a bucket of gradients. What a hook of yours "
        "compresses, "
        "averages or remembers depends on how many ranks there are, and so would the weights.",
        'Leave comm_hook out, or use reduction="fast".',
    ),
    "PL427": Page(
        "sync_batchnorm beside the exact reduction",
        "SyncBatchNorm adds up statistics of all ranks with the library's collectives, in an order that "
        "depends on "
        "the number of ranks.",
        "Leave sync_batchnorm off: statistics are then those of each microbatch, which are the same on any "
        'number of ranks. Or use reduction="fast".',
    ),
    "PL428": Page(
        "Unknown reduction",
        'Gradients are summed over microbatches and ranks in one of two ways: "fast", by the library\'s '
        'all-reduce, or "exact", in an order that does not depend on the number of ranks.',
        'Use one of these names; "exact" for the same bits on any number of ranks.',
    ),
    "PL429": Page(
        "A call of a dropout that tp does not know",
        "A trial forward finds for every call of a dropout which part of its tensor a rank of tp has. This "
        "call was not among them, and the known calls of the same module differ from each other, so no mask "
        "is right for sure.",
        "Give each place that drops its own nn.Dropout. Where the loss calls the model again, let forward= "
        "do that.",
    ),
    "PL430": Page(
        "Ranks are at different steps",
        "Every rank takes the same steps. The number of the step travels with what ranks agree on, and "
        "doesn't agree.",
        "Look for a step, a `continue` or a `break` that depends on the rank or on local data.",
    ),
    "PL431": Page(
        "Too many steps in a row were skipped",
        "A loss or gradient that is not finite on any rank would spoil the weights on all, so the step "
        "is skipped on "
        "all. Many in a row mean that training has diverged or that data is broken.",
        "Lower the learning rate or add warm-up; look at the samples of the microbatch that the message "
        "names. The "
        "newest checkpoint has the weights from before.",
    ),
    "PL432": Page(
        "Out of memory",
        "Weights, gradients, optimizer state and one microbatch's activations must fit into the memory "
        "of a rank. The "
        "global batch doesn't have to: it is run microbatch by microbatch. The exact reduction keeps up to "
        "log2(microbatches of a rank) + 1 gradients beside the current one.",
        "--set train.microbatch_size=1 and upwards; the global batch, and with it the learning rate, stays. "
        "More ranks, or train.reduction=fast, for fewer gradients.",
    ),
    "PL433": Page(
        "Saving after steps without communication",
        "`without_communication` lets every rank take steps on its own share, so that compute can be timed "
        "alone. The ranks' weights differ from then on.",
        "Measure with a trainer of its own, and train with another.",
    ),
    "PL434": Page(
        "A hook that sees accumulated gradients",
        "`parameter.register_post_accumulate_grad_hook` runs after each microbatch of a rank has been added "
        "to `parameter.grad`. With dp_shard or tp no rank has that sum whole. With any layout it depends on "
        "how microbatches are shared out over ranks, so the hook would give other numbers on other layouts.",
        "Use `parameter.register_hook`, which sees the gradient of each microbatch under every layout, or "
        "`trainer.on_gradients`, which sees the sum over all microbatches before clipping.",
    ),
    "PL435": Page(
        "A block's parameters are used and the block is not called",
        "Under dp_shard each rank holds a part of a block's parameters. They are gathered when the model "
        "calls the block as a module, `block(x)`. A model that uses the parts of a block "
        "(`block.linear(x)`), its parameters or another method of it reads parameters that are not gathered.",
        "Do the work in the block's `forward` and call the block. A block that only holds parts can be an "
        "nn.ModuleDict: its parts are then sharded one by one. Or replicate: dp_shard=1 has no such rule.",
    ),
}
