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
    # training
    # checkpoints and run folders
    # command line and benchmarks
}
