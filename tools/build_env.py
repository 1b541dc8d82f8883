"""Builds a virtual environment from lock files; does nothing if it exists already.

    python tools/build_env.py VENV LOCK [LOCK ...] [NAME==VERSION ...]

A `NAME==VERSION` replaces the pin of that name in the lock files.
A stamp inside VENV, written last, says what it was built from; a build that failed or was interrupted
leaves none and is started over by the next call. A lock beside VENV makes two calls at once take turns.
Written for the standard library of Python 3.6 and later, so that an old one gets a clear answer.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MIN_PYTHON = (3, 11)
TORCH = "torch=="
# These import torch while they are being built, so they come last and without build isolation.
BUILT_ON_TORCH = ("deepspeed==",)


def main(arguments):
    """Build the environment; the exit code is 0, 1 (an installation failed) or 2 (this cannot work)."""
    if len(arguments) < 2:
        return _refuse("usage: build_env.py VENV LOCK [LOCK ...] [NAME==VERSION ...]")
    if sys.version_info < MIN_PYTHON:
        return _refuse(
            f"{sys.executable} is Python {sys.version.split()[0]}. Paceline needs "
            f"{MIN_PYTHON[0]}.{MIN_PYTHON[1]} or later. Name one: make env PYTHON=python3.11"
        )
    try:
        import ensurepip
        import venv  # noqa: F401
    except ImportError as error:
        return _refuse(
            f"{sys.executable} has no module {error.name!r}. An environment is made with `python -m venv`. "
            "Install it (Debian: apt-get install python3-venv) or name another Python: make env PYTHON=..."
        )
    del ensurepip
    if os.path.islink(arguments[0].rstrip("/")):
        return _refuse(
            f"{arguments[0]} is a link to {os.path.realpath(arguments[0])}, which may serve another project; "
            "nothing is installed there. Remove the link, and an environment is made in its place."
        )
    folder, others = os.path.abspath(arguments[0]), [word for word in arguments[1:] if "==" in word]
    locks = [word for word in arguments[1:] if "==" not in word]
    with open(folder + ".lock", "w") as lock:
        _take(lock, folder)
        try:
            return _build(folder, locks, others, lock)
        except subprocess.CalledProcessError as error:
            print(f"failed: {' '.join(error.cmd)}", file=sys.stderr)
            print(f"{folder} is not complete; the next call starts over.", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted; the next call starts over.", file=sys.stderr)
            return 1


def _refuse(message):
    print(message, file=sys.stderr)
    return 2


def _take(lock, folder):
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another process builds {folder}; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _build(folder, locks, others, lock):
    stamp, building = os.path.join(folder, ".stamp"), os.path.join(folder, ".building")
    wanted = _describe(folder, locks, others)
    found = _read(stamp)
    if found == wanted:
        return 0
    python = os.path.join(folder, "bin", "python")

    def run(*command):
        # The children inherit the lock: it is held until the last of them ends, also if this is killed.
        subprocess.run(command, check=True, cwd=ROOT, pass_fds=(lock.fileno(),), stdin=subprocess.DEVNULL)

    def pip(*words):
        run(python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *words)

    only_the_project_changed = found is not None and dict(found, project="") == dict(wanted, project="")
    if found is not None:
        os.remove(stamp)
    if not only_the_project_changed:
        # Without a stamp and without our mark it was made by hand: install into it, delete nothing.
        if found is not None or os.path.exists(building):
            shutil.rmtree(folder)
        os.makedirs(folder, exist_ok=True)
        open(building, "w").close()
        print(f"making {folder} with Python {sys.version.split()[0]}", flush=True)
        run(sys.executable, "-m", "venv", folder)
        pins = _replace([pin for path in locks for pin in _read_pins(path)], others)
        torch = [pin for pin in pins if pin.startswith(TORCH)]
        late = [pin for pin in pins if pin.startswith(BUILT_ON_TORCH)]
        rest = [pin for pin in pins if pin not in torch + late]
        if torch:
            print(f"installing {' '.join(torch)}", flush=True)
            pip(*torch)
        print(f"installing {len(rest)} packages from {', '.join(locks)}", flush=True)
        pip(*torch, *rest)
        if late:
            print(f"building {' '.join(late)}", flush=True)
            pip("--no-build-isolation", *late)
    print("installing this project", flush=True)
    pip("--no-deps", "--no-build-isolation", "-e", ROOT)
    if os.path.exists(building):
        os.remove(building)
    with open(stamp + ".new", "w") as file:
        json.dump(wanted, file, indent=1)
    os.replace(stamp + ".new", stamp)
    return 0


def _describe(folder, locks, others):
    """Return what an environment depends on, also its folder, because it cannot be moved."""
    return {
        "folder": folder,
        "python": sys.version,
        "locks": [_hash(path) for path in locks],
        "others": others,
        "builder": _hash(__file__),
        "project": _hash(os.path.join(ROOT, "pyproject.toml")),
    }


def _hash(path):
    with open(os.path.join(ROOT, path), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _read(stamp):
    try:
        with open(stamp) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _replace(pins, others):
    """Return the pins, with those of `others` in place of pins of the same name."""
    names = {pin.partition("==")[0].lower() for pin in others}
    return others + [pin for pin in pins if pin.partition("==")[0].lower() not in names]


def _read_pins(path):
    with open(os.path.join(ROOT, path)) as file:
        lines = [line.split("#")[0].strip() for line in file]
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
