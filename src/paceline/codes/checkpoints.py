"""Checkpoints and run folders: PL5xx."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
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
        "Free space or lower checkpoint.keep, fix the permissions, or choose another --out; the same "
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
    "PL515": Page(
        "A run resumed with other settings",
        "Batch sizes, dtype, clipping, seed, the options of the optimizer and the schedule as they are "
        "built, the "
        "data and the tracked objects are part of a run's result. Each checkpoint records them. Data with an "
        "index is compared by a hash of 8 samples, a text by a hash of all its tokens, a stream not at "
        "all. The "
        "number of ranks and the layout may change freely; they are not compared.",
        "Restore the old values, or start a new run in another folder. To go on with the new values on "
        "purpose, "
        "name them: trainer.resume(folder, accept=['optimizer.lr']). With another learning rate or "
        "schedule, the "
        "run takes the rates that the new schedule has at this step.",
    ),
    "PL516": Page(
        "The state of a communication hook",
        "Hooks that compress (PowerSGD) keep on each rank what they have left out of a gradient, and add "
        "it to the "
        "next one. The state is put back where a step is skipped, and each rank's is saved and restored. "
        "That "
        "takes values that can be copied, and the same ranks and buckets when the run is resumed.",
        "Resume with the same number of ranks and ddp.bucket_cap_mb, or begin with an empty state: "
        "trainer.resume(folder, accept=['comm_hook']). Keep other objects out of the hook's state.",
    ),
    "PL517": Page(
        "An unknown setting in accept=",
        "trainer.resume(folder, accept=[...]) names settings that may differ from those of the checkpoint. A "
        "misspelled name would accept nothing.",
        "Use the names that the message lists. `optimizer` stands for `optimizer.lr`, `optimizer.betas` "
        "and so on.",
    ),
    "PL518": Page(
        "A tracked object that the checkpoint doesn't have",
        "An object that was passed to trainer.track() is not in the checkpoint that the run goes on from, "
        "so it "
        "starts with the state that it was built with. An average of weights would begin anew.",
        "Nothing, if the object is new. Otherwise track it under the name that it was saved with.",
    ),
    "PL519": Page(
        "A checkpoint without settings",
        "Checkpoints of earlier versions did not record the settings of the run, so they can't be compared.",
        "Check the batch sizes, the learning rate and the data yourself. The next checkpoint records them.",
    ),
    "PL520": Page(
        "A folder that is not a run's has files of a run's names",
        "A run writes recipe.toml, metrics.jsonl and evaluations.jsonl into its folder and replaces files of "
        "these names. A folder is a run's if its .lock or its recipe.toml was written by a run, if it has "
        "checkpoints, or if its metrics.jsonl has a run's rows. Nothing is changed in any other folder that "
        "has such files.",
        "Choose a new folder with --out, such as runs/demo. Move the files away if the folder has to be this "
        "one.",
    ),
    "PL521": Page(
        "A run's file is something else",
        "A run makes its files and folders itself. A link, a pipe or a folder in place of a file would send "
        "what the run writes to another place, or hold it up.",
        "Choose another folder with --out, or remove what the message names.",
    ),
    "PL522": Page(
        "The run's folder was renamed or removed while the run was going on",
        "Writing on would make a second folder under the old path, with some of the checkpoints and without "
        "the recipe and the metrics of the steps before. So the run ends, and what it has saved stays whole.",
        "Rename the folder back, or give its new path: the run goes on from its last checkpoint.",
    ),
    "PL523": Page(
        "The run's metrics can't be written",
        "Every step leaves a row in metrics.jsonl, and an event for TensorBoard if that is on. The disk is "
        "full, or the file can't be written to any more.",
        "Free space, or change the file's permissions. The same command goes on from the last checkpoint.",
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
}
