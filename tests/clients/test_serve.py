import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from clients import serve
from clients.cli import cli
from scheduler.serve.settings import ServeSettings


class Command:
    """`lockstep serve` up to the point where the server would start: `settings` is what it would start with."""

    settings: ServeSettings | None = None

    def run(self, *arguments: str, **env: str) -> ServeSettings:
        result = self.invoke(*arguments, **env)
        assert result.exit_code == 0, result.output
        assert self.settings is not None
        return self.settings

    def refusal(self, *arguments: str, **env: str) -> str:
        """The one line on stderr."""
        result = self.invoke(*arguments, **env)
        assert result.exit_code == 1
        assert self.settings is None
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        return result.stderr.strip()

    def invoke(self, *arguments: str, **env: str) -> Result:
        return CliRunner().invoke(cli, ["serve", *arguments], env={f"LOCKSTEP_{k}": v for k, v in env.items()})


@pytest.fixture
def command(monkeypatch):
    command = Command()

    def run(settings: ServeSettings) -> int:
        command.settings = settings
        return 0

    monkeypatch.setitem(sys.modules, "scheduler.serve.app", SimpleNamespace(run=run))
    for name in serve.FIELDS:
        monkeypatch.delenv(f"LOCKSTEP_{name.upper()}", raising=False)
    monkeypatch.delenv("LOCKSTEP_CONFIG", raising=False)
    return command


@pytest.fixture
def model(tmp_path) -> str:
    path = tmp_path / "my.gguf"
    path.touch()
    return str(path)


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "lockstep.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "served_model_name": (["a", "b"], ("a", "b")),
    "kernels": (["reference"], "reference"),
    "weights": (["f32"], "f32"),
    "threads": (["2"], 2),
    "slots": (["3"], 3),
    "context": (["512"], 512),
    "kv_dtype": (["float32"], "float32"),
    "prefill_chunk": (["64"], 64),
    "max_queue": (["7"], 7),
    "max_queue_tokens": (["700"], 700),
    "request_timeout": (["2.5"], 2.5),
    "host": (["::1"], "::1"),
    "port": (["0"], 0),
    "jsonl_port": (["9001"], 9001),
    "unix_socket": (["/run/lockstep"], Path("/run/lockstep")),
    "api_key": (["k1", "k2"], ("k1", "k2")),
    "api_key_file": (["/run/keys"], Path("/run/keys")),
    "open_metrics": (["true"], True),
    "ssl_cert": (["/run/cert.pem"], Path("/run/cert.pem")),
    "cors_origin": (["http://a.example"], ("http://a.example",)),
    "sse_ping": (["3.5"], 3.5),
    "grace": (["1"], 1.0),
    "write_timeout": (["9"], 9.0),
    "body_timeout": (["8"], 8.0),
    "max_body": (["1000"], 1000),
    "max_connections": (["10"], 10),
    "log_format": (["json"], "json"),
}


def test_without_options_the_settings_are_the_structs_defaults(command, model):
    assert command.run(model) == ServeSettings(model=Path(model))


def test_there_is_an_example_of_every_setting():
    assert set(EXAMPLES) == set(serve.FIELDS) - {"model", "ssl_key"}  # which needs another one beside it


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_setting_can_be_a_flag(command, model, name):
    values, expected = EXAMPLES[name]
    flag = f"--{name.replace('_', '-')}"
    flags = [flag] if expected is True else [word for value in values for word in (flag, value)]
    assert getattr(command.run(model, *flags), name) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_setting_can_be_an_environment_variable(command, model, name):
    values, expected = EXAMPLES[name]
    assert getattr(command.run(model, **{name.upper(): " ".join(values)}), name) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_setting_can_be_in_the_file(command, model, config, name):
    _, expected = EXAMPLES[name]
    line = f"{name.replace('_', '-')} = {json.dumps(expected, default=str)}"  # such JSON is TOML too
    assert getattr(command.run(model, "--config", config(line)), name) == expected


@pytest.mark.parametrize("blank", ["", "  ", "\t\n"])
def test_a_blank_key_does_not_open_the_server(command, model, blank):
    assert "LOCKSTEP_API_KEY is set but blank" in command.refusal(model, API_KEY=blank)
    assert command.run(model, "--api-key", "k", API_KEY=blank).api_key == ("k",)


def test_a_blank_key_does_not_beat_those_of_the_file_by_none(command, model, config):
    path = config('api-key = ["k"]\n')
    assert "set but blank" in command.refusal(model, "--config", path, API_KEY="  ")
    assert command.run(model, "--config", path, API_KEY="").api_key == ("k",)


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(command, model, config):
    path = config("slots = 2\nport = 2\ngrace = 2\n")
    settings = command.run(model, "--slots", "4", CONFIG=path, SLOTS="3", PORT="3")
    assert (settings.slots, settings.port, settings.grace, settings.max_queue) == (4, 3, 2.0, 256)


def test_keys_of_the_file_may_be_written_with_underscores(command, model, config):
    assert command.run(model, "--config", config("kv_dtype = 'float32'")).kv_dtype == "float32"


def test_the_model_can_come_from_the_file_or_the_environment(command, model, config):
    assert command.run("--config", config(f"model = '{model}'")).model == Path(model)
    assert command.run(MODEL=model).model == Path(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key 'prot', did you mean 'port'?"),
        ("zzz = 1", "unknown key 'zzz' (known: model, served-model-name, "),
        ("[serve]\nport = 1", "[serve]: there are no tables, options stand at the top"),
        ("port = 'eight'", "port: Expected `int`, got `str`"),
        ("port = true", "port: Expected `int`, got `bool`"),
        ("kernels = 'fast'", "kernels: Invalid enum value 'fast' (one of auto, compiled, reference)"),
        ("api-key = 'k'", 'api-key: Expected `array`, got `str`, such as ["abc"]'),
        ("unix-socket = 3", "unix-socket: "),
        ("port = ", "Invalid value"),
    ],
)
def test_a_wrong_file_is_refused_naming_file_and_key(command, model, config, text, message):
    path = config(text)
    refusal = command.refusal(model, "--config", path)
    assert refusal.startswith(f"Error: {path}: ")
    assert message in refusal


def test_a_file_that_is_not_there_is_named(command, model, tmp_path):
    nowhere = str(tmp_path / "nowhere.toml")
    assert command.refusal(model, "--config", nowhere).strip() == f"Error: {nowhere}: no such file or directory"


def test_a_value_out_of_range_is_one_line_before_any_download(command):
    assert command.refusal("smollm2-135m", "--port", "70000") == "Error: --port must be in [0, 65535], got 70000"


def test_an_unknown_model_lists_the_known_ones(command):
    assert "nope: no such file, and not a known model (known: smollm2-135m)" in command.refusal("nope")


def test_a_directory_is_refused_as_one(command, tmp_path):
    assert command.refusal(str(tmp_path)) == f"Error: {tmp_path} is a directory, not a .gguf file"


def test_a_misspelt_variable_is_warned_of(command, model):
    result = command.invoke(model, PROT="1", SLOTS="3", CACHE="/x", URL="x", ZZZZZZ="1")
    assert result.stderr.splitlines() == [
        "Warning: LOCKSTEP_PROT is no option, did you mean LOCKSTEP_PORT?",
        "Warning: LOCKSTEP_ZZZZZZ is no option",
    ]


def test_without_a_model_the_default_one_is_pulled_and_served_under_its_name(command, model, monkeypatch):
    monkeypatch.setattr(serve, "resolve", lambda name: {"smollm2-135m": Path(model)}[name])
    settings = command.run()
    assert (settings.model, settings.model_name) == (Path(model), "smollm2-135m")
    assert command.run("--served-model-name", "mine").model_name == "mine"


def test_the_servers_exit_code_is_the_commands(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "scheduler.serve.app", SimpleNamespace(run=lambda _: 3))
    assert CliRunner().invoke(cli, ["serve", model]).exit_code == 3
