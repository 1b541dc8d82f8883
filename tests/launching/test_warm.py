"""The warm start: what a rank sees of packages that were imported before it was forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.launching.processes.keeper_messages import Start
from paceline.launching.processes.ranks import _start_over

# One process imports torch; each case runs in a fork of it, behind the curtain.
HUB = """
import json, os, signal, sys, threading, time, traceback
from paceline.launching.warm.warm import Warmth, why_not_fork

warmth = Warmth()
warmth.load(("torch", "torch.distributed", "torch.no_such_part", "torch._dynamo"))
results = {"why_not_fork": why_not_fork(), "openblas": os.environ.get("OPENBLAS_NUM_THREADS")}

def run(text):
    def restart(names):
        tell({"restart": names})
    def tell(result):
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    signal.alarm(30)
    scope = {}
    try:
        # As in a rank: torch._dynamo sets a variable when it is imported.
        os.environ.clear()
        os.environ.update(warmth.environ)
        warmth.hide(restart)
        exec(text, scope)
    except BaseException:
        tell({"error": traceback.format_exc()})
    tell(scope.get("result"))

for name, text in json.load(open(sys.argv[1])).items():
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        run(text)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    status = os.waitpid(pid, 0)[1]
    results[name] = json.loads(text) if text else {"status": status}

thread = threading.Thread(target=time.sleep, args=(5,), daemon=True)
thread.start()
results["why_not_fork_with_a_thread"] = why_not_fork()
print(json.dumps(results))
"""

COUNT_BLAS = """
import ctypes
path = next(line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line)
result = ctypes.CDLL(path).scipy_openblas_get_num_threads64_()
"""

CASES = {
    "hidden": """
import sys
result = [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "sympy")]
""",
    "kept": """
import sys
result = [name in sys.modules for name in ("os", "json", "paceline.launching.warm.warm")]
""",
    "as": """
import sys
import torch.nn.functional as F
import torch
result = [F is torch.nn.functional, F is sys.modules["torch.nn.functional"], "numpy" in sys.modules]
""",
    "from": "from torch import nn; result = list(nn.Linear(2, 3).weight.shape)",
    "from deep": "from torch.nn.parallel import DistributedDataParallel as D; result = D.__module__",
    "find_spec": """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
result = [spec.name, spec.origin, list(spec.submodule_search_locations), "torch" in sys.modules]
import torch
result.append(spec.origin == torch.__file__)
""",
    "find_spec of a part": "import importlib.util; result = importlib.util.find_spec('torch.nn').name",
    "numpy first": """
import sys
import numpy
result = ["torch" in sys.modules, float(numpy.ones(3).sum())]
import torch
result += [torch.from_numpy(numpy.ones(3)).sum().item(), torch.ones(2).numpy().sum().item()]
""",
    "specs": """
import sys, torch, numpy, torch.nn
result = [[m.__spec__.name, type(m.__spec__.loader).__name__, m.__spec__.loader is m.__loader__]
          for m in (torch, torch.nn, numpy)]
""",
    "finder goes": """
import sys
def find():
    return [f for f in sys.meta_path if type(f).__name__ == "_HiddenPackageFinder"]
names = {name for finder in find() for name in finder._hidden}
for name in names:
    __import__(name)
result = [len(names) > 1, len(find())]
""",
    "new part": "import torch.utils.benchmark as b; result = b.__name__",
    "absent": """
try:
    import torch.no_such_part
except ModuleNotFoundError as error:
    result = error.name
""",
    "pickle": """
import pickle, copy, io
import torch
t = torch.arange(4.0, requires_grad=True)
back = pickle.loads(pickle.dumps({"t": t, "type": torch.float16, "module": torch.nn.Linear(2, 2)}))
file = io.BytesIO()
torch.save({"t": t.detach()}, file)
file.seek(0)
result = [back["t"].tolist(), str(back["type"]), torch.equal(torch.load(file)["t"], t)]
result.append(isinstance(back["t"], torch.Tensor))
""",
    "computes": """
import torch
m = torch.nn.Linear(4, 4)
opt = torch.optim.Adam(m.parameters())
m(torch.ones(2, 4)).sum().backward()
opt.step()
import inspect
result = "def forward" in inspect.getsource(torch.nn.Linear)
""",
    "threads": """
import threading, sys
done = []
def work(name):
    __import__(name); done.append(name)
names = ["torch", "torch.nn", "numpy", "torch.utils.data", "torch.distributed"]
threads = [threading.Thread(target=work, args=(name,)) for name in names]
for t in threads: t.start()
for t in threads: t.join()
result = sorted(done) == sorted(names) and "torch" in sys.modules
""",
    "debug": """
import os
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
import torch.distributed as dist
result = dist.get_debug_level().name
""",
    "no debug": "import torch.distributed as dist; result = dist.get_debug_level().name",
    "logs": """
import os, logging
os.environ["TORCH_LOGS"] = "+dynamo"
import torch
result = logging.getLogger("torch._dynamo").level
""",
    "no logs": "import torch, logging; result = logging.getLogger('torch._dynamo').level",
    "stacktraces": "import os; os.environ['TORCH_SHOW_CPP_STACKTRACES'] = '1'; import torch; result = 'on'",
    "omp": "import os; os.environ['OMP_NUM_THREADS'] = '1'; import torch; result = 'on'",
    "omp for numpy": "import os; os.environ['OMP_NUM_THREADS'] = '1'; import numpy; result = 'on'",
    "omp away": "import os; del os.environ['OMP_NUM_THREADS']; import numpy; result = 'on'",
    "omp again": "import os; os.environ['OMP_NUM_THREADS'] = '2'; import torch; result = 'on'",
    "tqdm": "import os; os.environ['TQDM_MININTERVAL'] = '9'; import torch; result = 'on'",
    "dynamo": "import os; os.environ['TORCHDYNAMO_VERBOSE'] = '1'; import torch; result = 'on'",
    "two": """
import os
os.environ.update(TORCH_SHOW_CPP_STACKTRACES="1", MKL_NUM_THREADS="1")
os.environ.update(TORCH_DISTRIBUTED_DEBUG="INFO", MASTER_PORT="1")
import torch; result = "on"
""",
    "later": """
import torch, os
os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
import torch.nn, numpy
result = "on"
""",
    "tmp": "import os; os.environ['TMPDIR'] = '/'; import torch, tempfile; result = tempfile.gettempdir()",
    "blas": "import numpy" + COUNT_BLAS,
    "blas of one": "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; import numpy" + COUNT_BLAS,
    "random": "import numpy, torch; result = [numpy.random.rand(), torch.rand(1).item()]",
    "random again": "import torch, numpy; result = [numpy.random.rand(), torch.rand(1).item()]",
    "seeded": """
import numpy, torch
numpy.random.seed(1)
torch.manual_seed(1)
result = [numpy.random.rand(), torch.rand(1).item()]
""",
}

See = Callable[[str], Any]


@pytest.fixture(scope="module")
def see(tmp_path_factory: pytest.TempPathFactory) -> See:
    """The values that a case has seen."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "cases.json").write_text(json.dumps(CASES))
    (folder / "hub.py").write_text(HUB)
    ours = ("TORCH", "OPENBLAS", "MKL", "TQDM")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(folder / "hub.py"), str(folder / "cases.json")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return lambda name: results[name]


# ---- importing


def test_nothing_is_there_until_it_is_imported(see: See) -> None:
    assert see("hidden") == []
    assert see("kept") == [True, True, True]


def test_each_way_of_importing(see: See) -> None:
    assert see("as") == [True, True, False]
    assert see("from") == [3, 2]
    assert see("from deep") == "torch.nn.parallel.distributed"
    assert see("numpy first") == [False, 3.0, 3.0, 2.0]
    assert see("new part") == "torch.utils.benchmark"
    assert see("absent") == "torch.no_such_part"
    assert see("threads") is True


def test_looking_for_a_package_does_not_import_it(see: See) -> None:
    name, origin, places, is_imported, is_file = see("find_spec")
    assert (name, Path(origin).name, is_imported, is_file) == ("torch", "__init__.py", False, True)
    assert places == [str(Path(origin).parent)]
    assert see("find_spec of a part") == "torch.nn"


def test_afterwards_nothing_reports_of_it(see: See) -> None:
    names = ["torch", "torch.nn", "numpy"]
    assert see("specs") == [[name, "SourceFileLoader", True] for name in names]
    assert see("finder goes") == [True, 0]


def test_what_comes_back_works(see: See) -> None:
    assert see("pickle") == [[0.0, 1.0, 2.0, 3.0], "torch.float16", True, True]
    assert see("computes") is True


# ---- settings between the import and now


def test_what_can_be_applied_again_is(see: See) -> None:
    assert (see("no debug"), see("debug")) == ("OFF", "DETAIL")
    assert see("logs") == 10
    assert see("no logs") != 10
    assert see("tmp") == "/"


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("stacktraces", ["TORCH_SHOW_CPP_STACKTRACES"]),
        ("omp", ["OMP_NUM_THREADS"]),
        ("omp for numpy", ["OMP_NUM_THREADS"]),
        ("omp away", ["OMP_NUM_THREADS"]),
        ("tqdm", ["TQDM_MININTERVAL"]),
        ("dynamo", ["TORCHDYNAMO_VERBOSE"]),
        ("two", ["MKL_NUM_THREADS", "TORCH_SHOW_CPP_STACKTRACES"]),
    ],
)
def test_what_can_not_starts_the_rank_over(case: str, names: list[str], see: See) -> None:
    assert see(case) == {"restart": names}


@pytest.mark.parametrize("case", ["omp again", "later"])
def test_what_changes_nothing_does_not(case: str, see: See) -> None:
    """The same value as before, or one that comes after the import in a cold start too."""
    assert see(case) == "on"


# ---- threads and random numbers


def test_openblas_has_the_threads_that_the_environment_states(see: See) -> None:
    cores = len(os.sched_getaffinity(0))
    assert see("openblas") is None, "what was set for the import is taken away"
    assert see("blas") == (2 if cores > 1 else 1)
    assert see("blas of one") == 1


def test_unseeded_random_numbers_differ_between_ranks(see: See) -> None:
    for a, b in zip(see("random"), see("random again"), strict=True):
        assert a != b


def test_seeded_ones_are_as_ever(see: See) -> None:
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(1)
    wanted = [np.random.RandomState(1).rand(), torch.rand(1, generator=generator).item()]
    assert see("seeded") == wanted


def test_a_thread_stands_against_a_fork(see: See) -> None:
    assert see("why_not_fork") is None
    assert "has started a thread here" in see("why_not_fork_with_a_thread")


def test_a_script_with_threads_is_not_started_again(tmp_path: Path) -> None:
    """A process that executes itself again would lose them."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    start = Start(0, 0, {}, (), None, "", str(tmp_path), str(tmp_path))
    try:
        with pytest.raises(PacelineError, match=r"TORCH_LOGS.*\[PL341\]"):
            _start_over(start, ["TORCH_LOGS"])
    finally:
        ended.set()
        thread.join()
    assert list(tmp_path.iterdir()) == []
