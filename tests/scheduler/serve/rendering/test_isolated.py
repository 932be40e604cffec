"""A template is a stranger's program: whatever it does ends as a refusal, and the next chat is rendered."""

import contextlib
import os
import signal
import threading
import time
from datetime import datetime, timedelta, timezone

import psutil
import pytest

from engine.chat import ChatTemplate
from engine.errors import ParamError, TemplateError
from scheduler.serve.rendering import isolated
from scheduler.serve.rendering.isolated import IsolatedTemplate, RenderingProcessError
from tests.live_server import wait_for
from tests.tiny_model import CHATML

pytestmark = pytest.mark.slow

END, START = "<|im_end|>", "<|im_start|>"
HI = [{"role": "user", "content": "Hi"}]
ON_DEMAND = "{% if messages[0].content == 'attack' %}ATTACK{% else %}fine{% endif %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def source(text):
    return ChatTemplate(text, bos_token=START, eos_token=END, special_tokens=(START, END))


@contextlib.contextmanager
def rendering(text=CHATML, **options):
    with contextlib.closing(IsolatedTemplate(source(text), **options)) as template:
        yield template


def attacked(template, message="attack"):
    with pytest.raises(TemplateError) as refusal:
        template.render([{"role": "user", "content": message}])
    return str(refusal.value)


def process_of(template):
    return psutil.Process(template._process._process.pid)


def test_a_chat_is_rendered_as_in_this_process():
    chat = [{"role": "system", "content": f"a {END} é 😀 \x00"}, *HI, {"role": "assistant", "content": "x", "n": 2**80}]
    options = ({}, {"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True})
    with rendering() as template:
        for chosen in options:
            assert template.render(chat, **chosen) == source(CHATML).render(chat, **chosen)


def test_variables_and_the_clock_arrive():
    now = datetime(2024, 2, 29, 12, tzinfo=timezone(timedelta(hours=1), "CET"))
    with rendering("{{ note }} {{ strftime_now('%d %b %Y %H:%M %Z') }}") as template:
        assert template.render(HI, now=lambda: now, note="ok").text == "ok 29 Feb 2024 12:00 CET"


def test_refusals_are_those_of_the_template():
    with rendering("{{ raise_exception('no ' ~ messages[0].content) }}") as template:
        with pytest.raises(TemplateError, match=r"^no Hi$"):
            template.render(HI)
        with pytest.raises(ParamError, match="must not be empty") as refusal:
            template.render([])
        assert refusal.value.param == "messages"


def test_what_does_not_compile_is_known_before_the_first_chat():
    with rendering("{{ 1 | nothing }}") as template, pytest.raises(TemplateError, match=r"line 1: .*nothing"):
        template.check()


REFUSED = (
    "{% for i in range(10**12) %}x{% endfor %}",
    "{{ 'x' * messages[0].content|length * 10**9 }}",
    "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages[0].content|center(10**9) }}",
    "{{ '%0999999999d' % messages|length }}",
    "{{ [[]] * 10**9 * messages|length }}",
    "{{ messages[0].content ~ '\\ud800' }}",
    "{{ raise_exception('x' * 10**7) }}",
    "{{ messages[0].nothing.there }}",
)


@pytest.fixture(scope="module")
def refusing():
    """One process for all attacks that are refused: the message says which."""
    cases = (f"{{% elif messages[0].content == 'attack {n}' %}}{attack}" for n, attack in enumerate(REFUSED))
    with rendering(f"{{% if messages[0].content == 'Hi' %}}fine{''.join(cases)}{{% endif %}}") as template:
        yield template


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=REFUSED)
def test_a_refused_attack_leaves_the_process_as_it_is(refusing, number):
    assert refusing.render(HI).text == "fine"
    process = process_of(refusing)
    assert 0 < len(attacked(refusing, f"attack {number}")) <= 1000
    assert refusing.render(HI).text == "fine"
    assert process_of(refusing) == process


@pytest.mark.parametrize("attack", [ENDLESS, "{{ 7 ** (10 ** 8 * messages|length) }}"])
def test_what_would_go_on_for_ever_is_killed_and_the_next_chat_rendered(attack):
    with rendering(ON_DEMAND.replace("ATTACK", attack), cpu_s=0.2) as template:
        template.check()
        process = process_of(template)
        assert attacked(template) == "the chat template takes more than 0.2 s of computing"
        assert not process.is_running()
        assert template.render(HI).text == "fine"


def test_a_process_that_does_not_start_is_no_fault_of_the_template(monkeypatch):
    monkeypatch.setattr(isolated, "_environment", lambda: {"PYTHONHOME": os.devnull})
    with rendering() as template:
        for attempt in (template.check, lambda: template.render(HI)):
            with pytest.raises(RenderingProcessError, match=r"does not start \(it ended with status 1\)"):
                attempt()
        monkeypatch.undo()
        assert template.render(HI) == source(CHATML).render(HI)


def test_a_process_under_tighter_limits_than_it_would_set_still_renders(monkeypatch):
    def popen(arguments, **options):
        return real(("prlimit", f"--as={400_000 * 1024}", "--nofile=64", *arguments), **options)

    real = isolated.subprocess.Popen
    monkeypatch.setattr(isolated.subprocess, "Popen", popen)
    with rendering() as template:
        assert template.render(HI) == source(CHATML).render(HI)


def test_constants_that_take_for_ever_are_found_out_when_the_template_is_checked():
    with rendering("{{ 7 ** (10 ** 8) }}", cpu_s=0.2) as template, pytest.raises(TemplateError, match="s of computing"):
        template.check()


def test_an_answer_without_end_is_not_read(monkeypatch):
    monkeypatch.setattr(isolated, "MAX_ANSWER", 1000)
    with rendering(ON_DEMAND.replace("ATTACK", "{{ 'x' * 2000 }}")) as template:
        assert attacked(template) == "the chat template writes more than 1000 bytes"
        assert template.render(HI).text == "fine"


def test_a_process_that_stands_still_is_killed(monkeypatch):
    with rendering() as template:
        template.check()
        process_of(template).suspend()
        monkeypatch.setattr(isolated, "ANSWER_S", 0.05)
        with pytest.raises(TemplateError, match=r"longer than 0\.05 s"):
            template.render(HI)
        monkeypatch.undo()
        assert template.render(HI) == source(CHATML).render(HI)


def test_a_process_that_was_killed_is_replaced_without_a_failed_chat():
    with rendering() as template:
        template.check()
        process_of(template).kill()
        wait_for(lambda: template._process.has_ended, "the process to end")
        assert template.render(HI) == source(CHATML).render(HI)


def test_signals_meant_for_the_server_do_not_end_a_rendering():
    with rendering() as template:
        template.check()
        process = process_of(template)
        assert os.getsid(process.pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        assert template.render(HI) == source(CHATML).render(HI)
        assert process_of(template) == process


def test_closing_ends_the_process_in_the_midst_of_a_rendering():
    failures = []

    def render():
        try:
            template.render(HI)
        except TemplateError as error:
            failures.append(error)

    with rendering("{% if 1 %}" + ENDLESS + "{% endif %}") as template:
        template.check()
        process = process_of(template)
        busy = threading.Thread(target=render)
        busy.start()
        time.sleep(0.1)
        template.close()
        busy.join()
    assert len(failures) == 1
    assert not process.is_running()


def test_the_process_has_neither_our_secrets_nor_a_way_to_files(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_API_KEY", "secret")
    with rendering() as template:
        template.check()
        process = process_of(template)
        assert "LOCKSTEP_API_KEY" not in process.environ()
        assert process.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
        assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
        assert process.num_fds() == 3
        assert process.num_threads() == 1
