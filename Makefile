# Thin entry points; the work is in scripts/.
#   make serve [MODEL=folder|file.gguf|hub-id] [PORT=8000] [HOST=127.0.0.1] [ARGS="--max-num-seqs 8 …"]
#   make test  [ARGS="tests/core -k scheduler"]
#   make check            formatting, lint, types and the fast tests
#   BACKEND=cpu|cuda12|cuda13|metal and PYTHON=python3.12 override what is detected.

PYTHON ?=
BACKEND ?= auto
MODEL ?=
PORT ?=
HOST ?=
ARGS ?=
export PYTHON BACKEND

.PHONY: help serve test check lint doctor
help:
	@sed -n '2,6s/^# *//p' Makefile

serve:
	@scripts/serve $(MODEL) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

test:
	@scripts/test --models $(ARGS)

check: lint
	@scripts/test -m "not slow" $(ARGS)

lint:
	@scripts/lint

doctor:
	@scripts/doctor
