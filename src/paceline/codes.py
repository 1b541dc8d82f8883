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
    # processes and launching
    "PL300": Page(
        "The environment of a rank is half set",
        "A rank learns who it is from RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
        "(torchrun), SLURM_* (srun) or OMPI_COMM_WORLD_* (mpirun). Some without the others would be a guess.",
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
        "A rank is below the world size, a local rank below the local world size, a port below 65536, and two "
        "launchers must not tell of different worlds.",
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
        "CUDA was asked for, and torch finds no device: no driver, a torch built without CUDA, or none visible.",
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
        "Check that rank 0 runs, that the address is rank 0's and reachable from this machine, and the firewall.",
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
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the machines, for example eth0.",
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
    # training
    # checkpoints and run folders
    # command line and benchmarks
}
