"""`paceline.pretrained`: a factory whose model gets its values from a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError, import_optional
from paceline.huggingface.folder import check_folder, open_weights
from paceline.huggingface.tensor_names import list_unused, match, to_model
from paceline.phrases import name_some
from paceline.recipe.hf_model import HfModel
from paceline.signatures import explain_arguments

log = logging.getLogger(__name__)


class Pretrained:
    """A factory of a pretrained model, for `Trainer`; see `pretrained`.

    Called by itself, it returns the model with all of its values.

    Attributes:
        build: builds the model's structure.
        folder: with its weights.
        new: patterns of the names that the folder need not have.
    """

    def __init__(self, build: Callable[[], nn.Module], folder: Path, new: tuple[str, ...]) -> None:
        self.build, self.folder, self.new = build, folder, new

    def __call__(self) -> nn.Module:
        model = self.build()
        state = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, read in self.open(model).items():
                state[name].copy_(read())
        return model

    def open(self, model: nn.Module) -> Mapping[str, Callable[[], Tensor]]:
        """Return, by name of a parameter or buffer, what reads its value.

        Args:
            model: its structure.

        Raises:
            PacelineError: PL737 for the folder, PL738 if it does not fit the model.
        """
        weights = to_model(open_weights(self.folder), model)
        unused = list_unused(weights, model)
        if unused:
            log.warning("%d tensors of %s are not used: %s", len(unused), self.folder, name_some(unused))
        return {name: weight.read for name, weight in match(weights, model, self.new)}


@explain_arguments
def pretrained(
    factory: Callable[..., nn.Module], folder: str | Path, *, new: Sequence[str] = ()
) -> Pretrained:
    """Return a factory for `Trainer(model=...)` whose model gets its values from a folder.

        model = paceline.pretrained(transformers.LlamaForCausalLM, "models/llama")
        trainer = paceline.Trainer(model, layout="dp_shard=4 tp=2", ...)

    Rank 0 reads one tensor after the other and sends it; each rank keeps its part. So no rank holds more than
    its part of the model and one tensor. Only rank 0 needs the folder. Nothing is downloaded, no pickle is
    loaded, and no code of the folder is run.

    Args:
        factory: a model class of transformers (also `AutoModelFor...`), which is built from the folder's
            config.json, or a function that builds the model.
        folder: with safetensors, as `save_pretrained` writes it.
        new: patterns of names (`"score.*"`) of parameters that the folder need not have. They start with the
            values of the factory; rank 0 then builds the whole model once.

    Raises:
        PacelineError: PL737 if there is no such folder. Later, when a trainer is built: PL737 and PL738.
    """
    folder = Path(folder)
    check_folder(folder)
    patterns = (new,) if isinstance(new, str) else tuple(new)
    if isinstance(factory, type):
        return Pretrained(_from_config(factory, folder), folder, patterns)
    return Pretrained(factory, folder, patterns)


def from_recipe(section: HfModel, vocab_size: int | None) -> Callable[[], nn.Module]:
    """Return the factory of a recipe's model of transformers, with the folder's weights or fresh ones.

    Args:
        section: of the recipe.
        vocab_size: token ids of the data.

    Raises:
        PacelineError: PL901 without transformers, PL737 for the folder; when it is built, PL942 if the
            data have more tokens.
    """
    transformers = import_optional("transformers", "transformers", 'model.kind = "hf" needs it.')
    found = pretrained(transformers.AutoModelForCausalLM, section.folder)

    def build() -> nn.Module:
        model: Any = found.build()
        model.config.use_cache = False
        num_rows = model.get_input_embeddings().num_embeddings
        if vocab_size is not None and vocab_size > num_rows:
            raise PacelineError(
                "PL942",
                saw=f"the tokenizer has {vocab_size} tokens, and the model of {section.folder} {num_rows}.",
                rule="Every token id needs a row of the model's embedding.",
                fix=f"Set data.tokenizer to {section.folder}/tokenizer.json.",
            )
        return cast(nn.Module, model)

    return Pretrained(build, found.folder, ()) if section.weights else build


def _from_config(kind: type, folder: Path) -> Callable[[], nn.Module]:
    make: Any = getattr(kind, "from_config", None) or getattr(kind, "_from_config", None)
    if make is None:
        raise PacelineError(
            "PL737",
            saw=f"pretrained({kind.__name__}, ...).",
            rule="A class is one of transformers, whose configuration is in the folder.",
            fix=f"Pass a function that builds the model: pretrained(lambda: {kind.__name__}(...), folder).",
        )
    if not (folder / "config.json").is_file():
        raise PacelineError(
            "PL737",
            saw=f"{folder} has no config.json.",
            rule="A class of transformers is built from the folder's configuration.",
            fix="Pass a function that builds the model, or save the configuration there: "
            "config.save_pretrained(folder).",
        )

    def build() -> nn.Module:
        from transformers import AutoConfig

        own: Any = getattr(kind, "config_class", None)
        config = (
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if own is None
            else own.from_pretrained(folder)
        )
        model: nn.Module = make(config, dtype=torch.float32)
        return model

    return build
