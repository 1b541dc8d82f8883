"""Ranks that are asked to stop without the time for a save: the state stays in memory on nodes that stay."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.memory.sending import choose_refuges
from paceline.train.state.transfer import gather
from paceline.train.stopping import Stopped
from tests.dist.pool import Pool
from tests.train.test_saving import Samples, build_trainer, describe, steps


@pytest.mark.parametrize(
    ("nodes", "leaving", "refuges"),
    [
        ([0, 1], {1}, [None, 0]),
        ([0, 0, 1, 1, 2], {0}, [2, 3, None, None, None]),
        ([0, 1, 2], {0, 1}, [2, 2, None]),
        ([0, 1, 1, 2, 2], {1}, [None, 0, 3, None, None]),
    ],
)
def test_ranks_that_leave_copy_to_nodes_that_stay(
    nodes: list[int], leaving: set[int], refuges: list[int | None]
) -> None:
    assert choose_refuges(nodes, leaving) == refuges


def leave(world: Any, folder: str, asked: tuple[int, ...], env: dict[str, str]) -> tuple[str, str, list[str]]:
    """Two ranks, as two nodes or as one: `asked` ones get SIGTERM; then their nodes are gone, and all resume.

    Unless `env["launcher"]` is "static", launchers start ranks again. Those whose ranks get SIGTERM leave, or
    stay if it is "stays". Return what `Stopped` reports as saved, the log of rank 0, and what is wrong.
    """
    num_nodes = int(env["nodes"])
    world.node_rank, world.num_nodes = (world.rank, 2) if num_nodes == 2 else (0, 1)
    told = logging.handlers.BufferingHandler(100)
    logging.getLogger("paceline").addHandler(told)
    saved, wrong = "", []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "PACELINE_GRACE_S": "20", **env}.items():
            patch.setenv(name, value)
        leaves = Path(folder) / f"leaves-{world.node_rank}"
        patch.setenv("PACELINE_GOES_ON", "" if env["launcher"] == "static" else str(leaves))
        trainer = build_trainer("dp_shard=2", asynchronous_saves=False)
        trainer.resume(folder)
        trainer._saver._grace.check(50.0 if world.is_main else None)
        try:
            for number in steps(trainer, 6):
                if number == 3 and world.rank in asked:
                    if env["launcher"] == "leaves":
                        leaves.touch()
                    os.kill(os.getpid(), signal.SIGTERM)
        except Stopped as stopped:
            saved = f"{stopped.saved} after {stopped.step}"
        expected, keeper = describe(trainer), trainer._saver.saving.memory._keeper
        trainer.close()
        if keeper is not None and leaves.exists():
            os.kill(keeper.pid, signal.SIGKILL)
        num_on_disk = len(list(Path(folder).glob("checkpoints/step-*")))
        world.barrier()
        again = build_trainer("dp_shard=2", asynchronous_saves=False)
        again.loader(Samples(), global_batch_size=8, name="train")
        if (first := again.resume(folder)) != 4 or describe(again) != expected:
            wrong.append(f"resumed at {first}")
        again.close()
    logging.getLogger("paceline").removeHandler(told)
    if num_on_disk != int("memory" not in saved):
        wrong.append(f"{num_on_disk} checkpoints after {saved}")
    text = "\n".join(record.getMessage() for record in told.buffer)
    world.node_rank, world.num_nodes = 0, 1
    return saved, gather(world, text)[0], wrong


_ELASTIC = {"nodes": "2", "TORCHELASTIC_RUN_ID": "x", "launcher": "leaves"}


def test_the_state_stays_in_memory_on_the_other_node(ranks: Pool, tmp_path: Path) -> None:
    for saved, text, wrong in ranks.run(leave, args=(str(tmp_path), (1,), _ELASTIC), timeout_s=60):
        assert wrong == []
        assert saved == "step 4 in memory, on nodes that stay after 4"
        assert "The last save took 50.0 s, and ranks that were asked to stop are killed within " in text
        assert "Step 4 is in memory instead, on nodes that stay. [PL565]" in text
        assert "All ranks ended after step 4 was copied, with copies of what rank 1 held" in text


@pytest.mark.parametrize(("asked", "nodes"), [((0, 1), "1"), ((0,), "2")])
def test_ranks_whose_launchers_all_stay_leave_their_state_in_memory(
    ranks: Pool, tmp_path: Path, asked: tuple[int, ...], nodes: str
) -> None:
    env = _ELASTIC | {"launcher": "stays", "nodes": nodes}
    for saved, text, wrong in ranks.run(leave, args=(str(tmp_path), asked, env), timeout_s=60):
        assert wrong == []
        assert saved == "step 4 in memory, on nodes that stay after 4"
        assert "All ranks ended after step 4 was copied; it is now" in text


@pytest.mark.parametrize(
    ("asked", "env", "why"),
    [
        ((1,), _ELASTIC | {"nodes": "1"}, "there is no other node"),
        ((0, 1), _ELASTIC, "no other node stays"),
        (
            (0,),
            _ELASTIC | {"launcher": "static"},
            "the other nodes do not go on (--nnodes MIN:MAX or --max-restarts)",
        ),
        (
            (0,),
            {name: value for name, value in _ELASTIC.items() if name != "TORCHELASTIC_RUN_ID"},
            "States cannot be kept in memory: no launcher started these ranks, so nothing would start them "
            "again",
        ),
    ],
)
def test_the_disk_is_tried_where_no_other_node_can_hold_the_state(
    ranks: Pool, tmp_path: Path, asked: tuple[int, ...], env: dict[str, str], why: str
) -> None:
    for saved, text, wrong in ranks.run(leave, args=(str(tmp_path), asked, env), timeout_s=60):
        assert wrong == []
        assert saved == f"{tmp_path}/checkpoints/step-00000004 after 4"
        assert f"The disk is tried anyway, because the state cannot stay in memory: {why}. [PL566]" in text


def test_a_save_that_fits_goes_to_the_disk_without_a_word(ranks: Pool, tmp_path: Path) -> None:
    for saved, text, wrong in ranks.run(
        leave, args=(str(tmp_path), (1,), _ELASTIC | {"PACELINE_GRACE_S": "3600"}), timeout_s=60
    ):
        assert wrong == []
        assert saved == f"{tmp_path}/checkpoints/step-00000004 after 4"
        assert "[PL56" not in text
