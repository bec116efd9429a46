"""What every experiment module owes: checked on the toy and on all that are discovered."""

import ast
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, fields

from experiments import core
from experiments.discover import discover


def undocumented(config):
    """The fields of a Config without a docstring, whose ``--help`` would say nothing."""
    found = set()
    for base in config.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                found.add(statement.target.id)
    return [f.name for f in fields(config) if f.name not in found]


def test_every_module_has_its_parts():
    known = discover()
    assert "toy" in known
    for name, about in known.items():
        assert isinstance(about, core.About), f"{name}: {about}"
        module = importlib.import_module(f"experiments.{name}")
        assert about == module.ABOUT, name
        assert about.claim, name
        assert {"smoke", "laptop"} <= set(about.minutes), name
        assert module.__doc__, name
        assert f"experiments run {name}" in module.__doc__, f"{name}: its docstring gives the command"
        assert set(module.PRESETS) - {"smollm2"} == {"smoke", "laptop", "paper"}, name
        assert all(type(preset) is module.Config for preset in module.PRESETS.values()), name
        assert issubclass(module.Config, core.Config), name
        assert module.Config.__dataclass_params__.frozen, name
        assert undocumented(module.Config) == [], name
        assert not about.knob or about.knob in {f.name for f in fields(module.Config)}, name
        hints = inspect.get_annotations(module.run, eval_str=True)
        assert hints["return"] is core.Result, name


@dataclass(frozen=True, kw_only=True)
class HalfTold(core.Config):
    told: int = 1
    """Told."""
    untold: int = 2


def test_an_undocumented_field_is_found():
    assert undocumented(HalfTold) == ["untold"]


def test_help_shows_the_command_on_a_line_of_its_own(command):
    for name in discover():
        doc = importlib.import_module(f"experiments.{name}").__doc__
        wanted = re.findall(r"Command: .*", doc)
        assert len(wanted) <= 1, name
        code, out, _ = command("run", name, "--help")
        assert code == 0, name
        assert [line.rstrip() for line in out.splitlines() if "Command: " in line] == wanted, name


def test_help_of_no_module_imports_jax(environment):
    """JAX takes seconds to import; ``--help`` needs only the Config."""
    names = list(discover())
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module('experiments.' + name)\n"
        "    assert 'jax' not in sys.modules, name + ' imports jax: import it inside run'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
