"""The pages behind the codes that messages carry; `paceline explain CODE` prints one.

Ranges: PL1xx recipe and layout, PL2xx data, PL3xx processes and launching, PL4xx training,
PL5xx checkpoints and run folders, PL6xx command line and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """What one code means.

    Attributes:
        title: the fact in a few words.
        why: the rule and its reason.
        fix: what to do, with an example.
    """

    title: str
    why: str
    fix: str


PAGES: dict[str, Page] = {
    # recipe and layout
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
        why=('A layout in text is axis=degree pairs with spaces between, for example "dp_replicate=2".'),
        fix="Name one of the axes that the message lists, with a whole number.",
    ),
    "PL111": Page(
        title="An axis that this version can't lay out",
        why=(
            "The axes dp_shard, cp, tp, pp and ep have their names already, so that recipes stay "
            "valid, but this version has data parallelism with full copies (dp_replicate) only."
        ),
        fix="Leave the axis out and give all ranks to dp_replicate.",
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
    # data
    "PL200": Page(
        "No data files match",
        "Every path and glob in data.files must match at least one file, so that a typing mistake doesn't "
        "silently shrink the text. A folder alone names nothing.",
        'Check the path. ** matches folders of any depth: files = ["texts/**/*.txt"]. "python-stdlib" means '
        "the running Python's standard library.",
    ),
    "PL201": Page(
        "A data file can't be read",
        "Every file that data.files matches becomes part of the text; leaving one out would train another "
        "model than the recipe says.",
        "Mend its permissions (chmod +r), or choose patterns that leave it out.",
    ),
    "PL202": Page(
        "The data is shorter than one sequence",
        "A sample is data.seq_len tokens and the one after them, for the last token's target. The training "
        "part and, if data.valid_fraction is not 0, the validation part need at least one sample each.",
        "Give more text, set a smaller data.seq_len, or change data.valid_fraction (0: no validation).",
    ),
    "PL203": Page(
        "The tokenizer can't be loaded",
        'data.tokenizer is "bytes", "bpe", or the path of a tokenizer.json of Hugging Face\'s tokenizers '
        "library, of a version that the installed library reads.",
        'Check the path, or set data.tokenizer="bytes".',
    ),
    "PL204": Page(
        "The cache folder can't be written",
        "A text is turned into token ids once and kept in data.cache_dir between runs.",
        "Set data.cache_dir to a folder that you may write to. Everything in it can be deleted at any time "
        "that no run uses it.",
    ),
    "PL205": Page(
        "No space for token files",
        "A corpus takes about the size of its text in data.cache_dir (bytes), or 2 to 4 bytes per token.",
        "Free space, or set data.cache_dir to a folder on another disk. What was half written is gone.",
    ),
    "PL206": Page(
        "The text is too small for the vocabulary",
        "BPE makes a new token of the commonest pair as long as there is one; a small text runs out of pairs "
        "before data.vocab_size tokens are made.",
        "Set data.vocab_size to the number that the message names, or less, or give more text.",
    ),
    "PL207": Page(
        "CIFAR-10 is not there",
        "data.folder holds CIFAR-10's binary version: data_batch_1.bin to data_batch_5.bin and "
        "test_batch.bin. The Python version (files without .bin) is another format.",
        "Get the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and name the folder that "
        "holds these files.",
    ),
    "PL208": Page(
        "A CIFAR-10 file is damaged",
        "A file is whole records of 3,073 bytes: a label from 0 to 9, then 3,072 pixels.",
        "Get the file again; a broken download is the usual cause.",
    ),
    "PL209": Page(
        "A data file changed while it was read",
        "The text of a run is fixed when it starts; a file that grows meanwhile would give ranks different "
        "texts.",
        "Wait until nothing writes to it, or train on a copy.",
    ),
    "PL220": Page(
        "A sequence is longer than the model",
        "A model has positions for data.seq_len tokens, of the recipe that it was built from.",
        "Cut the sequence, or train with a larger data.seq_len.",
    ),
    "PL221": Page(
        "A text can't be continued from this",
        "Sampling needs at least one token to start from, and a temperature of 0 or more.",
        "Start from a separator or newline token; temperature=1.0 samples from the model's own "
        "probabilities, 0 takes the likeliest token.",
    ),
    "PL250": Page(
        "A number of the loader is out of range",
        "Sizes, epochs and the number of loaded-ahead batches are whole numbers of at least 1; the rank and "
        "the number of workers are at least 0.",
        "Set the number that the message names, for example global_batch_size=64.",
    ),
    "PL251": Page(
        "A microbatch larger than the global batch",
        "A global batch (samples per optimizer step over all ranks) is cut into microbatches (samples per "
        "forward on one rank).",
        "Lower microbatch_size or raise global_batch_size.",
    ),
    "PL252": Page(
        "The loader's rank is outside its world",
        "Ranks that share out the data count from 0 to world_size - 1.",
        "Pass world.rank and world.world_size of paceline.start(), or let trainer.loader(...) do it.",
    ),
    "PL253": Page(
        "No samples",
        "The data set is empty, or a stream gave nothing in an epoch, or less than the one full batch that "
        "drop_last wants.",
        "Check the files and filters of the data. A stream's __iter__ must start from the front each time.",
    ),
    "PL254": Page(
        "Neither a data set nor a stream",
        "A loader reads objects with __getitem__ and __len__, in shuffled order, or iterables front to back.",
        "Add the method that is missing; lists of samples work as they are.",
    ),
    "PL255": Page(
        "A stream can't be shuffled",
        "Its samples come in its own order, and no order over all of them can be drawn without an index.",
        "Leave shuffle out. Shuffle inside the stream, with a generator seeded in its set_epoch(epoch), the "
        "same on every rank; or give the data an index (__getitem__ and __len__).",
    ),
    "PL256": Page(
        "An iterator that can be read once",
        "Generators, map and zip objects and open files are used up after one epoch, and a resumed run could "
        "not read its way back to its position.",
        "Pass an object whose __iter__ starts anew: class Lines(IterableDataset): def __iter__(self): ...",
    ),
    "PL257": Page(
        "Dropping the ragged batch would leave nothing",
        "With drop_last an epoch has only full global batches, and the data set is smaller than one.",
        "Set drop_last=False (ragged batches weigh right), or lower global_batch_size.",
    ),
    "PL258": Page(
        "Samples that don't go into one batch",
        "A microbatch stacks its samples: the same keys, shapes and types in each.",
        "Pad or crop in the data set, or pass collate=... to the loader.",
    ),
    "PL259": Page(
        "A saved position of other data",
        "A position is a number of samples in an order that follows from the data's length, the seed and "
        "shuffle. With one of them changed it would point at other samples, and some would be used twice or "
        "never.",
        "Go back to the value that the message names, or start a new run with --out elsewhere.",
    ),
    "PL260": Page(
        "Not a loader's state",
        "The state lacks a key, or a count in it is not a whole number.",
        "Pass what state_dict() returned, or let trainer.resume(...) do it.",
    ),
    "PL261": Page(
        "Two iterations over one loader",
        "A loader has one position. Iterating inside an iteration, or restoring its state there, would make "
        "the outer one go on with the wrong samples.",
        "Leave the outer loop first, or make a second loader over the same data set.",
    ),
    "PL263": Page(
        "Page-locked memory without a GPU",
        "pin_memory speeds up copies to a GPU and has no use elsewhere.",
        'Set pin_memory = "auto", which turns it on where it helps.',
    ),
    "PL264": Page(
        "__getitems__ gave another number of samples",
        "A data set's __getitems__(indices) gives a list with one sample per index, in the order of the "
        "indices.",
        "Mend it, or remove it: the loader then calls __getitem__ for each.",
    ),
    # processes and launching
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
    # training
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
        "The optimizer is not a function",
        "The trainer builds the optimizer itself, after the model has been placed and laid out, from "
        "the list of "
        "(name, parameter). An optimizer built before could hold the wrong tensors.",
        "optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4).",
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
    "PL420": Page(
        "Nothing to train",
        "An update needs at least one parameter that requires a gradient.",
        "Set requires_grad=True on the parameters to train.",
    ),
    "PL421": Page(
        "Parameters without a gradient",
        "Ranks sum gradients in buckets, and a bucket is sent when all of its parameters have theirs. A "
        "parameter "
        "that the loss doesn't use leaves its bucket waiting, and with it every rank.",
        "Set ddp.find_unused_parameters = true where it changes from step to step, or "
        "requires_grad=False where the "
        "parameter is never used.",
    ),
    "PL422": Page(
        "sync_batchnorm on the CPU",
        "torch's SyncBatchNorm has CUDA kernels only. Without it statistics are those of each "
        "microbatch, which are "
        "the same on every layout.",
        "Leave sync_batchnorm off, or train on CUDA.",
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
    # checkpoints and run folders
    "PL500": Page(
        "A file of a checkpoint is missing or can't be read",
        "The manifest lists every file of a checkpoint with its size and SHA-256, and a checkpoint is "
        "used only if all of it is as it was written. Loading falls back to the newest one that is.",
        "Restore the file from a copy, or let the run go on from the checkpoint before. "
        "`paceline checkpoint verify runs/demo` checks all of a run's checkpoints.",
    ),
    "PL501": Page(
        "A file of a checkpoint has another size",
        "It was cut short or grew after it was written: a copy that broke off, a full disk, an editor. "
        "Paceline itself gives a checkpoint its name only after all of its files are on the disk.",
        "Copy the checkpoint again from where it is whole, or let the run fall back to the one before.",
    ),
    "PL502": Page(
        "A file of a checkpoint was altered",
        "It has the right size, and its bytes don't have the SHA-256 that the manifest states. One changed "
        "bit in a weight is enough for a run that is silently another one, so nothing of it is used.",
        "Restore it from a copy, or let the run fall back to the one before. If you did not change it, "
        "check the disk and the memory.",
    ),
    "PL503": Page(
        "A checkpoint's manifest is missing or altered",
        "manifest.json says what belongs to a checkpoint, and ends with a hash of itself. Without it "
        "nothing in the folder can be trusted.",
        "Restore manifest.json from a copy, or let the run fall back to the checkpoint before. To change "
        "a checkpoint on purpose, load it and save it with Paceline.",
    ),
    "PL504": Page(
        "A checkpoint of a newer format",
        "A newer Paceline wrote it. It is whole, so the run does not fall back past it: that would throw "
        "its steps away.",
        "Update Paceline: pip install -U paceline. Or start the run in another folder.",
    ),
    "PL505": Page(
        "A file in a checkpoint's folder that does not belong to it",
        "The manifest does not list it. It does no harm: nothing reads it, and the checkpoint is valid.",
        "Move it elsewhere if you need it; it is deleted together with the checkpoint.",
    ),
    "PL506": Page(
        "The files of a checkpoint don't fit together",
        "A structure names tensors that its file lacks, or the other way round, or the folder is named "
        "after another step. The hashes are right, so it was put together by hand or by a program.",
        "Use a checkpoint that Paceline wrote; a folder that you renamed gets its old name back.",
    ),
    "PL507": Page(
        "Something that a checkpoint can't hold",
        "A checkpoint holds dicts, lists and tuples of None, bool, int, float, str, bytes, dense tensors "
        "and numpy arrays. Anything else would need pickle, and reading a pickle runs code. Nothing was "
        "written.",
        "The message has the path to it (state.tracked.ema.fn). Turn it into these in state_dict() and "
        "back in load_state_dict(), or leave it out.",
    ),
    "PL508": Page(
        "Writing a checkpoint or an export failed",
        "The file system refused: full, read-only, no permission. What was half written is removed, and "
        "the earlier checkpoints are as they were.",
        "Free space or lower checkpoint.keep, mend the permissions, or choose another --out; the same "
        "command then goes on from the last checkpoint.",
    ),
    "PL509": Page(
        "None of a run's checkpoints is valid",
        "Starting again from nothing in the same folder would overwrite what may still be saved, so the "
        "run stops and changes nothing.",
        "`paceline checkpoint verify runs/demo` says what is wrong with each. Restore one from a copy, or "
        "start again with another --out.",
    ),
    "PL510": Page(
        "Two processes save into one folder",
        "Each would delete the other's checkpoints by its own rule of what to keep.",
        "Stop the other run, or give this one another --out.",
    ),
    "PL511": Page(
        "Optimizer state that does not fit",
        "State is saved under the name of its parameter. It is loaded only into the same kind of "
        "optimizer with the same parameters and shapes, whatever their order and grouping.",
        "Resume with the model and the optimizer that wrote the checkpoint, or start a new run.",
    ),
    "PL512": Page(
        "The run goes on under other conditions",
        "Other versions, another processor or another number of threads per rank can round differently. "
        "The run goes on correctly, and no longer bit for bit as it would have.",
        "Nothing, unless you need the same bits: then restore what the message names, for example "
        "train.threads_per_rank=1.",
    ),
    "PL513": Page(
        "An export would overwrite a file",
        "An export never replaces what is there.",
        "Choose another name, or remove the file first.",
    ),
    "PL514": Page(
        "No checkpoint at that path",
        "A checkpoint is a folder with a manifest.json; those of a run are in its folder checkpoints.",
        "Give the run's folder, for example `paceline checkpoint show runs/demo`, or one checkpoint: "
        "runs/demo/checkpoints/step-00000050.",
    ),
    "PL530": Page(
        "The folder holds a run of another recipe",
        "A run is resumed with the recipe that it was started with, because other values would make it "
        "another run under the same name. Keys that only change its length, speed or what is written may "
        "change (train.steps, layout, loader, checkpoint, metrics ...).",
        "Choose another --out for a new run, or restore the keys that the message lists.",
    ),
    "PL531": Page(
        "The checkpoint is of another model",
        "Names and shapes of the saved tensors are not those of the model.",
        "Choose another run folder, or build the model as it was when the run began.",
    ),
    "PL532": Page(
        "The run's folder can't be written to",
        "Checkpoints, metrics and logs are written into the run's folder by rank 0.",
        "Choose another folder with --out, free some space, or change the folder's permissions.",
    ),
    "PL533": Page(
        "The run's folder is in use",
        "A run locks its folder while it runs. Two runs in one would overwrite each other's checkpoints "
        "and metrics. "
        "The lock goes with its process, so a killed run leaves none behind. Ranks whose launcher was killed "
        "save and leave within seconds: a new start waits for them, up to half a minute.",
        "Wait for the other run, stop it, or choose another folder with --out.",
    ),
    # command line and benchmarks
    "PL600": Page(
        "A command line that isn't understood",
        "A command, a flag or the value of a flag is not one that exists.",
        "`paceline --help` lists the commands, `paceline COMMAND --help` a command's flags.",
    ),
    "PL601": Page(
        "A flag of the launcher under another launcher",
        "Under torchrun, srun or mpirun the ranks are there already, so `paceline train` joins them "
        "instead of "
        "starting its own.",
        "Leave --nproc and --scaling out, or start `paceline train` by itself.",
    ),
    "PL602": Page(
        "No page for that code",
        "Messages end with a code in square brackets, PL and three digits; each has a page.",
        "`paceline explain` lists all codes.",
    ),
    "PL620": Page(
        "A benchmark's number below 1",
        "Ranks, measured steps and repeats are counted from 1.",
        "Use for example `paceline bench scaling recipes/gpt-stdlib.toml --nproc 4 --steps 20 --repeats 3`.",
    ),
    "PL621": Page(
        "Some ranks on CUDA, others on the CPU",
        'With `device = "auto"` ranks compute on CUDA only where each has a device of its own. Throughput '
        "on one GPU and on eight CPU ranks say nothing about each other.",
        "Measure up to as many ranks as there are devices, or all on the CPU: `--set train.device=cpu`.",
    ),
    "PL622": Page(
        "The cost of communication on one rank",
        "One rank has nobody to communicate with, so there is nothing to measure.",
        "Use two ranks or more: `paceline bench overhead recipes/gpt-stdlib.toml --nproc 2`.",
    ),
    "PL623": Page(
        "A picture of an unknown kind",
        "The ending of the file's name says what is drawn.",
        "Name a .png, .svg or .pdf file.",
    ),
    "PL624": Page(
        "A picture without matplotlib",
        "Pictures are drawn with matplotlib, which nothing else in Paceline needs.",
        "Run `pip install matplotlib`, or leave --plot out: bars are printed in any case.",
    ),
    "PL625": Page(
        "The picture can't be written there",
        "It is looked at before anything is measured, so that no measurement is lost.",
        "Name a file in a folder that exists and that you may write to.",
    ),
    "PL626": Page(
        "A list of ranks that can't be read",
        "`--ranks` lists numbers of ranks with commas between, and stands instead of `--nproc`.",
        "Write for example `--ranks 1,2,4`.",
    ),
}
