"""Data: PL2xx."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL200": Page(
        "No data files match",
        "Every path and glob in data.files must match at least one file, so that a typing mistake doesn't "
        "silently shrink the text. A folder alone names nothing.",
        'Check the path. ** matches folders of any depth: files = ["texts/**/*.txt"]. "python-stdlib" means '
        "the running Python's standard library.",
    ),
    "PL201": Page(
        "A data file or folder can't be read",
        "Every file that data.files matches becomes part of the text; leaving one out would train another "
        "model than the recipe says.",
        "Change its permissions (chmod +r, of a folder +rx), or choose patterns that leave it out.",
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
    "PL210": Page(
        "A DataLoader in place of a data set",
        "The trainer makes the batches itself: the order of samples, the cut into microbatches and each "
        "rank's "
        "share must not depend on the number of ranks. A DataLoader has an index of its own batches, so each "
        "batch would count as one sample.",
        "Pass the data set and the loader's settings to trainer.loader(). A DataLoader of your own works "
        "with "
        "trainer.step(batch), if each rank's loader yields other samples.",
    ),
    "PL211": Page(
        "Fields of a batch with different numbers of rows",
        "A batch given to trainer.step() is cut into microbatches along the first dimension of all of its "
        "tensors. A field with another number of rows would be cut at other samples.",
        "Give every field one row per sample. A table that all samples share belongs into the model or into "
        "forward=.",
    ),
    "PL212": Page(
        "A global batch larger than the data",
        "An epoch ends with a ragged batch, and an epoch with fewer samples than a global batch is nothing "
        "but "
        "that. Each step then uses all samples, whatever global_batch_size says.",
        "Lower global_batch_size, or check that all data files were found. The remark stops nothing.",
    ),
    "PL213": Page(
        title="data.files matches something that is not a file",
        why=(
            "Everything that a path or glob matches becomes part of the text. A pipe, a folder or a link to "
            "nothing has no text, and leaving it out without a word would train on less than was asked for."
        ),
        fix=(
            "Choose a pattern that matches files alone: texts/*.txt, or texts/** for the files of all "
            "folders below. Remove broken links."
        ),
    ),
    "PL214": Page(
        title="A recipe's global batch is larger than its data",
        why=(
            "A step takes global_batch_size samples of one epoch, each of them once. With fewer samples "
            "every batch would be smaller than the recipe says, and the learning rate would fit another size."
        ),
        fix="Lower train.global_batch_size, or give more data.",
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
        "Fix it, or remove it: the loader then calls __getitem__ for each.",
    ),
}
