"""Meets at a port of its own: `own_meeting.py env|tcp|spawn|forkserver|fork|torch|program PORT`."""

import multiprocessing
import os
import subprocess
import sys

import torch
import torch.distributed as dist


def work(rank: int, world_size: int, kind: str, port: str) -> None:
    if kind == "tcp":
        where = {"init_method": f"tcp://127.0.0.1:{port}"}
    else:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
        where = {}
    dist.init_process_group("gloo", rank=rank, world_size=world_size, **where)
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(1, f"sum {total.item():.0f} of {world_size}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    if kind in ("env", "tcp"):
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), kind, port)
    elif kind == "program":
        words = [sys.executable, __file__, "env", port]
        places = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
        programs = [subprocess.Popen(words, env=place) for place in places]
        sys.exit(max(program.wait() for program in programs))
    elif kind == "torch":
        torch.multiprocessing.spawn(work, (2, kind, port), nprocs=2)
    else:
        context = multiprocessing.get_context(kind)
        ranks = [context.Process(target=work, args=(rank, 2, kind, port)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(max(process.exitcode or 0 for process in ranks))
