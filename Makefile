# Two commands are enough: `make demo` and `make test`.  Each sets up its own .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS ?= .venv-extras
# One a core, at most 16, and 3 GB of memory for each; two cores are the least that is tested.
WORKERS ?= $(shell $(PYTHON) tests/workers.py)
# One thread a worker: two OpenMP pools on two cores wait for each other, and burn both.  Files go to
# workers whole, those that took longest first (tests/seconds.json).
TESTS   = OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests ptxsim/tests -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Without a target `make` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo test nightly nightly-extras check pins compile certify certificates bench profile docs map \
        gpu-test wheel matrix format clean

setup: $(STAMP)

# Reinstalled when a pin or the package's metadata changes; a second run starts at once.
$(STAMP): pyproject.toml setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the tested pins into $(VENV) (a minute or two, once) ..."
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m cute_kernels demo

test: $(STAMP)
	$(TESTS) -m "not gpu and not nightly"

# Cross products, and all that is left out of `test` because it was proved on these files.
nightly: $(STAMP)
	$(TESTS) -m "nightly and not gpu"

# The tests that need trl, peft, accelerate, datasets and deepspeed, in an environment with them.
nightly-extras: $(EXTRAS)/.installed
	OMP_NUM_THREADS=1 $(EXTRAS)/bin/python -m tests.extras

# deepspeed's setup asks for torch, and for nothing to be compiled.
$(EXTRAS)/.installed: pyproject.toml setup.py constraints.txt
	@test -x $(EXTRAS)/bin/python || $(PYTHON) -m venv $(EXTRAS)
	@echo "Installing the tested pins of all extras into $(EXTRAS) (minutes, once) ..."
	@$(EXTRAS)/bin/pip install --disable-pip-version-check -c constraints.txt torch pytest
	@DS_BUILD_OPS=0 $(EXTRAS)/bin/pip install --disable-pip-version-check -c constraints.txt \
		-e ".[trl,deepspeed,demo]"
	@touch $(EXTRAS)/.installed

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# `make pins PYTHONS="python3.10 python3.12"` asks pip instead: minutes each.
pins: $(STAMP)
	$(BIN)/python tools/pins.py $(if $(PYTHONS),--pip $(PYTHONS))

compile: $(STAMP)
	$(BIN)/python -m cute_kernels aot --arch sm_90a -o build/aot

certify: $(STAMP)
	$(BIN)/python -m verify -o certify $(if $(ONLY),--only $(ONLY))

# After a change of a kernel: proves the catalogue, then stores its hashes with the digest of its
# sources.  Until then `make test` compiles all of it.
certificates: certify
	$(BIN)/python -m perf report

bench: $(STAMP)
	$(BIN)/python -m perf bench gemm

profile: $(STAMP)
	$(BIN)/python -m perf profile gemm --shape qkv

# The floors and rooms of the house, their lines, and who imports whom.
map: $(STAMP)
	@$(BIN)/python tools/map.py

docs: $(STAMP)
	$(BIN)/python -m perf report
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

gpu-test: $(STAMP)
	$(BIN)/python -m pytest tests -q -m gpu

wheel: $(STAMP)
	$(BIN)/python tools/check_wheel.py

# Nightly: torch as old as we declare and as new as there is, transformers as old as we declare; 18 GB
# on disk with default builds.  `make matrix LEGS=--transformers`: that leg alone.
matrix: $(STAMP)
	$(BIN)/python tools/matrix.py $(if $(TORCH),--torch $(TORCH)) $(LEGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

help:
	@echo "demo test nightly      run the demo; the tests; the long tests"
	@echo "check pins format      lint and layout; version bounds; format the code"
	@echo "compile certify        compile every kernel; check its machine code"
	@echo "certificates           write new certificates"
	@echo "bench profile gpu-test measure; profile; test (need a GPU)"
	@echo "docs wheel matrix      build the docs; a wheel; test other versions"
	@echo "map                    print the house: floors, rooms, lines, imports"
	@echo "setup clean            make .venv; delete what was built"

clean:
	rm -rf build certify docs/_build demo_output
