"""Processes and launching: PL3xx."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL300": Page(
        "The environment of a rank is half set",
        "A rank learns who it is from RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT (torchrun), SLURM_* (srun) or OMPI_COMM_WORLD_* (mpirun). "
        "Some without the others would be a guess.",
        "Start with torchrun, srun or mpirun; or set all of them; or unset them for a plain process: "
        "`env -u RANK -u WORLD_SIZE ...`.",
    ),
    "PL301": Page(
        "A rank variable is not a whole number",
        "The launcher sets these variables to numbers; something else has overwritten one.",
        "Look for an `export` in the job script or the shell's start files.",
    ),
    "PL302": Page(
        "The environment of a rank contradicts itself",
        "A rank is below the world size, a local rank below the local world size, a port below 65536, and "
        "two launchers must not tell of different worlds.",
        "Let one launcher set the variables: remove the exports from the job script.",
    ),
    "PL303": Page(
        "Open MPI ranks on several machines need MASTER_ADDR",
        "The ranks meet at a port of rank 0's machine, and Open MPI does not tell which machine that is.",
        "Add `-x MASTER_ADDR=host0` (and, if you like, `-x MASTER_PORT=29500`) to mpirun.",
    ),
    "PL304": Page(
        "A SLURM list can't be read",
        "Rank 0's host is the first one of SLURM_STEP_NODELIST, such as `node[0-2,5]`.",
        "Set MASTER_ADDR to rank 0's host in the job script.",
    ),
    "PL305": Page(
        "Unknown device",
        'Training runs on "cpu" or on "cuda"; which CUDA device a rank takes follows from its local rank.',
        'Use "auto", "cpu" or "cuda". To choose among devices set CUDA_VISIBLE_DEVICES.',
    ),
    "PL306": Page(
        "No CUDA device here",
        "CUDA was asked for, and torch finds no device: no driver, a torch without CUDA, or none visible.",
        'Use device="cpu", or check `nvidia-smi`, CUDA_VISIBLE_DEVICES and `torch.version.cuda`.',
    ),
    "PL307": Page(
        "More ranks than CUDA devices",
        "Each rank needs a device of its own: NCCL refuses two ranks on one.",
        "Start as many ranks per node as there are devices.",
    ),
    "PL308": Page(
        "This torch does not have that backend",
        "gloo moves CPU tensors, NCCL moves CUDA tensors; others must be built into torch.",
        "Leave the backend out.",
    ),
    "PL309": Page(
        "Rank 0 can't open the port",
        "The ranks of a run meet at MASTER_ADDR:MASTER_PORT, which rank 0 opens on its own machine.",
        "Choose a free port, the same on all ranks; `ss -ltnp` shows who holds one.",
    ),
    "PL310": Page(
        "Nobody at the meeting place",
        "A rank found no store at MASTER_ADDR:MASTER_PORT within the timeout.",
        "Check that rank 0 runs, the address (rank 0's, and reachable from here) and the firewall.",
    ),
    "PL311": Page(
        "Some ranks did not come",
        "Training starts when every rank has joined; the message names those that have not.",
        "Read the log of a missing rank: it has usually failed on its own.",
    ),
    "PL312": Page(
        "The ranks met, but can't connect to each other",
        "gloo and NCCL connect every rank to every other, at the address that the machine's name stands for. "
        "Debian's habit of 127.0.1.1 for the own name breaks that.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the machines, such as eth0.",
    ),
    "PL313": Page(
        "A setting of start() is out of range",
        "timeout_s is above 0, seed is 0 to 2**63 - 1, threads_per_rank is at least 1.",
        "Leave the setting out for its default.",
    ),
    "PL314": Page(
        "Deterministic mode was asked for too late",
        "cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it starts.",
        "Call `paceline.start(deterministic=True)` before anything touches CUDA.",
    ),
    "PL315": Page(
        "No world is started",
        "The trainer and the loader need to know which rank this is, and how many there are.",
        "Put the training inside `with paceline.start() as world:`; one plain process works too.",
    ),
    "PL316": Page(
        "Several threads in a forked rank",
        "A function typed into a notebook reaches its ranks by a fork, which takes over locks but not "
        "OpenMP's threads: the first operator on several threads would wait for ever.",
        'Leave threads_per_rank="auto" (one thread there), or put the function into a module.',
    ),
    "PL317": Page(
        "Fewer nodes met than the minimum",
        "--nnodes names the nodes that a job needs, or a range MIN:MAX. A smaller world would have other "
        "results or not fit the layout, so no rank starts. torchrun forms such a world where the clocks of "
        "two nodes differ by more than 15 seconds.",
        "Run the same command on every node, and check that the nodes' clocks agree (`timedatectl`).",
    ),
    "PL318": Page(
        "A node knows of a newer checkpoint than rank 0 has",
        "Rank 0 writes and reads the checkpoints. Where the nodes share no disk and the node of rank 0 is "
        "gone or another node takes its place, the run would start again from an older step, or from the "
        "start, without the steps that are done.",
        "Use a folder on a shared disk. Else copy the checkpoints to the node of rank 0, or start with their "
        "node as node 0. To start anew, remove the run's folder on every node; the note of a step that "
        "another node has saved is the file `.committed-elsewhere` in it.",
    ),
    "PL319": Page(
        "Nodes hold different checkpoints of one step",
        "The nodes share no disk and have trained two runs apart from each other in folders of one name.",
        "Decide which run is right, and remove the run's folder on the other nodes.",
    ),
    "PL320": Page(
        "The number of ranks is not a number from 1",
        "One process per rank is started.",
        "Use for example `--nproc 2`.",
    ),
    "PL321": Page(
        "More ranks than this machine bears",
        "Above eight ranks per core, or where torch alone would fill the memory (about 250 MB per rank), "
        "ranks would only wait for each other.",
        "Use fewer ranks: one per core is the fastest on CPU.",
    ),
    "PL322": Page(
        "More ranks than CUDA devices to start",
        "Each rank needs a device of its own.",
        "Start as many ranks as there are devices, or use the CPU.",
    ),
    "PL323": Page(
        "Ranks don't start ranks",
        "torchrun, srun or mpirun has started this process as one of several; starting more in each "
        "would give ranks times ranks.",
        "Leave `--nproc` out under torchrun and srun, or start with plain python.",
    ),
    "PL324": Page(
        "This function can't be brought into another process",
        "A fresh process finds a function by its module's name. One typed into a notebook has none, so it is "
        "reached by forking, which CUDA does not survive once it is used.",
        "Put the function into a file and import it; or launch before anything touches CUDA.",
    ),
    "PL325": Page(
        "launch() ran while a rank imported the script",
        "Every rank imports the script to find the function; a call at the top level would run there too.",
        'Write `if __name__ == "__main__":` above the call.',
    ),
    "PL326": Page(
        "The folder for the ranks' logs can't be made",
        "Each rank writes `rank-NNNN.log` into it.",
        "Choose a folder that you may write to.",
    ),
    "PL330": Page(
        "A rank failed",
        "The traceback is that of the rank that failed first; the others then lost their peer.",
        "Read the traceback's last line, and the lines of your own code above it.",
    ),
    "PL331": Page(
        "A rank died without a traceback",
        "A signal or an exit inside compiled code ended it. SIGKILL is most often the kernel's answer to "
        "memory running out; SIGSEGV and SIGABRT are crashes of a library.",
        "Look at `dmesg` for 'Out of memory' and at the rank's log; use a smaller microbatch or fewer ranks.",
    ),
    "PL332": Page(
        "The ranks' output has lost its way",
        "A process of its own carries what ranks print to the terminal and to their logs. It was killed from "
        "outside, and the ranks were ended with it rather than left to run unseen.",
        "Start again. Where it was the kernel, `dmesg` tells.",
    ),
    "PL340": Page(
        "There is no such script",
        "Every rank runs the script that you name: a file, a folder or archive with a __main__.py, or with "
        "-m a module.",
        "Check the path. Flags of paceline run come before the script, those of the script after it.",
    ),
    "PL341": Page(
        "A setting came too late, and the script can't be started over",
        "The warm start has imported torch before the script begins. Variables that torch or numpy read "
        "while they are imported are compared when the script imports them; where one differs, the rank "
        "starts over in a fresh Python. That would do harm where the script has started threads or processes "
        "before.",
        "Start it with `paceline run --cold`, or set the variables in the shell.",
    ),
    "PL342": Page(
        "--no-python and -m together",
        "--no-python executes a program; -m has Python run a module.",
        "Leave one of them out.",
    ),
    "PL343": Page(
        "torchrun's flags don't fit together",
        "`paceline run` hands torchrun's flags to torch, which reads them as torchrun does.",
        "See `paceline run --help`.",
    ),
    "PL344": Page(
        "The ranks could not be started",
        "Before any rank starts, all nodes meet at the rendezvous; then the program must be found.",
        "Give the same --rdzv-endpoint, --rdzv-id and --nnodes on every node, start all nodes within the "
        "rendezvous' time, and check that the port is open between them.",
    ),
    "PL345": Page(
        "Less than one thread per rank",
        "Every rank computes with one thread at least.",
        "Leave --threads-per-rank out: cores / ranks.",
    ),
    "PL346": Page(
        "The place where the nodes meet is out of reach",
        "The host of --rdzv-endpoint or --master-addr must resolve on every node, and there must be a route.",
        "Give an IP address, or put the name into /etc/hosts or DNS on every node.",
    ),
    "PL347": Page(
        "This node's own name stands for the loopback address",
        "Debian's installer gives the machine's name to 127.0.1.1. Ranks would tell the other nodes that "
        "address, and those would connect to themselves. Where one interface could serve it is taken; where "
        "several could, you must say which.",
        "Give --local-addr, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface between the "
        "nodes, for example eth0.",
    ),
    "PL348": Page(
        "Ranks per node times tasks per node",
        "srun or mpirun has started several tasks on this node, and each would start --nproc-per-node ranks.",
        "Start one task per node (`srun --ntasks-per-node=1 paceline run --nproc-per-node 8 ...`), or leave "
        "--nproc-per-node out: each task then becomes a rank (`srun -n 16 paceline run train.py`).",
    ),
    "PL349": Page(
        "A time for hangs that is none",
        "--hang-after is how many seconds all ranks may stand still before that counts as a hang.",
        "Leave it out, give a number above 0, or turn watching off by --no-watch.",
    ),
}
