"""Finds out whether a folder is on a file system that other machines share."""

from __future__ import annotations

from pathlib import Path

import psutil

# The names of Linux for file systems that several machines mount.
_SHARED = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"),
    *("orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs"),
    *("fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
}


def find_network_disk(folder: Path) -> str | None:
    """Return the kind and source of the shared file system that holds a folder, or None if none does."""
    place = folder.absolute()
    mounts = [entry for entry in psutil.disk_partitions(all=True) if place.is_relative_to(entry.mountpoint)]
    if not mounts:
        return None
    # Of several at one place, the last one is seen.
    found = max(enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]))[1]
    return f"{found.fstype}: {found.device}" if found.fstype in _SHARED else None
