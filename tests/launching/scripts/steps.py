"""Takes steps for ever: `steps.py FOLDER`, with its state and a line per step in that folder.

Every fifth step is saved. After SIGTERM, all ranks take one last step together, save it and exit with 75.
"""

import time

born_s = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

imported_s = time.monotonic()
folder = Path(sys.argv[1])
asked = []
signal.signal(signal.SIGTERM, lambda got, frame: asked.append(got))
dist.init_process_group("gloo")
ready_s = time.monotonic()
rank, size = dist.get_rank(), dist.get_world_size()
state = folder / "state"
step = int(state.read_text()) if state.exists() else 0
while True:
    total = torch.tensor([1.0, float(len(asked))])
    dist.all_reduce(total)
    assert total[0].item() == size
    step += 1
    if rank == 0:
        row = {"step": step, "size": size, "at_s": time.monotonic(), "host": os.uname().nodename}
        row |= {"born_s": born_s, "imported_s": imported_s, "ready_s": ready_s}
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if step % 5 == 0 or total[1].item():
            (folder / "state.new").write_text(str(step))
            (folder / "state.new").replace(state)
    if total[1].item():
        dist.barrier()
        sys.exit(75)
    time.sleep(0.1)
