"""No container engine runs the Dockerfile here; what can be held to the code without one is."""

import re
import tomllib
from pathlib import Path

import pytest

from clients.serve import ENV_PREFIX, FIELDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COPIED = [source for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for source in line.split()]


def test_all_that_the_build_needs_is_copied():
    project = PROJECT["project"]
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert {"pyproject.toml", project["readme"], *project["license-files"], *packages} == set(COPIED)
    assert all((ROOT / source).exists() for source in COPIED)


def test_what_is_copied_is_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == set(COPIED)


def test_the_extras_exist():
    (extras,) = re.findall(r"/src\[(.*?)\]", TEXT)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("variable", re.findall(rf"{ENV_PREFIX}(\w+)=", TEXT))
def test_every_variable_is_one_the_server_reads(variable):
    assert variable.lower() in FIELDS


def test_the_port_is_the_servers_own():
    port = FIELDS["port"].default
    assert f"EXPOSE {port}\n" in TEXT
    assert f"http://127.0.0.1:{port}/health" in TEXT
