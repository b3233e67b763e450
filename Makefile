# make demo | make recipe-toy | make test | make test-all | make bench. Each makes .venv itself when it is absent.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN = .venv/bin
DEMO_OUTPUT ?= demo-output
RECIPE_OUTPUT ?= recipe-toy-output
SLOW = slow or smollm2 or distributed or browser or upstream

demo: .venv/.train
	$(BIN)/looped demo $(DEMO_OUTPUT)

recipe-toy: .venv/.train
	$(BIN)/python -m modeling_looped.recipes.grow_cooldown_loop $(RECIPE_OUTPUT)

test: .venv/.test
	$(BIN)/python -m pytest -n auto -m "not ($(SLOW))"

test-all: .venv/.test
	$(BIN)/python -m pytest

bench: .venv/.test
	$(BIN)/python tests/bench.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.train: .venv/bin/python setup.cfg constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[train,eval]"
	touch $@

.venv/.test: .venv/bin/python setup.cfg constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[train,eval,scaling,diagnostics,gguf,peft,docs,test]"
	touch $@ .venv/.train

.PHONY: demo recipe-toy test test-all bench
