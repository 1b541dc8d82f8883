#!/bin/sh
# Installs the real launchers that some tests run against (Debian, Ubuntu); those tests skip without them.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends openmpi-bin munge slurm-wlm slurm-client etcd-server
