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
