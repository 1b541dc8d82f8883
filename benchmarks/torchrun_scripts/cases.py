"""Lists the scripts, torchrun's flags for each, and further requirements."""

from __future__ import annotations

from dataclasses import dataclass

TWO = ("--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Case:
    """One script: the words behind the launcher's name, and what its run needs."""

    name: str
    what: str
    flags: tuple[str, ...] = TWO  # {port}: a free one
    target: tuple[str, ...] = ()  # the script or `-m` module and its arguments; default: NAME.py
    exit_code: int = 0  # under torchrun
    requires: str | None = None  # a module without which the script cannot run
    omp_num_threads: str | None = "1"  # None: the variable is not set
    variables: tuple[tuple[str, str], ...] = ()  # of the environment
    stdin: str = ""
    memory_limit_bytes: int | None = None  # for the launcher and its ranks together
    stderr_has: tuple[str, ...] = ()  # text that a user looks for on standard error

    def build_words(self, port: int) -> list[str]:
        return [*(flag.format(port=port) for flag in self.flags), *(self.target or (f"{self.name}.py",))]


CASES = (
    Case("ddp", "DDP, DistributedSampler, a saved model"),
    Case("spawn_inside", "starts its own processes", flags=("--nproc_per_node=1",)),
    Case(
        "argparse_cli",
        "arguments, names, paths",
        flags=("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        target=(
            *("./argparse_cli.py", "--lr", "0.5", "--nproc-per-node", "7", "-m", "a b", "--verbose"),
            *("--", "values.csv", "*", "--verbose"),
        ),
    ),
    Case("module", "a package, run by -m", target=("-m", "trainer.main", "--steps=16", "--lr=0.02")),
    Case("main_class", "the script's classes in loader workers and pickles"),
    Case("env_before_import", "variables set before importing torch", omp_num_threads=None),
    Case("fsdp2", "fully_shard of a transformer", flags=("--nproc-per-node", "2", "--master-port", "{port}")),
    Case("tensor_parallel", "parallelize_module over a mesh"),
    Case("accelerate_script", "Hugging Face Accelerate", requires="accelerate"),
    Case("fabric_script", "Lightning Fabric", requires="lightning"),
    Case(
        "fails_on_rank1",
        "an exception on rank 1",
        exit_code=1,
        stderr_has=("ValueError: label 3 where there are 3 classes", "in check_labels", "fails_on_rank1.py"),
    ),
    Case(
        "out_of_memory",
        "rank 1 killed by the kernel, out of memory",
        exit_code=1,
        memory_limit_bytes=1500 * 2**20,
        stderr_has=("SIGKILL",),
    ),
    Case("lifecycle", "signal handlers, atexit, threads"),
    Case("exit_code", "sys.exit(3) on rank 1", exit_code=1),
    Case(
        "streams",
        "standard input, output and error",
        stdin="first line\nand the rest\n",
        stderr_has=("[0] loss 2.5", "[1] loss 2.5", "UserWarning: [1] a warning"),
    ),
    Case("random_state", "unseeded and seeded random numbers"),
    Case(
        "restarts",
        "goes on from its checkpoint after a failure",
        flags=(
            *(
                "--nproc-per-node=2",
                "--max-restarts=1",
                "--monitor-interval",
                "0.1",
                "--local-addr=127.0.0.1",
            ),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"),
        ),
        # Without it gloo's second attempt meets addresses of the first in the launcher's store and fails.
        variables=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
        stderr_has=("a fault that comes once",),
    ),
)
