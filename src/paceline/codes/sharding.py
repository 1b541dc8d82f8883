"""Sharding: PL440 to PL449."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL440": Page(
        title="A parameter that can't be cut",
        why=(
            "dp_shard cuts every parameter along its first dimension and gives each rank one piece of "
            "memory. A tensor whose memory is not in the order of its dimensions (channels_last) has no such "
            "pieces."
        ),
        fix=(
            "Convert the model with model.to(memory_format=torch.contiguous_format) before handing it over. "
            "Or replicate with dp_replicate, which takes it as it is."
        ),
    ),
    "PL441": Page(
        title="Parameters without a gradient under dp_shard",
        why=(
            "The gradients of a block are summed over the ranks in the backward of the model's output. "
            "Parameters that a microbatch leaves out join that sum. Here it did not take place, as the loss "
            "does not come from a call of the model itself."
        ),
        fix=(
            "Call the model itself in forward=, and not a module inside of it, or set requires_grad=False on "
            "what the loss leaves out."
        ),
    ),
    "PL442": Page(
        title="Trained parameters of several types in one block",
        why="A block's gradients are summed as one vector, which has one type.",
        fix=(
            "Convert the model to one type before handing it over, model.to(torch.float32). Frozen "
            "parameters may have types of their own. For narrow compute use train.dtype or "
            "shard.param_dtype in place of a mix."
        ),
    ),
    "PL443": Page(
        title="Ranks ran different blocks",
        why=(
            "Under dp_shard a block's parameters are gathered from all ranks when it runs, in one order. A "
            "rank whose microbatch leaves a block out takes part in that in the block's place. Where that is "
            "not known, ranks would take each other's messages for their own, and the numbers would be wrong "
            "without any error. The ranks compare what they did once per step."
        ),
        fix=(
            "Define blocks in the order in which forward calls them, and call each at most once where some "
            "are left out. Or replicate: dp_shard=1 has no such rule."
        ),
    ),
    "PL444": Page(
        title="The folder for offload is in memory",
        why=(
            'offload = "disk" keeps parameters and optimizer state in files, so that the system can drop '
            "them from memory. A folder of type tmpfs is memory itself: nothing would be gained."
        ),
        fix="Set shard.offload_folder to a folder on a disk; `df PATH` shows what a folder is on.",
    ),
    "PL445": Page(
        title="The folder for offload can't be used",
        why='offload = "disk" makes files as large as a rank\'s parameters and optimizer state.',
        fix="Set shard.offload_folder to a folder that exists, can be written to and has the room.",
    ),
    "PL446": Page(
        title="reshard_after_forward and zero contradict each other",
        why=(
            "zero = 1 and 2 keep all parameters on every rank from a step's first forward to its last "
            "backward. Freeing them after each forward is what zero = 3 does."
        ),
        fix='Use layout.zero = 3, or leave shard.reshard_after_forward = "auto".',
    ),
    "PL448": Page(
        title="Fused optimizer kernels on CPU have other bits under dp_shard",
        why=(
            "torch's fused Adam and AdamW for CPU round elements in whole vector registers and those "
            "that are left over differently. Shards end elsewhere than whole tensors, so some elements would "
            'get another last bit than in one process, and reduction = "exact" promises the same.'
        ),
        fix='Leave fused=True out (foreach=True is as good under dp_shard), or set train.reduction = "fast".',
    ),
    "PL449": Page(
        title="A torch whose fully_shard has other names",
        why=(
            "dp_shard is built on torch's fully_shard and reads the records that torch keeps of each "
            "parameter. Their names are private to torch and change between versions. dp_shard is tested "
            "with torch 2.11, 2.12 and 2.13. The installed version lacks a name that dp_shard needs."
        ),
        fix=(
            "Install torch 2.11, 2.12 or 2.13, or use dp_shard=1. Every other layout works without "
            "these names."
        ),
    ),
}
