"""Chat templates: rendered as transformers does, and stopped whatever a hostile one does."""

import json
import os
import threading
import time

import pytest

from jaxmeth.hf import chat
from jaxmeth.types import ConfigError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You help.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Wie spät? 🙂 <b>"}]


def test_messages_become_the_prompt():
    system = "<|im_start|>system\nYou help.<|im_end|>\n"
    user = "<|im_start|>user\nWie spät? 🙂 <b><|im_end|>\n"
    assert chat.render(SMOLLM2, USER) == f"{system}{user}<|im_start|>assistant\n"
    assert chat.render(SMOLLM2, USER, add_generation_prompt=False) == system + user
    own = [{"role": "system", "content": "Be brief."}, *USER]
    assert chat.render(SMOLLM2, own, add_generation_prompt=False) == system.replace("You help", "Be brief") + user


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
        ("{{ bos_token }}|{{ eos_token }}|{{ extra.a[0] }}", "<s>|</s>|1"),
        ("{{ extra | tojson }}", '{"a": [1, "<ä>"]}'),  # no HTML escapes, no ASCII escapes
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ '<' }}", "<"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "6"),
        ("{{ missing is defined }}{{ none_given | default('d') }}", "Falsed"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("", ""),
    ],
)
def test_environment_is_that_of_transformers(template, expected):
    variables = {"bos_token": "<s>", "eos_token": "</s>", "extra": {"a": [1, "<ä>"]}}
    assert chat.render(template, [], **variables) == expected


HOSTILE = {
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "subclasses": ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
    "attribute filter": ("{{ (''|attr('__class__')).__mro__ }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__['os'] }}", "unsafe"),
    "format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "mutation": ("{{ messages.append(1) }}", "unsafe"),
    "file": ("{% include '/etc/passwd' %}", "loader"),
    "long range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "memory": ("{{ 'a' * 10**10 }}", "memory"),
    "output": ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "4000000 characters"),
    "one output": ("{{ 'x' * 10**7 }}", "4000000 characters"),
    "syntax": ("{% if %}", "line 1"),
    "unknown tag": ("a\n{% frobnicate %}", "line 2"),
    "own error": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "undefined": ("{{ nothing.at.all }}", "nothing"),
    "division": ("{{ 1 // 0 }}", "ZeroDivisionError"),
}


@pytest.mark.parametrize(("template", "expected"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_template_is_refused(template, expected):
    with pytest.raises(ConfigError, match="chat template") as error:
        chat.render(template, USER, time_limit=5.0)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert chat.render("{{ messages[0].role }}", USER) == "user"


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one long operation": "{{ (7 ** 9999999) % 10 ** 1000 }}",
    "one long call": "{{ lipsum(n=10**8) }}",
    "one long comparison": "{{ 10**30000000 == 10**30000001 }}",
    "doubling": "{% set ns=namespace(s='a') %}{% for i in range(80) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_template_is_stopped(template):
    chat.render("", [])
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=r"stopped|memory"):
        chat.render(template, USER, time_limit=0.2)
    assert time.perf_counter() - began < 2 + 0.2 * chat.CLOCK_FACTOR
    assert chat.render("{{ messages[0].role }}", USER) == "user"


def test_process_that_died_is_replaced():
    chat.render("", [])
    first = chat._worker.process
    first.kill()
    first.wait()
    assert chat.render("a", []) == "a"
    assert chat._worker.process is not first


def test_process_that_sleeps_is_stopped_by_the_clock(monkeypatch):
    chat.render("", [])
    worker = chat._worker
    os.kill(worker.process.pid, 19)  # SIGSTOP: it uses no processor time
    monkeypatch.setattr(chat, "CLOCK_FACTOR", 1.0)
    with pytest.raises(ConfigError, match="stopped"):
        chat.render("a", [], time_limit=0.2)
    assert worker.process.poll() is not None
    monkeypatch.undo()
    assert chat.render("a", []) == "a"


def test_process_is_kept_and_ends_with_its_pipe():
    chat.render("", [])
    kept = chat._worker.process
    began = time.perf_counter()
    for _ in range(100):
        chat.render(SMOLLM2, USER)
    assert time.perf_counter() - began < 2
    assert chat._worker.process is kept
    kept.stdin.close()
    assert kept.wait(10) == 0
    assert chat.render("a", []) == "a"


def test_threads_get_their_own_answers():
    answers = {}

    def ask(i: int) -> None:
        answers[i] = [chat.render("{{ n }} {{ i }}", USER, n=j, i=i) for j in range(20)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: [f"{j} {i}" for j in range(20)] for i in range(8)}


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match="JSON"):
        chat.render("", USER, tools=[object()])
    with pytest.raises(ConfigError, match="at most 1000000"):
        chat.render("x" * 1_000_001, USER)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="time_limit"):
            chat.render("", USER, time_limit=wrong)


def test_template_of_a_folder(tmp_path):
    assert chat.chat_template_from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert chat.chat_template_from_folder(tmp_path) is None
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for stored, expected in ((SMOLLM2, SMOLLM2), (several, "d"), (several[:1], None)):
        config.write_text(json.dumps({"chat_template": stored}))
        assert chat.chat_template_from_folder(tmp_path) == expected
    for wrong in (3, {"default": "d"}, [{"name": "default", "template": 3}]):
        config.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ConfigError, match="chat_template"):
            chat.chat_template_from_folder(tmp_path)
    own = tmp_path / "chat_template.jinja"
    own.write_text("ä{{ 1 }}", encoding="utf-8")
    assert chat.chat_template_from_folder(tmp_path) == "ä{{ 1 }}"
    own.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        chat.chat_template_from_folder(tmp_path)
    os.truncate(own, 2_000_000)
    with pytest.raises(ConfigError, match="at most 1000000"):
        chat.chat_template_from_folder(tmp_path)
