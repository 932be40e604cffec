# One command each, on a fresh clone: whatever is missing is installed first, into an environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test test-unit test-clients lint venv

serve: venv
	$(BIN)/lockstep serve

# A worker per core; the tests of one file stay together, since they share a server.
test: venv
	$(BIN)/python -m pytest -n auto --dist loadfile

# What has no unit test is not even read, which would take seconds: schemathesis makes up its calls while collected.
UNREAD := tests/e2e tests/cases tests/scheduler/serve/test_schemathesis.py

test-unit: venv
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not e2e" -p no:schemathesis $(addprefix --ignore=,$(UNREAD))

# Other people's clients against a real server. Each has an environment of its own, made from tests/real_clients; those
# that are libraries bring their own pytest, those that are commands are run by ours.
CLIENTS := $(VENV)-clients
CLIENT_TESTS := tests/real_clients
LIBRARIES := $(addprefix $(CLIENT_TESTS)/test_,openai.py langchain_openai.py litellm.py llm.py pydantic_ai.py)
COMMANDS := $(addprefix $(CLIENT_TESTS)/test_,node.py vllm_router.py aiperf.py)
run_clients = SERVER_PYTHON=$(abspath $(BIN))/python CLIENTS=$(abspath $(CLIENTS)) $(1) -m pytest -c $(CLIENT_TESTS)/pytest.ini

test-clients: venv $(addprefix $(CLIENTS)/,$(addsuffix /.installed,libraries instructor vllm-router aiperf)) $(CLIENT_TESTS)/node/.installed
	$(call run_clients,$(CLIENTS)/libraries/bin/python) $(LIBRARIES)
	$(call run_clients,$(CLIENTS)/instructor/bin/python) $(CLIENT_TESTS)/test_instructor.py
	$(call run_clients,$(BIN)/python) $(COMMANDS)

$(CLIENTS)/%/.installed: $(CLIENT_TESTS)/requirements/%.txt | venv
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-compile --requirement $<
	touch $@

$(CLIENT_TESTS)/node/.installed: $(CLIENT_TESTS)/node/package.json $(CLIENT_TESTS)/node/package-lock.json
	cd $(@D) && npm ci --no-audit --no-fund
	touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(VENV)/.installed

# pip reads dependency groups since 25.1; the one that comes with Python may be older. setuptools warns of every
# editable install that names may be shadowed by folders of the working directory: here they are those folders.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@
