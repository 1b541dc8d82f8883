"""Command line and benchmarks: PL6xx."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
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
    "PL603": Page(
        "Standard output can't be written",
        "A command prints its result to standard output, which is on a full disk or can't be written to. "
        "What the command did before stays done: a run that was trained is saved.",
        "Send the output to a file on a disk with space, or to a terminal.",
    ),
    "PL604": Page(
        "The working folder is gone",
        "Relative paths start in the working folder of the shell. It was removed, or this user may not enter "
        "it, since the shell went there.",
        "Change to a folder that exists, and give the command again.",
    ),
    "PL605": Page(
        "Too few open files are allowed",
        "Launcher and ranks hold files, pipes and connections open: some dozens, and several for each rank. "
        "The shell's limit (ulimit -n) is lower.",
        "Raise the limit: ulimit -n 1024.",
    ),
    "PL606": Page(
        "The folder for temporary files has too long a path",
        "Launcher and ranks meet at sockets in the folder for temporary files, and the system takes at most "
        "107 bytes for the path of a socket. /tmp is used in place of a longer TMPDIR, if it can be written "
        "to.",
        "Set TMPDIR to a folder with a shorter path.",
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
