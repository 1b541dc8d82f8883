"""Verifies checkpoints in a folder that all ranks see: each file is hashed once, by one of the ranks.

Protocol for one checkpoint, all ranks together:

1. Rank 0 checks the manifest, and that all files are there with their sizes.
2. Ranks report whether they see the same manifest. Those that do share out the files, by size.
3. Each hashes its files. Rank 0 hashes those that another rank could not read.
4. If all hashes are right, rank 0 loads everything but the tensors.
5. If that is possible, each rank looks for weights that are no numbers in its files.

All ranks get the same findings, those of `checkpoint.verify`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.load import no_valid_error, warn_of_skip
from paceline.checkpoint.manifest import BadManifestError, Manifest, OtherFormatError, read_manifest
from paceline.checkpoint.validity import (
    check_hash,
    check_loads,
    check_values,
    is_usable,
    refuse_other_format,
    verify,
)
from paceline.finding import Finding
from paceline.train.state.transfer import gather, raise_any, run_on_main
from paceline.train.state.write import caught
from paceline.world import World


class SharedVerification:
    """The checks of a start; all methods are collective.

    Args:
        checkpoints: of the run, in a folder that all ranks see.
    """

    def __init__(self, world: World, checkpoints: CheckpointFolder) -> None:
        self._world = world
        self._folder = checkpoints

    def find_newest(self) -> Path | None:
        """Return the newest valid checkpoint, as this rank names it; `None` if there is no checkpoint at all.

        Rank 0 logs newer ones that are not valid.
        """
        skipped: list[tuple[Path, list[Finding]]] = []
        for name in run_on_main(
            self._world, lambda: [path.name for path in reversed(self._folder.steps().values())]
        ):
            path, findings = self._folder.path / name, self._verify(name)
            if is_usable(findings):
                return path
            skipped.append((path, findings))
            if self._world.is_main:
                warn_of_skip(path, findings)
        if skipped:
            raise_any([no_valid_error(self._folder.path, skipped)])
        return None

    def _verify(self, name: str) -> list[Finding]:
        world, path = self._world, self._folder.path / name
        findings, digest = run_on_main(world, lambda: (verify(path, read_all=False), _digest(path)))
        if is_usable(findings):
            findings = [*self._hash(path, digest), *findings]
        with caught() as found:
            refuse_other_format(findings)
        raise_any([found.error])
        return findings

    def _hash(self, path: Path, digest: str) -> list[Finding]:
        """Return what is wrong with the bytes of a checkpoint's files."""
        world = self._world
        readers = [rank for rank, sees in enumerate(gather(world, _digest(path) == digest)) if sees]
        own: list[Finding] = []
        unread: list[str] = []
        own_files: list[str] = []
        manifest: Manifest | None = None
        if world.rank in readers:
            manifest = read_manifest(path)
            sizes = {name: record.num_bytes for name, record in manifest.files.items()}
            own_files = share_out(sizes, len(readers))[readers.index(world.rank)]
            for name in own_files:
                finding = check_hash(path, manifest, name)
                if finding is not None and finding.code == "PL500" and not world.is_main:
                    unread.append(name)
                elif finding is not None:
                    own.append(finding)
        gathered = gather(world, (own, unread))

        def complete() -> list[Finding]:
            found = [finding for findings, _ in gathered for finding in findings]
            for name in (name for _, names in gathered for name in names):
                if (finding := check_hash(path, read_manifest(path), name)) is not None:
                    found.append(finding)
            found.sort(key=lambda finding: finding.where)
            return found or check_loads(path)

        if found := run_on_main(world, complete):
            return found
        own = [] if manifest is None else check_values(path, own_files)
        return [finding for findings in gather(world, own) for finding in findings]


def share_out(sizes: Mapping[str, int], num: int) -> list[list[str]]:
    """Divide files among so many ranks: the largest first, each to the rank with the fewest bytes so far."""
    found: list[list[str]] = [[] for _ in range(num)]
    taken = [(0, place) for place in range(num)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        num_bytes, place = heapq.heappop(taken)
        found[place].append(name)
        heapq.heappush(taken, (num_bytes + sizes[name], place))
    return found


def _digest(path: Path) -> str:
    """Return the digest of a checkpoint's manifest, "" if it cannot be used."""
    try:
        return read_manifest(path).digest()
    except (BadManifestError, OtherFormatError):
        return ""
