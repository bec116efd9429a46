"""Which experiments there are, read from their source: nothing is imported."""

import ast
import pkgutil
import re
from pathlib import Path

from experiments.core import About


def discover() -> dict[str, About | str]:
    """Every module of the package with an ``ABOUT``: read from its source, nothing is imported."""
    import experiments

    found = {}
    for info in pkgutil.iter_modules(experiments.__path__):
        path = Path(getattr(info.module_finder, "path", "")) / f"{info.name}.py"
        if path.is_file() and (about := read_about(path)) is not None:
            found.setdefault(info.name, about)
    return dict(sorted(found.items()))


def read_about(path: Path) -> About | str | None:
    """The literal arguments of ``ABOUT = core.About(...)``; what is wrong with them; None for another module."""
    source = path.read_text(encoding="utf-8", errors="replace")
    if not re.search(r"^ABOUT\b", source, re.MULTILINE):
        return None
    try:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "ABOUT" for t in node.targets):
                return About(**{k.arg: ast.literal_eval(k.value) for k in node.value.keywords})
    except SyntaxError as error:
        return f"cannot be read: {error.msg}, line {error.lineno}"
    except (ValueError, TypeError, AttributeError) as error:
        return f"ABOUT cannot be read: {error}, expected core.About(...) with literal arguments"
    return None
