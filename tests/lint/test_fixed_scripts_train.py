"""Ten scripts that `--fix` repairs train on two ranks, to the same bits as those without the mistake."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from paceline.lint import check_text
from paceline.lint.fix import fix_text
from tests.dist.pool import Pool

SCRIPT = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
path = "weights.pt"


def setup():
    dist.init_process_group("nccl")


setup()
torch.manual_seed(0)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = torch.nn.Linear(4, 1).to("cpu")
if os.path.exists(path):
    model.load_state_dict(torch.load(path, map_location="cpu"))
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = torch.nn.functional.mse_loss(model(a), b)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
if rank == 0:
    torch.save(model.module.state_dict(), path)
dist.barrier()
saved = torch.load(path, map_location="cpu")
last = loss.item()
del a, b, loss, loader, model, optimizer
dist.destroy_process_group()
"""

# Code, the right line, and the wrong one.
CASES = (
    ("PL022", "DistributedSampler(data)", "DistributedSampler(data, num_replicas=size, rank=local)"),
    ("PL022", "DistributedSampler(data)", "DistributedSampler(data, rank=local, num_replicas=size, seed=0)"),
    ("PL023", "batch_size=8, sampler=sampler", "batch_size=8, sampler=sampler, shuffle=True"),
    ("PL023", "batch_size=8, sampler=sampler", "batch_size=8, shuffle=True,\n    sampler=sampler,  # äöü\n"),
    ("PL030", "        optimizer.zero_grad()\n", ""),
    ("PL030", "    for a, b in loader:\n", "    optimizer.zero_grad()\n    for a, b in loader:\n"),
    ("PL040", "model.module.state_dict(), path", "model.state_dict(), path"),
    ("PL043", 'torch.load(path, map_location="cpu"))', "torch.load(path))"),
    ("PL058", "def setup():\n", 'def setup():\n    os.environ["MASTER_PORT"] = "29511"\n'),
    ("PL058", 'path = "weights.pt"\n', 'path = "weights.pt"\nos.environ["MASTER_PORT"] = str(29512)\n'),
)


def train(text: str, folder: str) -> list[Any]:
    import os

    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(text.replace('"nccl"', '"gloo"'), "script.py", "exec"), names)
    return [names["last"], *names["saved"]["weight"].flatten().tolist()]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_fixed_script_trains(number: int, ranks: Pool, tmp_path: Any) -> None:
    code, right, wrong = CASES[number]
    assert check_text(SCRIPT, "x.py") == []
    broken = SCRIPT.replace(right, wrong, 1)
    if code == "PL030" and wrong:
        broken = broken.replace("        optimizer.zero_grad()\n", "")
    findings = check_text(broken, "x.py")
    assert {finding.code for finding in findings} == {code}
    fixed, count = fix_text(broken, findings)
    assert count == len(findings)
    assert check_text(fixed, "x.py") == []
    changed = [line for line in difflib.ndiff(broken.splitlines(), fixed.splitlines()) if line[0] in "+-"]
    assert len(changed) <= 2
    expected, found = [
        ranks.run(train, nproc=2, world=False, args=(text, str(folder)))
        for text, folder in ((SCRIPT, tmp_path / "right"), (fixed, tmp_path / "fixed"))
        if folder.mkdir() is None
    ]
    assert found == expected
