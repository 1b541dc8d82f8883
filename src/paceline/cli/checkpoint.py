"""`paceline checkpoint`: shows, verifies, hashes and exports checkpoints."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.output import format_rows
from paceline.finding import Finding
from paceline.units import format_bytes, format_count

if TYPE_CHECKING:
    from paceline.checkpoint.summary import CheckpointSummary

# Everything that needs torch is imported where it is used, so that `paceline --help` answers at once.

DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `checkpoint` and its actions to the command line."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="show, verify, hash and export checkpoints",
        description="PATH is a run's folder (runs/demo) or one checkpoint "
        "(runs/demo/checkpoints/step-00000050).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = _add(actions, "show", "step, size, tensors, parameters and identity, without reading the weights")
    show.add_argument("--tensors", action="store_true", help="list every tensor of the newest one")
    _add(actions, "verify", "check every hash; exit code 1 if a checkpoint is not valid")
    _add(actions, "hash", "SHA-256 of the model's tensors (of a run: its newest valid checkpoint)")
    export = _add(actions, "export", "write the model as one .safetensors file, or for Hugging Face")
    export.add_argument("out", metavar="OUT", type=Path, help="the file or folder to write; must not exist")
    export.add_argument(
        "--hf",
        metavar="FOLDER",
        type=Path,
        help="write a folder that from_pretrained reads; FOLDER has the model's config.json, and its "
        "tokenizer and other small files are copied",
    )
    export.add_argument(
        "--average",
        nargs="?",
        const="average",
        metavar="NAME",
        help="write the average of weights that ema= keeps (default: average) in place of the weights",
    )
    export.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint that keep_best or train.patience has kept, in place of the newest",
    )
    export.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors to it")


def _add(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("path", metavar="PATH", type=Path, help="a run's folder or one checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out `paceline checkpoint ACTION`.

    Returns:
        0, or 1 if `show` or `verify` found a problem.
    """
    actions = {"show": _show, "verify": _verify, "hash": _hash, "export": _export}
    return actions[args.action](args)


def _show(args: argparse.Namespace) -> int:
    from paceline.checkpoint import list_at
    from paceline.checkpoint.summary import summarize

    summaries = [summarize(path) for path in list_at(args.path)]
    if args.json:
        print(json.dumps({"checkpoints": [_as_table(summary, args.tensors) for summary in summaries]}))
    else:
        _print_summaries(summaries)
        if args.tensors:
            _print_tensors(summaries[-1])
    return int(any(summary.findings for summary in summaries))


def _as_table(summary: CheckpointSummary, with_tensors: bool) -> dict[str, Any]:
    table = {
        "path": str(summary.path),
        "step": summary.step,
        "bytes": summary.num_bytes,
        "num_tensors": len(summary.tensors),
        "num_parameters": summary.num_parameters,
        "loss": summary.loss,
        "identity": summary.identity,
        "findings": [asdict(finding) for finding in summary.findings],
    }
    if with_tensors:
        table["tensors"] = {
            name: {"dtype": info.dtype, "shape": list(info.shape), "alias_of": info.alias_of}
            for name, info in summary.tensors.items()
        }
    return table


def _print_summaries(summaries: list[CheckpointSummary]) -> None:
    rows = [("step", "size", "tensors", "parameters", "loss", "folder")]
    for summary in summaries:
        rows.append(
            (
                "?" if summary.step is None else str(summary.step),
                format_bytes(summary.num_bytes),
                str(len(summary.tensors)),
                format_count(summary.num_parameters),
                "-" if summary.loss is None else f"{summary.loss:.6g}",
                str(summary.path),
            )
        )
    print(format_rows(rows, to_left=True))
    newest = summaries[-1]
    if newest.identity:
        print(f"\nstep {newest.step} was written by")
        identity = [(f"  {key}", str(value)) for key, value in newest.identity.items()]
        print(format_rows(identity, to_left=True))
    for summary in summaries:
        for finding in summary.findings:
            print(f"\n{finding}")


def _print_tensors(summary: CheckpointSummary) -> None:
    print()
    rows = [("tensor", "type", "shape")]
    for name, info in summary.tensors.items():
        tied = "" if info.alias_of is None else f"  (tied to {info.alias_of})"
        rows.append((name, info.dtype, f"{list(info.shape)}{tied}"))
    print(format_rows(rows, to_left=True))


def _verify(args: argparse.Namespace) -> int:
    from paceline.checkpoint import is_usable, list_at, verify

    found = {path: verify(path) for path in list_at(args.path)}
    if args.json:
        tables = [
            {
                "path": str(path),
                "usable": is_usable(findings),
                "findings": [asdict(finding) for finding in findings],
            }
            for path, findings in found.items()
        ]
        print(json.dumps({"checkpoints": tables}))
    else:
        for path, findings in found.items():
            print(f"{path}: {_verdict(findings, is_usable(findings))}")
            for finding in findings:
                print(f"  {finding}")
    return int(any(found.values()))


def _verdict(findings: list[Finding], usable: bool) -> str:
    if not findings:
        return "valid, every hash is right"
    return "valid, with other files beside it" if usable else "not valid"


def _hash(args: argparse.Namespace) -> int:
    from paceline.checkpoint import find_checkpoint, hash_stored, open_usable

    path = find_checkpoint(args.path)
    found = open_usable(path)
    digest = hash_stored(found.model)
    if args.json:
        print(json.dumps({"path": str(path), "step": found.step, "sha256": digest}))
    else:
        print(digest)  # alone on its line, so that a script can compare two
    return 0


def _export(args: argparse.Namespace) -> int:
    import torch

    from paceline.checkpoint import export_model, find_best, find_checkpoint

    path = (find_best if args.best else find_checkpoint)(args.path)
    dtype = getattr(torch, DTYPES[args.dtype]) if args.dtype is not None else None
    if args.hf is None:
        num_bytes = export_model(path, args.out, dtype, args.average)
    else:
        from paceline.huggingface.export import export_folder

        num_bytes = export_folder(path, args.out, args.hf, dtype, args.average)
    if args.json:
        print(json.dumps({"path": str(path), "out": str(args.out), "bytes": num_bytes}))
    else:
        print(f"{args.out}: {format_bytes(num_bytes)}, from {path}")
    return 0
