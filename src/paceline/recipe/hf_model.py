"""The section of a recipe for a model of transformers."""

from __future__ import annotations

from typing import Any, Literal

from paceline.recipe.section import Section


class HfModel(Section):
    """A causal language model of transformers; none of the folder's code is run."""

    kind: Literal["hf"]
    """`"hf"`."""
    folder: str
    """Folder of this machine with a `config.json`, as `save_pretrained` writes it."""
    weights: bool = True
    """Start with the folder's weights (safetensors); `false` starts with fresh ones."""

    def find_broken(self, data: Any) -> tuple[str, str, str, str] | None:
        """Return code, saw, rule and fix if the text's tokenizer is not the model's."""
        if not self.weights or data.tokenizer not in ("bytes", "bpe"):
            return None
        return (
            "PL942",
            f"model.folder={self.folder!r} with its weights, and data.tokenizer={data.tokenizer!r}.",
            "Pretrained weights know the token ids of their own tokenizer.",
            f"Set data.tokenizer to {self.folder}/tokenizer.json, or model.weights to false.",
        )
