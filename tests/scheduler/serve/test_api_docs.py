"""docs/api.md tells users everything there is, and its tables are those of the running server."""

import re
from pathlib import Path

import msgspec
import pytest

import scheduler.serve
from scheduler.serve.http.docs.openapi import REFUSALS
from scheduler.serve.http.docs.tables import Tables
from scheduler.serve.http.routes import routing_table
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.generation import StreamOptions

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "api.md").read_text()
SOURCES = [path for part in ("http", "wire") for path in (Path(scheduler.serve.__path__[0]) / part).rglob("*.py")]


def test_its_tables_are_current():
    assert Tables().renewed(TEXT) == TEXT, "python -m scheduler.serve.http.docs.tables docs/api.md"


@pytest.mark.parametrize("route", routing_table(), ids=lambda route: f"{route.method} {route.path}")
def test_it_names_every_path(route):
    path = re.sub(r":[^}]*", "", route.path)
    assert f"`{route.method} {path}`" in TEXT


@pytest.mark.parametrize(
    "struct",
    [StreamOptions, *dict.fromkeys(route.takes for route in routing_table() if route.takes)],
    ids=lambda struct: struct.__name__,
)
def test_it_names_every_field_of_every_request(struct):
    names = [field.encode_name for field in msgspec.structs.fields(struct)]
    assert [name for name in names if f"`{name}`" not in TEXT] == []


@pytest.mark.parametrize("struct", dict.fromkeys(r.takes.__name__ for r in routing_table() if r.takes))
def test_every_request_has_a_table(struct):
    assert f"<!-- asked {struct} -->" in TEXT


def test_it_names_every_error():
    codes = {code for path in SOURCES for code in re.findall(r'code="(\w+)"', path.read_text())}
    assert [code for code in sorted(codes) if f"`{code}`" not in TEXT] == []
    assert [status for status in REFUSALS if f"| {status} |" not in TEXT] == []


def test_it_names_no_option_that_is_not_there():
    options = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", TEXT)}
    assert options <= set(ServeSettings.__struct_fields__)


def test_its_links_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link and not link.startswith("#")]
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_its_contents_are_its_headings_in_order():
    linked = re.findall(r"^ *- \[(.+)\]\(#(.+)\)$", TEXT, re.MULTILINE)
    assert [title for title, _ in linked] == re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)
    assert ("POST /v1/chat/completions", "post-v1chatcompletions") in linked
    assert len({name for _, name in linked}) == len(linked)
