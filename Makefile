# Every command for people and for CI. `make help` lists what there is.
comma := ,
space := $(subst ,, )
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
# Two small targets fit into minutes on two cores; a larger one gets the papers' full setting.
ifneq ($(filter $(MODEL),smollm2-135m gemma3-270m),)
LIMIT ?= 4
TOKENS ?= 24
endif
LIMIT ?= null
TOKENS ?= 1024
ifeq ($(MODEL),smollm2-135m)
# those that copy, and every trained one with the tree that fits this machine; one with its paper's tree beside them
NEWER := $(foreach d,hydra clover2 eagle3 mtp dflash,$(if $(wildcard drafters/weights/$(MODEL)/$(d)/model.safetensors),$(d)_fitted))
DRAFTERS ?= suffix,prompt_lookup,vanilla_fitted,medusa_fitted,eagle2_fitted,hass_fitted,coral_fitted,beagle_fitted,moa_fitted$(subst $(space),,$(addprefix $(comma),$(NEWER))),eagle2
else ifeq ($(MODEL),gemma3-270m)
DRAFTERS ?= none,vanilla,eagle2,prompt_lookup,eagle2_fitted
BRIEF ?= vanilla,eagle2# trained a little before the benchmark, for none are shipped
else
# what was trained here, and what the target's configuration knows to be published
HAVE := $(filter-out medusa2,$(notdir $(patsubst %/model.safetensors,%,$(wildcard drafters/weights/$(MODEL)/*/model.safetensors))))# its target is another
HAVE += $(shell sed -n '/^published:/,/^[a-z]*:/s/^  \([a-z0-9_]*\):.*/\1/p' conf/model/$(MODEL).yaml 2>/dev/null)
DRAFTERS ?= none,prompt_lookup,suffix,token_recycling$(subst $(space),,$(addprefix $(comma),$(sort $(HAVE))))
endif
ARMS := $(if $(filter all null,$(DRAFTERS)),null,[$(DRAFTERS)])# DRAFTERS=all: every arm of the study that has its weights
MEMORY ?= 0# measure peak memory so many times, in processes of their own
DATASETS ?= mtbench
RESULTS ?= results/local
TRAIN ?= vanilla,eagle2,medusa,beagle,moa,hydra,clover2,eagle3,mtp,dflash,hass,coral,eagle2_router,coral_router
ALIGNED := hass coral# of TRAIN after the others: with SCALE=small they go on from eagle2's weights
ROUTERS := %_router# after these
SCALE ?= small
MISSING ?= true# false: train anew what is there
OVERWRITE := $(if $(filter false,$(MISSING)),train.overwrite=true)
MINUTES ?= 120
KIND ?= null
STUDIES ?=
DATA ?= null# a folder with <dataset>.jsonl
JOBS ?= $(if $(filter gpu,$(SCALE)),4,1)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CHECKED := $(VENV)/.checked

CHOSEN = $(subst $(comma), ,$(TRAIN))
# $(call train_each,NAMES,SCALE): train these drafters, JOBS at once
train_each = $(if $(1),@echo $(1) | xargs -P $(JOBS) -n 1 sh -c '$(BIN)/python -m specbench.train \
	model=$(MODEL) train=$(2) drafter=$$0 train.missing=$(MISSING) $(OVERWRITE) || exit 255')

.DEFAULT_GOAL := help
.PHONY: help install bench evidence plan report train test lint format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12
	@echo 'variables: MODEL=$(MODEL) SCALE=$(SCALE) JOBS=$(JOBS) DRAFTERS=$(DRAFTERS) DATASETS=$(DATASETS) LIMIT=$(LIMIT) TOKENS=$(TOKENS)'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $(READY)

$(CHECKED): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,medusa2,slurm,ray]'
	@touch $(CHECKED)

install: $(READY) ## create the virtual environment, once

bench: $(READY) ## decode MODEL with a choice of drafters beside the baseline (DRAFTERS=all: every one), report
	@[ "$(origin DRAFTERS)" != file ] || echo "A default choice of drafters; DRAFTERS=all measures every one, DRAFTERS=a,b these two."
	$(if $(BRIEF),$(BIN)/python -m specbench.train -m model=$(MODEL) drafter=$(BRIEF) train=brief train.missing=true)
	$(if $(BRIEF),$(BIN)/python -m specbench.train model=$(MODEL) train=brief train.until=vocabulary)
	@status=0; $(BIN)/python -m specbench.study study=bench cells=[0] model=$(MODEL) arms=$(ARMS) \
		datasets=[$(DATASETS)] \
		data.limit=$(LIMIT) decode.max_new_tokens=$(TOKENS) memory=$(MEMORY) trace=1 || status=$$?; \
	if [ -d results/local/bench/$(MODEL) ]; then $(BIN)/python -m specbench.report show=false; fi; exit $$status

evidence: $(READY) ## measure what the plan of all studies lacks: MINUTES, KIND=replayed|trained|timed, STUDIES=a,b
	$(BIN)/python -m specbench.evidence minutes=$(MINUTES) kind=$(KIND) studies=$(if $(STUDIES),[$(STUDIES)],null) \
		data=$(DATA)

plan: $(READY) ## what every study plans, what of it is there, and how long the rest takes
	$(BIN)/python -m specbench.evidence plan=true kind=$(KIND) studies=$(if $(STUDIES),[$(STUDIES)],null)

report: $(READY) ## tables, figures, claims and report.html from the rows in RESULTS
	$(BIN)/python -m specbench.report results=$(RESULTS)

train: $(READY) ## corpus, drafters and routers that MODEL has no weights for, JOBS at once; SCALE=gpu, MISSING=false
	$(call train_each,$(filter-out $(ALIGNED) $(ROUTERS),$(CHOSEN)),$(SCALE))
	$(call train_each,$(filter $(ALIGNED),$(CHOSEN)),$(SCALE))
	$(call train_each,$(filter $(ROUTERS),$(CHOSEN)),router)
	$(BIN)/python -m specbench.report training=drafters/weights/$(MODEL)

test: $(CHECKED) ## the whole test-suite, a file at a time on every core
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations=30

lint: $(CHECKED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(CHECKED) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and caches, keep results
	rm -rf $(VENV) *.egg-info .ruff_cache .mypy_cache .pytest_cache .hypothesis
