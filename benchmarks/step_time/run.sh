#!/bin/sh
# Everything in README.md: about half an hour on 2 cores. Arguments are those of run.py.
exec python "$(dirname "$0")/run.py" "$@"
