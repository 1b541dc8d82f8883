"""Bad input that is refused before a rank starts, in this process: hundreds of cases in a few seconds.

Each ends with exit code 2 and one message that has the value and the code, and nothing is written or lost.
What only a process of its own can show (streams, limits, signals) is in `test_bad_streams.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.recipe import load_recipe
from paceline.recipe.explain import kind_of, models_in
from paceline.recipe.schema import Recipe
from tests.cli.test_bad_input import RECIPE, fill, snapshot

Make = Callable[[Path], object]


@dataclass
class Refused:
    """A command that is refused.

    Attributes:
        words: after `paceline`.
        says: what the message must hold.
        make: prepares the folder.
    """

    words: list[str]
    says: list[str]
    make: Make = lambda folder: None


def train(*words: str, recipe: str = "recipe.toml") -> list[str]:
    return ["train", recipe, "--out", "out", *words]


def sets(*settings: str) -> list[str]:
    return train(*(word for setting in settings for word in ("--set", setting)))


def write(name: str, content: str | bytes) -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def both(*makes: Make) -> Make:
    def make(folder: Path) -> None:
        for one in makes:
            one(folder)

    return make


def recipe(text: str | bytes) -> Make:
    return write("recipe.toml", text)


def replaced(make: Callable[[Path], object]) -> Make:
    """Something else in place of the recipe."""

    def replace(folder: Path) -> None:
        (folder / "recipe.toml").unlink()
        make(folder / "recipe.toml")

    return replace


def link(name: str, target: str) -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return make


def pipe(name: str) -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / name)

    return make


def folder_at(name: str) -> Make:
    return lambda folder: (folder / name).mkdir(parents=True)


def socket_at(name: str) -> Make:
    def make(folder: Path) -> None:
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)
        finally:
            os.chdir(here)

    return make


ROW = '{"loss": 1.0, "step": 1}\n'
DIGITS = "9" * 5000

RECIPES = {
    "nested 100,000 deep": Refused(train(), ["nests", "PL122"], recipe(f"a = {'[' * 100_000}")),
    "inline tables 10,000 deep": Refused(train(), ["nests", "PL122"], recipe(f"a = {'{b=' * 10_000}")),
    "dotted 1,000 deep": Refused(
        train(), ["nested more than 16 deep", "PL124"], recipe(f"a{'.a' * 1000} = 1")
    ),
    "a table 1,000 deep": Refused(
        train(), ["nested more than 16 deep", "PL124"], recipe(f"[a{'.a' * 1000}]")
    ),
    "integer of 5,000 digits": Refused(train(), ["thousands of digits", "PL122"], recipe(f"a = {DIGITS}")),
    "hexadecimal of 5,000 digits": Refused(train(), ["bits", "PL124"], recipe(f"a = 0x{'f' * 5000}")),
    "byte order mark of UTF-16": Refused(
        train(), ["UTF-16", "UTF-8", "PL121"], recipe(RECIPE.encode("utf-16"))
    ),
    "latin-1": Refused(train(), ["UTF-8", "PL121"], recipe("# caf\xe9".encode("latin-1"))),
    "NUL bytes": Refused(train(), ["not TOML", "PL122"], recipe(b"\0" * 100)),
    "empty": Refused(train(), ["model is missing", "data is missing", "train is missing"], recipe(b"")),
    "larger than a megabyte": Refused(train(), ["1,048,576 bytes", "PL121"], recipe(b"#" * 1_100_000)),
    "a pipe": Refused(train(), ["a pipe", "PL121"], replaced(os.mkfifo)),
    "a device": Refused(train(recipe="/dev/zero"), ["/dev/zero", "a device", "PL121"]),
    "null": Refused(train(recipe="/dev/null"), ["/dev/null", "a device", "PL121"]),
    "a folder": Refused(train(recipe="."), ["a folder", "PL121"]),
    "a link to itself": Refused(
        train(), ["symbolic links", "PL121"], replaced(lambda p: p.symlink_to(p.name))
    ),
    "a broken link": Refused(train(), ["does not exist", "PL121"], replaced(lambda p: p.symlink_to("no"))),
    "below a file": Refused(train(recipe="text/0.txt/r.toml"), ["PL121"]),
    "a name of 5,000 characters": Refused(train(recipe="x" * 5000), ["too long", "PL121"]),
    "an empty name": Refused(train(recipe=""), ["PL121"]),
    "NUL in a file name": Refused(sets('data.files=["a\\u0000b"]'), ["valid text", "PL124"]),
    "NUL in the tokenizer": Refused(sets('data.tokenizer="a\\u0000b"'), ["valid text", "PL124"]),
    "a file name that is not UTF-8": Refused(sets('data.files=["\udcff.txt"]'), ["valid text", "PL124"]),
    "a section twice": Refused(train(), ["not TOML", "PL122"], recipe(RECIPE + "[model]\n")),
    "a list of tables": Refused(train(), ["model", "table", "PL101"], recipe("[[model]]\nkind='gpt'\n")),
}

SETTINGS = {
    "nothing": Refused(sets(""), ["''", "PL123"]),
    "no value": Refused(sets("train.steps"), ["train.steps", "PL123"]),
    "no key": Refused(sets("=3"), ["=3", "PL123"]),
    "an empty part": Refused(sets("train..steps=3"), ["train..steps", "PL123"]),
    "100 parts": Refused(sets(".".join("a" * 100) + "=1"), ["a.a.a", "PL123"]),
    "into a number": Refused(sets("train.steps.more=1"), ["train.steps", "not a table", "PL123"]),
    "a section as a number": Refused(sets("model=5"), ["model=5", "table", "PL101"]),
    "nested": Refused(sets(f"train.steps={'[' * 50}{']' * 50}"), ["nested more than 16", "PL124"]),
    "nested beyond Python": Refused(sets(f"train.steps={'[' * 5000}"), ["train.steps", "integer", "PL101"]),
    "5,000 digits": Refused(sets(f"train.steps={DIGITS}"), ["train.steps", "999...", "PL101"]),
    "400 digits": Refused(sets(f"train.steps={'9' * 400}"), ["integer of 1329 bits", "PL124"]),
    "none for a key without default": Refused(sets("model.layers=none"), ["model.layers", "PL101"]),
    "a line break and another key": Refused(sets("train.seed=1\nsteps=2"), ["train.seed", "PL101"]),
    "layers": Refused(sets("model.layers=1000000"), ["layers=1000000", "10000", "PL101"]),
    "hidden": Refused(sets("model.hidden=1000000000"), ["hidden=1000000000", "1048576", "PL101"]),
    "hidden that fits no machine": Refused(sets("model.hidden=1000000"), ["hidden=1000000", "TiB", "PL125"]),
    "warm-up as a setting": Refused(
        sets("optimizer.warmup_steps=9"), ["warmup_steps=9", "train.steps=4", "PL117"]
    ),
    "warm-up as a setting, with steps": Refused(
        sets("train.steps=5", "optimizer.warmup_steps=9"), ["warmup_steps=9", "train.steps=5", "PL117"]
    ),
    "ranks by the layout": Refused(sets("layout.dp_replicate=100000"), ["100000", "PL321"]),
    "ranks by the layout, of two axes": Refused(
        sets("layout.dp_replicate=1000", "layout.dp_shard=1000"), ["PL1"]
    ),
    "batch": Refused(sets("train.global_batch_size=1000000000"), ["1000000000", "samples", "180", "PL214"]),
}

DATA = {
    "a pipe": Refused(train(), ["text/p.txt", "a pipe", "PL213"], pipe("text/p.txt")),
    "a socket": Refused(train(), ["text/s.txt", "a socket", "PL213"], socket_at("text/s.txt")),
    "a folder": Refused(train(), ["text/f.txt", "a folder", "**", "PL213"], folder_at("text/f.txt")),
    "a broken link": Refused(train(), ["text/l.txt", "nowhere", "PL213"], link("text/l.txt", "nowhere")),
    "a link to itself": Refused(train(), ["text", "symbolic links", "PL201"], link("text/l.txt", "l.txt")),
    "a pipe by name": Refused(sets('data.files=["p"]'), ["p", "a pipe", "PL213"], pipe("p")),
    "a device by name": Refused(sets('data.files=["/dev/zero"]'), ["/dev/zero", "a device", "PL213"]),
    "a folder by name": Refused(sets('data.files=["text"]'), ["text", "a folder", "text/**", "PL200"]),
    "a broken link by name": Refused(sets('data.files=["l"]'), ["nowhere", "PL213"], link("l", "nowhere")),
    "a pipe deep down": Refused(
        sets('data.files=["text/**"]'), ["text/a/b/p", "a pipe", "PL213"], pipe("text/a/b/p")
    ),
    "nothing": Refused(sets('data.files=["no/*.txt"]'), ["no/*.txt", "PL200"]),
    "nothing below a file": Refused(sets('data.files=["recipe.toml/*.txt"]'), ["recipe.toml/*", "PL200"]),
    "no patterns": Refused(sets("data.files=[]"), ["data.files", "PL101"]),
    "an empty pattern": Refused(sets('data.files=[""]'), ["PL200"]),
    "a pattern as text": Refused(sets('data.files="a.txt"'), ['files = ["a.txt"]', "PL101"]),
    "empty files": Refused(sets('data.files=["e"]'), ["empty", "PL200"], write("e", b"")),
    "a name of 5,000 characters": Refused(sets(f'data.files=["{"x" * 5000}"]'), ["too long", "PL201"]),
    "cache is a file": Refused(sets('data.cache_dir="recipe.toml"'), ["recipe.toml", "PL204"]),
    "cache below a file": Refused(sets('data.cache_dir="recipe.toml/c"'), ["recipe.toml", "PL204"]),
    "cache is a broken link": Refused(sets('data.cache_dir="c"'), ["c", "PL204"], link("c", "no/where")),
    "tokenizer is a folder": Refused(sets('data.tokenizer="text"'), ["text", "PL203"]),
    "tokenizer is a pipe": Refused(sets('data.tokenizer="p"'), ["p", "PL203"], pipe("p")),
    "tokenizer is not JSON": Refused(sets('data.tokenizer="text/0.txt"'), ["text/0.txt", "PL203"]),
}

FOLDERS = {
    "the user's own recipe": Refused(["train", "recipe.toml", "--out", "."], [".", "recipe.toml", "PL520"]),
    "its default name": Refused(train(), ["recipe.toml", "PL520"], write("out/recipe.toml", RECIPE)),
    "a file that is no recipe": Refused(train(), ["recipe.toml", "PL520"], write("out/recipe.toml", "hello")),
    "somebody's metrics": Refused(train(), ["metrics.jsonl", "PL520"], write("out/metrics.jsonl", ROW)),
    "somebody's evaluations": Refused(
        train(), ["evaluations.jsonl", "PL520"], write("out/evaluations.jsonl", ROW)
    ),
    "both": Refused(
        train(),
        ["metrics.jsonl and evaluations.jsonl", "PL520"],
        both(write("out/metrics.jsonl", ROW), write("out/evaluations.jsonl", ROW)),
    ),
    "somebody's lock": Refused(train(), [".lock", "PL520"], write("out/.lock", "precious")),
    "a lock that is a link": Refused(
        train(),
        [".lock", "symbolic link", "PL521"],
        both(folder_at("out"), link("out/.lock", "../recipe.toml")),
    ),
    "a lock that is a broken link": Refused(
        train(), [".lock", "symbolic link", "PL521"], both(folder_at("out"), link("out/.lock", "nowhere"))
    ),
    "a lock that is a folder": Refused(train(), [".lock", "a folder", "PL521"], folder_at("out/.lock")),
    "a lock that is a pipe": Refused(train(), [".lock", "a pipe", "PL521"], pipe("out/.lock")),
    "metrics that are a pipe": Refused(
        train(), ["metrics.jsonl", "a pipe", "PL521"], pipe("out/metrics.jsonl")
    ),
    "metrics that are a folder": Refused(
        train(), ["metrics.jsonl", "a folder", "PL521"], folder_at("out/metrics.jsonl")
    ),
    "metrics behind a broken link": Refused(
        train(), ["metrics.jsonl", "nowhere", "PL521"], link("out/metrics.jsonl", "nowhere")
    ),
    "a recipe that is a pipe": Refused(train(), ["recipe.toml", "a pipe", "PL521"], pipe("out/recipe.toml")),
    "checkpoints that are a file": Refused(
        train(), ["checkpoints", "a file", "PL521"], write("out/checkpoints", "")
    ),
    "checkpoints behind a broken link": Refused(
        train(), ["checkpoints", "nowhere", "PL521"], link("out/checkpoints", "nowhere")
    ),
    "logs that are a file": Refused(train(), ["logs", "a file", "PL521"], write("out/logs", "")),
    "tensorboard that is a pipe": Refused(
        train(), ["tensorboard", "a pipe", "PL521"], pipe("out/tensorboard")
    ),
    "a broken link": Refused(train(), ["out", "nowhere", "PL521"], link("out", "nowhere")),
    "a link to itself": Refused(train(), ["out", "PL5"], link("out", "out")),
    "a file": Refused(train(), ["out", "PL532"], write("out", "")),
    "below a file": Refused(["train", "recipe.toml", "--out", "recipe.toml/out"], ["recipe.toml", "PL532"]),
    "a pipe": Refused(train(), ["out", "PL532"], pipe("out")),
    "a name of 5,000 characters": Refused(
        ["train", "recipe.toml", "--out", "x" * 5000], ["too long", "PL532"]
    ),
}

VERIFY = {
    "1,000 ranks": Refused(
        ["verify", "recipe.toml", "--layout", "dp_replicate=1000"], ["nproc=1000", "PL321"]
    ),
    "10^12 ranks": Refused(["verify", "recipe.toml", "--layout", "dp_replicate=1000000000000"], ["PL126"]),
    "no layout": Refused(["verify", "recipe.toml", "--layout", "fast"], ["fast", "PL110"]),
    "an empty layout": Refused(["verify", "recipe.toml", "--layout", "dp_replicate="], ["PL11"]),
    "a huge degree": Refused(["verify", "recipe.toml", "--layout", f"tp={DIGITS}"], ["PL11"]),
    "ranks that are no number": Refused(["verify", "recipe.toml", "--nproc", "0"], ["--nproc 0", "PL720"]),
    "all without ranks": Refused(["verify", "recipe.toml", "--all"], ["--all", "--nproc", "PL720"]),
    "all on 10^9 ranks": Refused(["verify", "recipe.toml", "--all", "--nproc", "1000000000"], ["PL126"]),
    "no steps": Refused(["verify", "recipe.toml", "--steps", "0"], ["steps", "PL72"]),
    "minus one step": Refused(["verify", "recipe.toml", "--steps", "-1"], ["steps", "PL72"]),
    "a recipe that is a pipe": Refused(["verify", "recipe.toml"], ["a pipe", "PL121"], replaced(os.mkfifo)),
    "a missing recipe": Refused(["verify", "no.toml"], ["no.toml", "PL121"]),
    "a bad setting": Refused(["verify", "recipe.toml", "--set", "x"], ["'x'", "PL123"]),
    "a huge model": Refused(["verify", "recipe.toml", "--set", "model.hidden=1000000"], ["TiB", "PL125"]),
    "a huge batch": Refused(
        ["verify", "recipe.toml", "--set", "train.global_batch_size=1000000000"], ["PL214"]
    ),
}

CHECKPOINTS = {
    f"{action}, {name}": Refused(["checkpoint", action, path, *more], says, make)
    for action, more in (("show", []), ("verify", []), ("hash", []), ("export", ["x.safetensors"]))
    for name, path, says, make in (
        ("nothing there", "no", ["no", "PL514"], lambda folder: None),
        ("a file", "recipe.toml", ["recipe.toml", "PL514"], lambda folder: None),
        ("an empty folder", "text", ["text", "PL514"], lambda folder: None),
        ("a pipe", "p", ["p", "PL514"], pipe("p")),
        ("a broken link", "l", ["l", "PL514"], link("l", "nowhere")),
        ("a long name", "x" * 5000, ["too long", "PL514"], lambda folder: None),
        ("checkpoints is a file", "out", ["out", "PL514"], write("out/checkpoints", "")),
    )
}
CHECKPOINTS |= {
    "exported with a flag of another command": Refused(
        ["checkpoint", "export", "out", "--out", "x"], ["unrecognized arguments: --out", "PL600"]
    ),
    "a manifest that is a pipe": Refused(
        ["checkpoint", "hash", "out/checkpoints/step-00000001"],
        ["manifest.json", "a pipe", "PL503"],
        pipe("out/checkpoints/step-00000001/manifest.json"),
    ),
}

FLAGS = {
    "unknown command": Refused(["tarin"], ["train", "PL600"]),
    "no code": Refused(["explain", "PL999"], ["PL999", "PL602"]),
    "an empty code": Refused(["explain", ""], ["PL602"]),
    "a strange code": Refused(["explain", "\udcff"], ["PL602"]),
    "no recipe": Refused(["train"], ["RECIPE", "PL600"]),
    "two recipes": Refused(["train", "a", "b"], ["b", "PL600"]),
    "nproc as text": Refused(train("--nproc", "x"), ["--nproc", "PL600"]),
    "nproc as a fraction": Refused(train("--nproc", "1.5"), ["--nproc", "PL600"]),
    "nproc of 5,000 digits": Refused(train("--nproc", DIGITS), ["--nproc", "PL600"]),
    "minus one rank": Refused(train("--nproc", "-1"), ["-1", "PL320"]),
    "10^18 ranks": Refused(train("--nproc", "1000000000000000000"), ["PL126"]),
    "no patience": Refused(train("--hang-after", "0"), ["--hang-after", "PL349"]),
    "patience that is no number": Refused(train("--hang-after", "nan"), ["--hang-after", "PL349"]),
    "bench of nothing": Refused(["bench", "scaling", "no.toml"], ["no.toml", "PL121"]),
    "bench without ranks": Refused(["bench", "scaling", "recipe.toml", "--nproc", "0"], ["PL"]),
    "bench on 10^9 ranks": Refused(["bench", "scaling", "recipe.toml", "--nproc", "1000000000"], ["PL"]),
}

CASES = {
    f"{kind}: {name}": case
    for kind, cases in {
        "recipe": RECIPES,
        "set": SETTINGS,
        "data": DATA,
        "out": FOLDERS,
        "verify": VERIFY,
        "checkpoint": CHECKPOINTS,
        "flags": FLAGS,
    }.items()
    for name, case in cases.items()
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return fill(tmp_path)


def look(folder: Path) -> dict[str, object]:
    """Return every entry and its content, without the cache of token files."""
    kinds = {str(path.relative_to(folder)): path.lstat().st_mode for path in folder.rglob("*")}
    found = {**kinds, **{f"in {name}": data for name, data in snapshot(folder).items()}}
    return {name: value for name, value in found.items() if not name.removeprefix("in ").startswith("cache")}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message with which a command ends."""
    try:
        code = main(words)
    except SystemExit as ended:  # of the parser
        code = int(str(ended.code))
    told = capsys.readouterr()
    text = told.out + told.err
    assert code == 2, text
    assert "Traceback" not in text
    assert text.count("[PL") == 1 or " problems\n" in text, text
    assert len(text) < 8000, text
    return text


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    case.make(folder)
    before = look(folder)
    text = refused(case.words, capsys)
    for words in case.says:
        assert words in text, text
    assert look(folder) == before


def list_keys() -> list[tuple[str, str | None]]:
    """Return every key of a recipe, with the `kind` of its section."""
    return [
        (f"{section}.{key}", kind_of(model))
        for section, field in Recipe.model_fields.items()
        for model in models_in(field.annotation)
        for key in model.model_fields
        if key != "kind"
    ]


BAD_VALUES = ("''", "[]", "{}", "[[1]]", "-1", "1e400", "-inf", "nan", "9223372036854775808", "1979-05-27")


@pytest.mark.parametrize(("key", "kind"), list_keys())
def test_every_key_with_every_bad_value(key: str, kind: str | None, folder: Path) -> None:
    """A value is taken, or refused with the key's name; it never ends otherwise."""
    kinds = {"encoder": "masked_text", "resnet": "digits", "masked_text": "encoder", "digits": "resnet"}
    section = key.partition(".")[0]
    base = []
    if section == "optimizer" and kind == "sgd":
        base = ["optimizer={kind='sgd'}"]
    elif kind in kinds:
        other = "data" if section == "model" else "model"
        base = [f"{section}={{kind='{kind}'}}", f"{other}={{kind='{kinds[kind]}'}}"]
    told = []
    for value in BAD_VALUES:
        try:
            load_recipe(folder / "recipe.toml", [*base, f"{key}={value}"])
        except PacelineError as error:
            told.append(str(error))
    assert len(told) >= 5
    for message in told:
        assert key.rpartition(".")[2] in message
        assert len(message) < 3000


def test_a_byte_order_mark_is_passed_over(folder: Path) -> None:
    before = load_recipe(folder / "recipe.toml")
    (folder / "recipe.toml").write_bytes(b"\xef\xbb\xbf" + RECIPE.encode())
    assert load_recipe(folder / "recipe.toml") == before


def test_folders_that_a_recursive_pattern_goes_into_are_no_mistake(folder: Path) -> None:
    from paceline.data.corpus import find_text_files

    (folder / "text" / "more").mkdir()
    (folder / "text" / "more" / "5.txt").write_text("more")
    for pattern in ("text/**", "text/**/*", "text/**/*.txt"):
        assert len(find_text_files([pattern])) == 5
