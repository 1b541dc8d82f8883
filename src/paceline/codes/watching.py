"""Jobs that have stopped moving, and ranks that don't fit together: PL800 to PL849."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL800": Page(
        "Ranks wait for a rank that is elsewhere",
        "A collective (all_reduce, barrier, broadcast ...) completes only when every rank of its group "
        "has called it. One has not: it sleeps, waits for data, a lock or a file, computes, or has taken "
        "another branch. The message names its line, and the line at which the others wait.",
        "Either every rank comes to the call, or none does: take it out of `if rank == 0:`, and let long "
        "work of one rank end before the others' patience (`--hang-after`).",
    ),
    "PL801": Page(
        "Ranks wait for a rank that has ended",
        "A collective completes only when every rank of its group has called it. One has come to the end "
        "of its script, called sys.exit, or was killed, and the others are still in their loop: mostly it "
        "had fewer batches, or left the loop by a `break` that each rank decides for itself. With NCCL the "
        "others hang; with gloo they fail at once, as they lose their connection to it.",
        "Give all ranks the same number of steps (DistributedSampler, drop_last=True, or "
        "torch.distributed.algorithms.join.Join), and decide early stopping together: all_reduce the "
        "decision, then break on every rank.",
    ),
    "PL802": Page(
        "Ranks of a group call different collectives, or in another order",
        "The ranks of a group call collectives one by one, and the n-th call of one rank meets the n-th "
        "of each other. Where these are different calls, they hang, fail, or mix up numbers silently.",
        "Look at the two lines of the message: one of the calls stands in a branch, a loop or an `except` "
        "that only some ranks take, or its order depends on a set's or a dict's order. Ranks that went "
        "through backward with fewer gradients do this too: find_unused_parameters=True.",
    ),
    "PL803": Page(
        "Ranks give tensors of different sizes to one collective",
        "all_reduce, broadcast, reduce, all_gather and reduce_scatter need as many elements on each rank; "
        "a receive needs what the send has. Gloo aborts a rank that gets more bytes than it expects "
        "(SIGABRT), and gives one that gets fewer wrong numbers; NCCL hangs, or gives wrong numbers.",
        "Mostly a last, smaller batch: use drop_last=True, pad, or exchange the sizes first. For objects "
        "of any size there is all_gather_object. In backward: the ranks have built different models.",
    ),
    "PL804": Page(
        "Ranks give tensors of different dtypes to one collective",
        "A collective moves bytes; it converts nothing. float32 on one rank and float64 on another gives "
        "an error, a hang or wrong numbers.",
        "Convert before the call on every rank: `loss.float()`. A value made by Python or NumPy is float64.",
    ),
    "PL805": Page(
        "Ranks ask one reduction for different operations",
        "Each rank reduces its part by itself. With SUM on one and MAX on another the results differ from "
        "rank to rank, and nothing fails.",
        "Give the same `op=` on every rank.",
    ),
    "PL806": Page(
        "Ranks wait for each other in several groups, in a circle",
        "One rank waits in a collective of a first group for a rank that waits in a collective of a "
        "second group for the first rank. With NCCL the order also matters where calls are asynchronous.",
        "Let all ranks call the groups' collectives in one order, for example the tensor-parallel group "
        "before the data-parallel one.",
    ),
    "PL807": Page(
        "A process group isn't made by all ranks",
        "new_group, new_subgroups and init_device_mesh are for every rank of the job, also for those that "
        "are not in the group: groups are named by counting calls. Where only members call them the counts "
        "go apart, and the members of a later group look for each other under different names.",
        "Call it on all ranks in the same order, and use the group on its members alone: "
        "`groups = [dist.new_group(r) for r in lists]`. Or use_local_synchronization=True on the members.",
    ),
    "PL808": Page(
        "A send without its receive, or a receive without its send",
        "Each send meets one receive of the other rank, in the order in which both were called. A send "
        "may only look complete while the buffers of the network hold it. Two ranks that both send first "
        "wait for each other.",
        "Check that both sides compute the peer alike (`rank + 1` at the last rank), and take as many "
        "rounds. Where both send, use dist.batch_isend_irecv, or let even ranks send first and odd ones "
        "receive first.",
    ),
    "PL809": Page(
        "A rank's process is stopped",
        "SIGSTOP, Ctrl-Z in its terminal, a debugger or a batch system's suspension has stopped it. It is "
        "alive, but does nothing, and the others wait for it.",
        "`kill -CONT PID` lets it go on. If nobody stopped it on purpose, look at the batch system's "
        "preemption.",
    ),
    "PL810": Page(
        "Ranks are missing where the process group is made",
        "init_process_group returns when as many ranks as the world size says have met at "
        "MASTER_ADDR:MASTER_PORT. A rank hasn't come: it was never started, is still before that line, or "
        "has another world size, address or port.",
        "Take all of these from the environment: `dist.init_process_group('gloo')` without rank=, "
        "world_size= and init_method=, and no `os.environ['MASTER_PORT'] = ...` in the script.",
    ),
    "PL811": Page(
        "No rank moves, and none waits in a collective",
        "All ranks wait for something outside of torch.distributed, or run in a loop without end: a lock, "
        "a queue, a file or a server that doesn't answer. The message names the lines.",
        "Look at these lines. If the job does move, only slowly, give it more time with `--hang-after`.",
    ),
    "PL812": Page(
        "A node can't be reached",
        "Its launcher hasn't answered for as long as ranks may stand still: the machine is down, or the "
        "network between is. Its ranks may still run, and wait for the others as these do for them.",
        "Look whether it is up (`ping`, the batch system's log). Start the job again without it, or once "
        "it is back.",
    ),
    "PL813": Page(
        "All ranks have come to a collective, and it doesn't complete",
        "The program is right: every rank has called it, with what fits. What is left is the transport: a "
        "link that lost packets, a firewall between some of the nodes, two ranks on one GPU, or a "
        "library's fault.",
        "Set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the interface between the nodes, and try "
        "NCCL_DEBUG=INFO. `nvidia-smi` shows whether two ranks share a device.",
    ),
    "PL820": Page(
        "A slow rank makes the others wait",
        "A collective completes only when every rank of its group has called it, so a group goes at the pace "
        "of its slowest rank, its straggler. For ten seconds and more this one waited far less than the "
        "others did: at least 20% of the time less, and less than half as long. The message names the lines "
        "where it spends the time that the others don't. The job goes on; this is said once per rank and "
        "place.",
        "Look at these lines. In the data loader: more workers (num_workers), faster storage, samples that "
        "cost alike on all ranks. In a branch for one rank (logging, validation, saving): less often, or "
        "shared out. If it is slower in everything: another process on its core or device, a limit, heat. "
        "`--no-watch` turns this off.",
    ),
    "PL821": Page(
        "A gradient that is not finite",
        "After the ranks' gradients are summed, all ranks have the same NaN. The message names those that "
        "had it before, the backward pass, and the module in which it began: the last one in the model with "
        "such a gradient. It is told once, when the optimizer has put it into the weights, or when steps "
        "are skipped for it again and again; it ends nothing.",
        "Look at that rank's data, and at what is computed from the module on: torch.log or torch.sqrt of 0, "
        "a division by 0, exp of a large number, a mask that leaves nothing for softmax. "
        "`with torch.autograd.detect_anomaly():` around this step names the operation. Training on from "
        "here is in vain: start from a checkpoint of before.",
    ),
}
