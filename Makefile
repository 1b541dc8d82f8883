# make env     .venv with everything pinned in requirements.lock; does nothing the second time
# make train   train the small GPT on 2 ranks, on the text of Python's standard library
# make test    the tests except those marked slow or chaos, in three processes
# make test-slow   the tests marked slow: more layouts, planted faults, compilers; ARGS="-m sibling" for those of tests/slow.txt
# make test-torch TORCH=2.11.0   the tests of `make test` on another torch, in a separate environment (some GB);
#              without ARGS their counts become a row of docs/tables/torch.md
# make test-torch-table   all of TORCHES with all of PYTHONS; takes hours, and about 6 GB of disk per pair
# make chaos   kill processes of real runs a hundred times and compare the bits: about half an hour
# make chaos-launcher   `paceline run` under restarts, kills, Ctrl-C and on two nodes: tests/chaos/launcher.txt
# make chaos-nodes   seconds without a step where nodes are killed, cut off, stopped and come back: tests/chaos/nodes.txt
# make hangs   87 faulty and 27 healthy scripts under the watch, each with its expected verdict: docs/tables/hangs.md
# make gpu     what one GPU can show, in at most 9 minutes: docs/tables/gpu.md; PYTHON is one whose torch has CUDA,
#              RANKS=2 adds NCCL between cards, ARGS="--device cpu --tiny" tries it without a GPU
# make check   format, lint, types, layers
# make bench   the speed tables, beside other libraries (in a separate environment)
# make docs    the generated parts of docs/
# make site    the documents as a site with search: build/site/docs/index.html, opened from disk
# make clean   remove what the commands above left behind, except runs/
#
# Settable: PYTHON=python3.12   the Python that environments are made with
#           TORCH, TORCHES, PYTHONS   for test-torch and test-torch-table: TORCHES="2.11.0 2.13.0" PYTHONS=python3.12
#           ARGS="..."          further arguments of train, test, test-slow, test-torch, chaos and hangs (ARGS="--set train.steps=20",
#                               ARGS="-k recipe", ARGS="--kills 10 --seed 7", ARGS="--only B --jobs 1")

PYTHON ?= python3
ARGS ?=
RANKS ?= 1
TORCH ?= 2.11.0
TORCHES ?= 2.11.0 2.12.0 2.13.0
PYTHONS ?= python3.11 python3.12 python3.13

.PHONY: help env env-bench train test test-slow test-torch test-torch-table chaos chaos-launcher chaos-nodes hangs gpu check bench docs site clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

env:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Name a Python 3.11 or later: make env PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) tools/build_env.py .venv requirements.lock

# The peers have an environment of their own: what they install must neither change a version that we
# are tested with nor hide that a dependency of ours is missing.
env-bench:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Name a Python 3.11 or later: make env-bench PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) tools/build_env.py .venv-bench requirements.lock requirements-bench.lock

train: env
	.venv/bin/paceline train recipes/gpt-stdlib.toml --nproc 2 $(ARGS)
	.venv/bin/paceline bench scaling recipes/gpt-stdlib.toml --ranks 1,2 --repeats 1

test: env
	.venv/bin/python tools/run_tests.py -m "not slow and not chaos" $(ARGS)

test-slow: env
	.venv/bin/python tools/run_tests.py -m "slow and not chaos" $(ARGS)

test-torch:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Name a Python 3.11 or later: make test-torch PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) tools/run_on_torch.py $(TORCH) $(ARGS)

# Goes on after a pair with failed tests, whose row says how many; ends with the worst exit code.
test-torch-table:
	@worst=0; for torch in $(TORCHES); do for python in $(PYTHONS); do \
	    $$python tools/run_on_torch.py $$torch || worst=1; \
	done; done; cat docs/tables/torch.md; exit $$worst

chaos: env
	.venv/bin/python -m tests.chaos.run $(ARGS)

chaos-launcher: env
	.venv/bin/python -m tests.chaos.launcher $(ARGS)

chaos-nodes: env
	.venv/bin/python -m tests.chaos.nodes $(ARGS)

hangs: env
	.venv/bin/python -m tests.watch.run $(ARGS)

gpu:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) benchmarks/gpu/run.py --ranks $(RANKS) $(ARGS)

check: env
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest tests/test_layers.py

bench: env-bench
	.venv-bench/bin/paceline bench scaling recipes/gpt-stdlib.toml
	.venv-bench/bin/paceline bench overhead recipes/gpt-stdlib.toml
	PATH="$(CURDIR)/.venv-bench/bin:$$PATH" benchmarks/step_time/run.sh
	PATH="$(CURDIR)/.venv-bench/bin:$$PATH" benchmarks/exact_reduction/run.sh
	PATH="$(CURDIR)/.venv-bench/bin:$$PATH" benchmarks/saving/run.sh
	.venv-bench/bin/python benchmarks/layouts/run.py
	.venv-bench/bin/python benchmarks/foreign_models/run.py
	.venv-bench/bin/python benchmarks/watching/run.py
	.venv-bench/bin/python benchmarks/recording/run.py

docs: env
	.venv/bin/python docs/generate.py

site:
	@$(PYTHON) tools/build_env.py .venv-docs requirements.lock requirements-docs.lock
	.venv-docs/bin/python -m sphinx -q -W --keep-going -c docs -b html . build/site
	@echo build/site/docs/index.html

clean:
	rm -rf .venv .venv.lock .venv-bench .venv-bench.lock .venv-docs .venv-docs.lock .venv-torch-* build bench-out .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests docs tools $(wildcard benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
