"""The settings that would have fitted, from accounts alone."""

from __future__ import annotations

from dataclasses import replace

from paceline.memory.account import Account, BatchTensor, Holder, ModelState, ModuleMemory, Progress, Steps
from paceline.memory.account_words import describe
from paceline.memory.advice import MemorySettings, estimate_need, list_remedies
from paceline.memory.causes import find_cause, find_growth

GB = 1 << 30
FULL = Account(
    rank=1,
    time_s=0.0,
    limit_kind="cgroup",
    limit=10 * GB,
    used=9 * GB,
    total=9 * GB,
    kinds={
        "parameters": GB,
        "gradients": GB // 2,
        "optimizer": 2 * GB,
        "activations": 4 * GB,
        "base": 3 * GB // 2,
    },
    modules=(ModuleMemory("blocks.0.attn", "Attention", 3 * GB),),
    batch=(BatchTensor("x", (16, 512), "int64", 65536),),
    steps=Steps(count=4, peak=9 * GB, first=5 * GB, last=5 * GB),
    progress=Progress("train.py:9 in train", "blocks.3", "Block", "forward", 0.5, has_graph=True),
    model=ModelState(GB, 2 * GB, "blocks", 8, 4 * GB, 4 * GB, largest_module=GB // 8),
    num_ranks=2,
)


def test_a_forward_that_is_half_through_needs_twice_its_activations() -> None:
    need = estimate_need(FULL)
    assert need.activations == 8 * GB
    assert need.state == 7 * GB // 2
    assert need.total == 13 * GB


def test_a_forward_without_a_graph_needs_no_more() -> None:
    alone = replace(FULL, progress=replace(FULL.progress, has_graph=False))
    assert estimate_need(alone).activations == 4 * GB
    assert "recompute" not in [one.name for one in list_remedies(alone)]


def test_optimizer_state_that_does_not_exist_yet_is_needed() -> None:
    early = replace(FULL, kinds={"parameters": GB, "activations": GB}, total=2 * GB)
    assert estimate_need(early).state == 3 * GB


def test_the_largest_microbatch_that_fits_is_named() -> None:
    remedies = {one.name: one for one in list_remedies(FULL)}
    # A quarter of 8 GiB and what they may take in passing fit beside 5 GiB into 9.5 GiB.
    assert (
        remedies["microbatch"].words
        == "microbatches of 4 samples in place of 16 (microbatch_size), their gradients added up"
    )
    assert remedies["microbatch"].saves == 11 * GB // 2
    assert remedies["microbatch"].fits
    assert remedies["recompute"].saves == int(8 * GB * 7 / 8 * 7 / 8)
    assert remedies["bf16"].saves == 4 * GB
    assert not remedies["dp_shard"].fits
    assert remedies["dp_shard"].saves == 7 * GB // 4 - 4 * GB // 8, "half of the state, less four blocks"
    assert "offload" not in remedies


def test_settings_that_are_known_are_not_proposed() -> None:
    found = list_remedies(FULL, MemorySettings(4, recomputes=True, dtype="bf16", dp=4))
    words = {one.name: one.words for one in found}
    assert words["microbatch"].startswith("microbatches of 1 samples in place of 4 (microbatch_size)")
    assert words["dp_shard"] == "layout dp_shard=4, or fully_shard over 4 ranks"
    assert not {"recompute", "bf16"} & words.keys()


def test_a_device_can_offload() -> None:
    assert "offload" in [one.name for one in list_remedies(replace(FULL, limit_kind="device"))]


def test_a_list_that_keeps_graphs_comes_first() -> None:
    holder = Holder("losses", "train.py:9 in train", 4 * GB, 40, graphs=39)
    leaking = replace(
        FULL,
        kinds={"parameters": GB, "kept graphs": 4 * GB, "activations": GB},
        total=6 * GB,
        holders=(holder,),
    )
    assert find_cause(leaking) == "kept graphs"
    first = list_remedies(leaking)[0]
    assert (first.name, first.saves) == ("release", 4 * GB)
    assert "losses in train.py:9 in train keeps 39 of them" in describe(leaking)


def test_growth_is_told_from_a_larger_step() -> None:
    assert find_growth(replace(FULL, steps=Steps())) == "no steps"
    assert find_growth(replace(FULL, steps=Steps(1, GB, GB, GB))) == "first step"
    assert find_growth(FULL) == "none"
    assert find_growth(replace(FULL, steps=Steps(4, 5 * GB, 5 * GB, 5 * GB))) == "jump"
    assert find_growth(replace(FULL, steps=Steps(102, 8 * GB, 2 * GB, 8 * GB))) == "leak"


def test_the_words_have_all_parts() -> None:
    text = describe(FULL)
    assert "[PL914]" in text
    assert text.startswith(
        "Activations filled the memory at train.py:9 in train: 4.0 GiB, most of it in blocks.0.attn"
    )
    for part in (
        "2.0 GiB  optimizer state",
        "3.0 GiB  blocks.0.attn (Attention)",
        "10.0 GiB, the limit of its cgroup",
    ):
        assert part in text, text
    assert "A whole step needs about 13.0 GiB, 3.5 GiB too much." in text
