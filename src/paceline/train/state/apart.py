"""Saves and finds checkpoints if nodes have disks of their own: every file is on several of them.

Protocol of a save, all ranks together; the first rank of each disk leads it:

1. Leaders lock their folders and make temporary ones. Ranks write their files into the one that they see.
2. Ranks exchange sizes and hashes, and plan the same copies. Leaders send each other the files, and check the
   hashes of what arrives.
3. Rank 0's new rows of metrics go to all disks.
4. Leaders write the same manifest, which lists all files and their disks. When all have done so, each gives
   its folder its name, and when all have done so, each removes its old checkpoints.

If killed in step 4, some disks have the new checkpoint. It counts if together they have all files; otherwise
the one before it does, which is on all disks until every disk has the new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import CheckpointFolder, files
from paceline.checkpoint.commit import Save
from paceline.checkpoint.content.full import NAME as FULL
from paceline.checkpoint.content.protocol import write_files
from paceline.checkpoint.content.sharded import NAME as SHARDED
from paceline.checkpoint.copies import FileTransfer, Found, list_candidates, place_copies, plan_transfers
from paceline.checkpoint.hashed import FileRecord, hash_file
from paceline.checkpoint.manifest import BadManifestError, Manifest, NewerFormatError, read_manifest
from paceline.checkpoint.names import step_name
from paceline.checkpoint.tensors import FilePlan
from paceline.checkpoint.validity import check_loads, check_values, is_share, refuse_newer, verify
from paceline.errors import PacelineError
from paceline.phrases import join, name_some
from paceline.train.state.disks import Disks, name_rank, raise_any
from paceline.train.state.exchange import exchange
from paceline.train.state.same_model import check_one_run
from paceline.train.state.transfer import gather
from paceline.train.state.verified import share_out
from paceline.train.state.write import RunState, agree_on_share, caught, gather_full
from paceline.units import format_bytes
from paceline.world import World

log = logging.getLogger(__name__)

Holders = dict[str, set[int]]


def count_copies(wanted: int | str, disks: Disks) -> int:
    """Return the number of disks that each file is written to.

    Args:
        wanted: a number, or `"auto"`: two, or one if there is one disk.
        disks: of the run's folder.

    Raises:
        PacelineError: PL552 if there are fewer disks.
    """
    num_disks = len(disks.disks)
    if not isinstance(wanted, int):
        return min(2, num_disks)
    if wanted <= num_disks:
        return wanted
    where = "one folder, which all nodes see" if num_disks == 1 else f"{num_disks} disks"
    error = PacelineError(
        "PL552",
        saw=f"checkpoint.copies = {wanted}, and the run's folder is on {where}.",
        rule="Each copy of a file is on a disk of its own.",
        fix=f'Set checkpoint.copies = "auto", or at most {num_disks}, or start more nodes that have disks of '
        "their own.",
    )
    raise_any([error])
    raise AssertionError


def warn_of_single_copies(copies: int, disks: Disks) -> None:
    """Warn if a lost node takes files of the checkpoints with it that are nowhere else."""
    if copies > 1 or disks.is_common:
        return
    names = [disk.name for disk in disks.disks]
    log.warning(
        "checkpoint.copies = 1, and the run's folder is on %d disks (%s): each file of a checkpoint is on "
        "one of them. A lost node is lost work: without its files the run does not continue (PL555). Use "
        "checkpoint.copies = 2, or a folder that all nodes share. [PL558]",
        len(names),
        name_some(names),
    )


def write_apart(
    world: World,
    folder: CheckpointFolder,
    step: int,
    state: RunState,
    identity: dict[str, Any],
    *,
    disks: Disks,
    mode: str,
    copies: int,
    carry: Callable[[], None],
) -> Path:
    """Write a checkpoint and store each file on several disks; collective.

    Args:
        world: the ranks.
        folder: of the run, as this rank sees it.
        step: optimizer steps taken.
        state: of the run.
        identity: of the run; rank 0's counts.
        disks: of the run's folder.
        mode: the content, `"full"` or `"sharded"`.
        copies: disks per file.
        carry: brings the metrics to all disks; collective.

    Returns:
        The checkpoint's folder on this rank's disk.

    Raises:
        PacelineError: PL508 and PL510 as `CheckpointFolder.save`, with the rank and host; PL508 also where a
            file could not be copied.
    """
    plans: list[FilePlan] = []
    num_bytes = 0
    if mode == SHARDED:
        share = agree_on_share(world, state)
        plans, num_bytes = share.list_files(), share.num_bytes
    elif (whole := gather_full(world, state)) is not None:
        plans, num_bytes = whole.list_files(), whole.num_bytes
    with contextlib.ExitStack() as held:
        save: Save | None = None
        with caught() as found:
            if disks.leads:
                save = held.enter_context(folder.begin(step, num_bytes=num_bytes, identity=identity))
        named = (found.error and name_rank(world, found.error), save and save.folder.name, identity)
        begun = gather(world, named)
        raise_any(error for error, _, _ in begun)
        temporary = folder.path / str(begun[disks.disks[disks.own].ranks[0]][1])

        records: dict[str, FileRecord] = {}
        with caught() as found, folder.explained(step, num_bytes):
            records = write_files(plans, temporary)
        gathered = gather(world, (found.error and name_rank(world, found.error), records))
        raise_any(error for error, _ in gathered)
        listed = {name: one for _, written in gathered for name, one in written.items()}
        homes = {
            name: {_disk_of(disks, rank)} for rank, (_, written) in enumerate(gathered) for name in written
        }
        places = place_copies(listed, homes, [disk.domain for disk in disks.disks], copies)
        transfers = plan_transfers(listed, homes, places)
        failed = exchange(
            world, disks, transfers, listed, lambda name: temporary / name, lambda name: temporary / name
        )
        if failed:
            # As any other disk that refuses a save, so that the run may go on and try again.
            raise_any([_not_copied_error("PL508", disks, step, failed)])
        carry()
        names = {name: [disks.disks[disk].name for disk in held_by] for name, held_by in places.items()}
        manifest = Manifest(step, listed, begun[0][2], SHARDED if mode == SHARDED else FULL, names)
        for act in (
            lambda: folder.seal(temporary, manifest),
            lambda: folder.publish(step, temporary, manifest),
            lambda: folder.let_go(step),
        ):
            with caught() as found, folder.explained(step, num_bytes):
                if disks.leads:
                    act()
            raise_any(gather(world, found.error and name_rank(world, found.error)))
    return folder.path / step_name(step)


def find_apart(
    world: World, disks: Disks, folder: CheckpointFolder, *, copies: int
) -> tuple[Path, Manifest] | None:
    """Find the newest step whose files are each on some disk, and copy the files where they are needed.

    Collective. Ranks that read by themselves get all files; of a checkpoint of whole tensors rank 0's disk
    does. Each file is on `copies` disks afterwards, and broken ones are replaced.

    Args:
        world: the ranks.
        disks: of the run's folder.
        folder: of the run, as this rank sees it.
        copies: disks per file.

    Returns:
        The checkpoint's folder on this rank's disk, and its manifest; `None` if no disk has any checkpoint.

    Raises:
        PacelineError: PL555 if there are checkpoints and none is whole, PL319 if two disks have different
            checkpoints of one step, PL526 for checkpoints of several runs, PL504 for a newer format, PL554
            where a file could not be fetched.
    """
    own: list[Found] = []
    problems: list[str] = []
    with caught() as found:
        if disks.leads:
            own, problems = _look(folder)
    gathered = gather(world, (found.error and name_rank(world, found.error), problems))
    raise_any(error for error, _ in gathered)
    skipped = [problem for _, each in gathered for problem in each]
    on_disks = _gather_found(world, disks, own)
    if not any(on_disks) and not skipped:
        return None
    _check_one_history(disks, on_disks)
    for candidate, holders in list_candidates(on_disks):
        step = candidate.manifest.step
        if lacking := sorted(name for name, disks_with in holders.items() if not disks_with):
            skipped.append(f"step {step}: {name_some(lacking)} is on none of the disks")
            continue
        good, broken = _check_hashes(world, disks, folder, candidate, holders)
        if lacking := sorted(name for name, disks_with in good.items() if not disks_with):
            skipped.append(
                f"step {step}: {name_some(lacking)} was altered on {name_some(_name_disks(disks))}"
            )
            continue
        for text in skipped if world.is_main else ():
            log.warning("%s; going on from step %d", text, step)
        _bring(world, disks, folder, candidate, good, broken, copies)
        return folder.steps().get(step, folder.path / step_name(step)), candidate.manifest
    raise_any(
        [
            PacelineError(
                "PL555",
                saw=f"No step is whole in {folder.path} on {join(_name_disks(disks))}: {'; '.join(skipped)}.",
                rule="A run goes on from a step whose files are each on some node, and never starts again "
                "on its own.",
                fix="Start together with the nodes that have the missing files, or copy these files to one "
                "of these nodes. To start over, remove the run's folder on every node.",
            )
        ]
    )
    raise AssertionError


def _disk_of(disks: Disks, rank: int) -> int:
    return next(number for number, disk in enumerate(disks.disks) if rank in disk.ranks)


def _name_disks(disks: Disks) -> list[str]:
    return [disk.name for disk in disks.disks]


def _look(folder: CheckpointFolder) -> tuple[list[Found], list[str]]:
    """Return the checkpoints of this disk, and what is wrong with those that cannot be read."""
    found, problems = [], []
    for step, path in folder.steps().items():
        try:
            manifest = read_manifest(path)
        except NewerFormatError:
            refuse_newer(verify(path, read_all=False))
            raise AssertionError from None
        except BadManifestError as error:
            problems.append(f"the manifest of {path} {error}")
            continue
        if manifest.step != step:
            problems.append(f"{path} has the manifest of step {manifest.step}")
            continue
        there = frozenset(name for name, record in manifest.files.items() if _has_size(path / name, record))
        found.append(Found(manifest, manifest.digest(), there))
    return found, problems


def _gather_found(world: World, disks: Disks, own: list[Found]) -> list[list[Found]]:
    """Return what every disk has; collective. Each manifest travels once, however many disks have it."""
    short = [(each.digest, _pack(each)) for each in own]
    gathered = gather(world, short)
    manifests: dict[str, Manifest] = {}
    for leader in disks.leaders:
        for digest, _ in gathered[leader]:
            if digest not in manifests:
                mine = next((each.manifest for each in own if each.digest == digest), None)
                manifests[digest] = world.broadcast_object(mine, src=leader)
    return [
        [
            Found(manifests[digest], digest, _unpack(manifests[digest], bits))
            for digest, bits in gathered[leader]
        ]
        for leader in disks.leaders
    ]


def _pack(found: Found) -> int:
    """Return a bit for each file of the manifest in the order of names: whether it is there."""
    return sum(1 << place for place, name in enumerate(sorted(found.manifest.files)) if name in found.files)


def _unpack(manifest: Manifest, bits: int) -> frozenset[str]:
    return frozenset(name for place, name in enumerate(sorted(manifest.files)) if bits >> place & 1)


def _has_size(path: Path, record: FileRecord) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == record.num_bytes


def _check_one_history(disks: Disks, on_disks: list[list[Found]]) -> None:
    """Raise PL526 for checkpoints of several runs, PL319 for two of one step and start."""
    runs: dict[Path, str] = {}
    seen: dict[tuple[int, int], tuple[str, str]] = {}
    for disk, checkpoints in zip(disks.disks, on_disks, strict=True):
        for each in checkpoints:
            run = each.manifest.identity.get("run")
            if isinstance(run, str):
                runs[Path(f"{step_name(each.manifest.step)} on {disk.name}")] = run
    with caught() as found:
        check_one_run(runs, Path("The run's folder"))
    raise_any([found.error])
    for disk, checkpoints in zip(disks.disks, on_disks, strict=True):
        for each in checkpoints:
            key = each.manifest.step, each.generation
            digest, other = seen.setdefault(key, (each.digest, disk.name))
            if digest != each.digest:
                error = PacelineError(
                    "PL319",
                    saw=f"There are different checkpoints of step {key[0]} on {other} and on {disk.name}.",
                    rule="The nodes have trained two separate runs, and only one of them can continue.",
                    fix="Decide which one is right, and remove the run's folder on the other node.",
                )
                raise_any([error])


@dataclass(frozen=True)
class _Checked:
    """The findings of hashing on one disk.

    Attributes:
        good: files that are as they were written.
        broken: files that are there and are not.
    """

    good: frozenset[str]
    broken: frozenset[str]


def _check_hashes(
    world: World, disks: Disks, folder: CheckpointFolder, candidate: Found, holders: Holders
) -> tuple[Holders, Holders]:
    """Return the disks that have each file unchanged, and those that have something else of its name.

    The ranks of a disk share out its files, so each is hashed once.
    """
    names = candidate.manifest.files
    path = folder.steps().get(candidate.manifest.step)
    good: set[str] = set()
    broken: set[str] = set()
    ranks = disks.disks[disks.own].ranks
    sizes = {name: record.num_bytes for name, record in names.items() if disks.own in holders[name]}
    for name in share_out(sizes, len(ranks))[ranks.index(world.rank)]:
        is_good = False
        with contextlib.suppress(OSError):
            is_good = path is not None and hash_file(path / name) == names[name]
        (good if is_good else broken).add(name)
    if disks.leads and path is not None:
        broken |= {name for name in names.keys() - sizes.keys() if os.path.lexists(path / name)}
    gathered = gather(world, _Checked(frozenset(good), frozenset(broken)))
    by_disk = [
        _Checked(
            frozenset().union(*(gathered[rank].good for rank in disk.ranks)),
            frozenset().union(*(gathered[rank].broken for rank in disk.ranks)),
        )
        for disk in disks.disks
    ]
    return (
        {name: {disk for disk, each in enumerate(by_disk) if name in each.good} for name in names},
        {name: {disk for disk, each in enumerate(by_disk) if name in each.broken} for name in names},
    )


def _bring(
    world: World,
    disks: Disks,
    folder: CheckpointFolder,
    candidate: Found,
    good: Holders,
    broken: Holders,
    copies: int,
) -> None:
    """Complete a checkpoint on all disks that need it, from those that have its files; collective."""
    manifest = candidate.manifest
    readers = range(len(disks.disks)) if manifest.content == SHARDED else [0]
    places = place_copies(manifest.files, good, [disk.domain for disk in disks.disks], copies)
    wanted = {name: {*places[name], *broken[name], *readers} for name in manifest.files}
    lacking = {name for name in wanted if disks.own in wanted[name] - good[name]}
    with contextlib.ExitStack() as held:
        save: Save | None = None
        step, num_bytes = manifest.step, sum(manifest.files[name].num_bytes for name in lacking)
        with caught() as found, folder.explained(step, num_bytes):
            if disks.leads and lacking:
                save = held.enter_context(folder.begin(step, num_bytes=num_bytes, identity=manifest.identity))
                _check_space(folder, step, num_bytes)
                there = folder.steps().get(step)
                for name in manifest.files:
                    if disks.own in good[name]:
                        assert there is not None
                        _link(there / name, save.folder / name)
        raise_any(gather(world, found.error and name_rank(world, found.error)))
        _fetch(world, disks, folder, manifest, good, wanted, save)
        with caught() as found, folder.explained(step, num_bytes):
            if save is not None:
                folder.seal(save.folder, manifest)
                folder.publish(step, save.folder, manifest)
        raise_any(gather(world, found.error and name_rank(world, found.error)))
    with caught() as found:
        if disks.leads and (path := folder.steps().get(manifest.step)) is not None:
            findings = verify(path, read_all=False)
            if is_share(findings) and disks.own in readers:
                findings += check_loads(path, manifest) or check_values(path, manifest, manifest.files)
            for finding in findings:
                if not is_share([finding]):
                    raise PacelineError(finding.code, saw=finding.saw, rule=finding.rule, fix=finding.fix)
    raise_any(gather(world, found.error and name_rank(world, found.error)))


def _fetch(
    world: World,
    disks: Disks,
    folder: CheckpointFolder,
    manifest: Manifest,
    good: Holders,
    wanted: Mapping[str, Collection[int]],
    save: Save | None,
) -> None:
    """Fetch the files that are wanted; try another disk if one fails; collective."""
    having = {name: set(disks_with) for name, disks_with in good.items()}
    sources = {name: set(disks_with) for name, disks_with in good.items()}
    there = folder.steps().get(manifest.step, folder.path / step_name(manifest.step))
    failed: dict[FileTransfer, str] = {}
    while True:
        open_names = {name: set(wanted[name]) - having[name] for name in wanted}
        open_names = {name: targets for name, targets in open_names.items() if targets}
        if not open_names:
            return
        if any(not sources[name] for name in open_names):
            raise_any([_not_copied_error("PL554", disks, manifest.step, failed)])
        plan = plan_transfers(manifest.files, sources, {n: t | sources[n] for n, t in open_names.items()})

        def target(name: str) -> Path:
            assert save is not None
            return save.folder / name

        failed = exchange(world, disks, plan, manifest.files, lambda name: there / name, target)
        for each in plan:
            if each in failed:
                sources[each.name].discard(each.source)
            else:
                having[each.name].add(each.target)


def _check_space(folder: CheckpointFolder, step: int, num_bytes: int) -> None:
    """Raise PL508 before anything is fetched that the disk cannot hold."""
    free = files.free_bytes(folder.path)
    if num_bytes > free:
        raise PacelineError(
            "PL508",
            saw=f"The disk is full: step {step} lacks {format_bytes(num_bytes)} in {folder.path}, and "
            f"{format_bytes(free)} are free.",
            rule="The files of a checkpoint that are on other nodes are fetched before it is read.",
            fix="Free space, or choose an --out on another disk.",
        )


def _link(old: Path, new: Path) -> None:
    """Link a file to a second name, or copy it if the disk has no links."""
    try:
        os.link(old, new)
    except OSError:
        with files.DurableFile(new) as file, open(old, "rb") as stream:
            while chunk := stream.read(files.CHUNK_BYTES):
                file.write(chunk)


def _not_copied_error(
    code: str, disks: Disks, step: int, failed: Mapping[FileTransfer, str]
) -> PacelineError:
    each, problem = next(iter(sorted(failed.items(), key=lambda item: item[0].name)))
    source, target = disks.disks[each.source].name, disks.disks[each.target].name
    return PacelineError(
        code,
        saw=f"{each.name} of step {step} could not be copied from {source} to {target}: {problem}"
        + (f" ({len(failed)} copies failed)." if len(failed) > 1 else "."),
        rule="A checkpoint counts only if each of its files is on as many disks as checkpoint.copies "
        "requires.",
        fix="Free space or correct the disk on that node; earlier checkpoints are unchanged.",
    )
