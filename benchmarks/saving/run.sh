#!/bin/sh
# Everything in README.md: about two hours on 2 cores, which should do nothing else. Arguments are those of run.py.
exec python "$(dirname "$0")/run.py" "$@"
