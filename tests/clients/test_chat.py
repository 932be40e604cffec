import asyncio
import os
import signal
import sys

import pytest
from click.testing import CliRunner

from clients.api import LockstepClient
from clients.chat import COMMANDS, NOTES, stream_answer
from clients.cli import cli

HI = [{"role": "user", "content": "Hi"}]


class Chat:
    """A `lockstep chat` process without a terminal: what is typed goes in line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def say(self, line: str) -> None:
        self.process.stdin.write(line.encode() + b"\n")

    async def read(self, text: str) -> None:
        assert await self.process.stdout.readexactly(len(text.encode())) == text.encode()

    async def end(self) -> tuple[int, str, str]:
        """Exit code and what else came out, once the input has ended."""
        stdout, stderr = await self.process.communicate(b"")
        return self.process.returncode, stdout.decode(), stderr.decode()


@pytest.fixture(autouse=True)
def _heed_ctrl_c():
    """Processes inherit that SIGINT is ignored, as it is in a shell script's background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def chat(canned):
    """A whole conversation in this process, all lines of it typed ahead: exit code, stdout and stderr."""

    async def chat(*lines: str, options: tuple[str, ...] = (), url: str = canned.url) -> tuple[int, str, str]:
        typed = "".join(f"{line}\n" for line in lines)
        result = await asyncio.to_thread(CliRunner().invoke, cli, ["chat", "--url", url, *options], typed)
        return result.exit_code, result.stdout, result.stderr

    return chat


@pytest.fixture
async def start_chat(canned):
    processes = []

    async def start(*options: str, url: str = canned.url) -> Chat:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "clients.cli", "chat", "--url", url, *options]
        processes.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe))
        return Chat(processes[-1])

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_an_answer_is_written_piece_by_piece(canned):
    pieces = []
    async with LockstepClient(canned.url) as client:
        assert await stream_answer(client, HI, pieces.append) == "stop"
    assert pieces == ["Hel", "lo", "!"]


async def test_a_conversation_remembers_what_was_said(canned, chat):
    options = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "9")
    assert await chat("Hi", "  ", "More é", options=options) == (0, "Hello!\nHello!\n", "")
    system, first, second = {"role": "system", "content": "Be brief."}, HI[0], {"role": "user", "content": "More é"}
    assert [body["messages"] for body in canned.bodies] == [
        [system, first],
        [system, first, {"role": "assistant", "content": "Hello!"}, second],
    ]
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in canned.bodies} == {("canned", 0, 9)}


@pytest.mark.slow
async def test_ctrl_c_stops_the_answer_and_not_the_program(canned, start_chat):
    canned.hold = True
    chat = await start_chat()
    chat.say("Hi")
    await chat.read("Hel")
    chat.process.send_signal(signal.SIGINT)
    await canned.ended.wait()
    canned.hold = False
    await chat.read("\n")
    chat.say("Again")
    assert await chat.end() == (0, "Hello!\n", "[stopped]\n")
    assert canned.bodies[1]["messages"][1] == {"role": "assistant", "content": "Hel"}


async def test_a_refused_turn_is_reported_and_forgotten(canned, chat):
    canned.refuse_from = 0
    code, stdout, stderr = await chat("Hi", "Hi")
    assert (code, stdout) == (1, "")
    assert stderr == "Error: n must be >= 1, got 0\n" * 2
    assert [body["messages"] for body in canned.bodies] == [HI, HI]


async def test_a_full_context_costs_the_oldest_turns_and_not_the_conversation(canned, chat):
    canned.most_messages = 4
    code, stdout, stderr = await chat("One", "Two", "Three", options=("--system", "Be brief."))
    assert (code, stdout) == (0, "Hello!\n" * 3)
    assert stderr == "[the context is full: the oldest turns are forgotten]\n"
    assert [message["content"] for message in canned.bodies[-1]["messages"]] == ["Be brief.", "Two", "Hello!", "Three"]


async def test_a_line_too_long_for_the_context_alone_is_refused(canned, chat):
    canned.most_messages = 0
    assert await chat("One") == (1, "", "Error: the prompt is too long\n")


async def test_clear_forgets_all_but_the_system_message(canned, chat):
    said = await chat("One", "/clear", "Two", options=("--system", "Be brief."))
    assert said == (0, "Hello!\nHello!\n", "")
    assert [message["content"] for message in canned.bodies[-1]["messages"]] == ["Be brief.", "Two"]


async def test_commands_are_told_of_and_not_sent(canned, chat):
    code, stdout, stderr = await chat("/help", "/claer")
    assert (code, stdout, canned.bodies) == (0, "", [])
    assert stderr == f"{COMMANDS}\nno command /claer: {COMMANDS}\n"


@pytest.mark.parametrize("finish_reason", NOTES)
async def test_an_answer_that_did_not_end_of_itself_is_marked(canned, chat, finish_reason):
    canned.finish_reason = finish_reason
    assert await chat("Hi") == (0, "Hello!\n", f"{NOTES[finish_reason]}\n")


async def test_a_model_that_is_not_served_is_noticed_before_the_first_line(canned, chat):
    note = f"gpt-4 is not among the models of {canned.url}: canned, other\n"
    assert await chat(options=("--model", "gpt-4")) == (0, "", note)


async def test_a_model_cannot_drive_the_terminal(canned, chat):
    canned.pieces = ["\x1b[2Jred\x07\x9b31m", "\ttab\nline"]
    assert await chat("Hi") == (0, "[2Jred31m\ttab\nline\n", "")


async def test_without_a_server_it_says_how_to_start_one(chat):
    code, stdout, stderr = await chat(url="http://127.0.0.1:9")
    assert (code, stdout) == (1, "")
    assert (
        stderr
        == "Error: no server at http://127.0.0.1:9 (start one with `lockstep serve`, or name its address with --url)\n"
    )


@pytest.mark.slow
async def test_a_server_that_stops_between_two_lines_is_missed_as_one_that_never_was(canned, start_chat):
    chat = await start_chat()
    chat.say("Hi")
    await chat.read("Hello!\n")
    await canned.close()
    chat.say("Are you there?")
    assert await chat.end() == (
        1,
        "",
        f"Error: no server at {canned.url} (start one with `lockstep serve`, or name its address with --url)\n",
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
async def test_on_a_terminal_there_is_a_prompt_and_ctrl_d_ends(canned):
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "clients.cli", "chat", "--url", canned.url]
    process = await asyncio.create_subprocess_exec(*command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)

    unread = b""

    async def read_until(text: bytes) -> None:
        nonlocal unread
        while text not in unread:
            unread += await asyncio.to_thread(os.read, ours, 1000)
        unread = unread.partition(text)[2]

    await read_until(b"/help")
    await read_until(b"> ")
    os.write(ours, b"Hi\n")
    await read_until(b"Hello!")
    await read_until(b"> ")
    os.write(ours, b"\x04")
    assert await process.wait() == 0
    os.close(ours)
