"""Building models on the meta device: PL455 to PL459."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL455": Page(
        title="A factory reads a random value while it builds the model",
        why="A factory is run on the meta device, where tensors have shapes but no values, so that no "
        "rank holds the whole model. Each parameter is drawn later, by itself, from the seed and its "
        "name. A value that depends on random numbers (`weight.max().item()`, `if weight.norm() > 1`, "
        "`weight.numpy()`) isn't known while the factory runs. Values that don't depend on random "
        "numbers can be read.",
        fix="Initialise the tensor by operations of torch alone: `weight.div_(weight.norm())` in place of "
        "`weight.div_(weight.norm().item())`. Or pass the built model in place of its factory: "
        "`Trainer(build(), ...)`; its weights are then the truth, and every rank holds it whole once.",
    ),
    "PL456": Page(
        title="An operation of a factory can't be done again",
        why="What a factory does is recorded on the meta device and done again for each tensor. That "
        "needs dense tensors of torch's own class, operations whose result has a shape that doesn't "
        "depend on random values (`nonzero`, `unique` and boolean indices have none), and a generator "
        "on the CPU: weights are drawn there, so that they are the same on every device.",
        fix="Write that step with operations of fixed shape (`torch.where` in place of a boolean index), "
        "or pass the built model in place of its factory.",
    ),
    "PL457": Page(
        title="A factory failed, or gave no model",
        why="A factory takes no arguments and gives one `nn.Module`. It is called with all tensors on the "
        "meta device, so code that needs real memory (a library in C, shared memory, pinned memory) "
        "fails there.",
        fix="Call the factory yourself: if it fails too, fix what it says. If it works, pass the model "
        "that it builds in place of the factory.",
    ),
    "PL458": Page(
        title="A tensor's values were not made by the factory",
        why="Each rank makes a model's tensors by itself from what the factory did. It can't know the "
        "values of a parameter that was built before the factory ran, of one on a meta device of the "
        "factory's own, or of one that was changed since; and what a factory writes into memory of "
        "others (a numpy array, a tensor from outside) would not be seen there.",
        fix="Build the whole model inside of the factory, copy data that it starts from "
        "(`torch.tensor(array)`, `tensor.clone()`), and register tensors as parameters or buffers. Or "
        "pass the built model: its weights are then the truth, and are sent from rank 0.",
    ),
    "PL459": Page(
        title="A parameter is never initialised",
        why="`torch.empty` gives memory as it comes: other values on every rank and in every run. A "
        "parameter of which an element is never written would start differently under every layout. "
        "(What nobody writes of a buffer starts as zeros, with a warning.)",
        fix="Initialise all of it: `nn.Parameter(torch.zeros(...))`, or `torch.nn.init.normal_(weight, "
        "std=0.02)`.",
    ),
}
