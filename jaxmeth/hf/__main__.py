"""``python -m jaxmeth.hf SOURCE OUT``: convert a checkpoint, list its tensors, read the result back and compare."""

import contextlib
import io
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

PROG = "python -m jaxmeth.hf"
DESCRIPTION = """Convert a checkpoint to a Hugging Face folder that jaxmeth and transformers read.

SOURCE is a Hugging Face folder, a .gguf file (quantised tensors become float32) or a hub name owner/name, which is
looked for in the hub's cache before the network.

Prints a table of the tensors; then reads OUT back and compares every tensor byte for byte.

Examples:

python -m jaxmeth.hf model.Q4_K.gguf converted

python -m jaxmeth.hf owner/name converted --dtype bfloat16 --strict-finite
"""
USAGE = f"{PROG} SOURCE OUT [--dtype float32|bfloat16|float16] [--strict-finite] [--no-strict] [--quiet]"


@dataclass(frozen=True)
class Args:
    """The command line."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face folder, .gguf file or hub name."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write; it must not hold weights yet."""
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    """Type of all parameters."""
    strict: bool = True
    """Refuse tensors that the configuration has no place for (--no-strict warns)."""
    strict_finite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Refuse NaN and infinite weights instead of warning."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """No table."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0, or 2 after one line on stderr."""
    try:
        args = _parse(list(sys.argv[1:] if argv is None else argv))
    except _Wrong as wrong:
        print(f"error: {wrong}\nusage: {USAGE}", file=sys.stderr)
        return 2
    # JAX is imported only now: --help and a wrong flag need not wait for it.
    from jaxmeth.types import JaxmethError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            _convert(args)
    except (JaxmethError, ImportError, OSError, MemoryError) as e:
        print(f"error: {_single_line(e)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C", file=sys.stderr)
        return 130
    return 0


class _Wrong(Exception):
    pass


def _parse(argv: list[str]) -> Args:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Args, args=argv, prog=PROG, description=DESCRIPTION)
    except SystemExit as end:
        if not end.code:
            raise
        raise _Wrong(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """The message of tyro's error box: below the title (and its rule, on a plain terminal), above the next rule."""
    blocks: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines():
        text = line.strip("│|╭╰╮╯ ")
        if text and set(text) <= set("─-"):
            blocks.append([])
        elif text:
            blocks[-1].append(text)
    return " ".join(blocks[0][1:] or [line for block in blocks[1:2] for line in block]) or "wrong arguments"


def _single_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _convert(args: Args) -> None:
    from rich.console import Console

    from jaxmeth.hf import convert
    from jaxmeth.hf.load import load
    from jaxmeth.hf.save import save

    console = Console()
    dtype = None if args.dtype == "stored" else args.dtype
    checkpoint = load(args.source, dtype=dtype, strict=args.strict, strict_finite=args.strict_finite)
    save(args.out, checkpoint)
    if not args.quiet:
        console.print(_table(convert.tensor_rows(checkpoint.cfg, checkpoint.params)))
    leaves = convert.flatten(checkpoint.params)
    parameters = sum(leaf.size for leaf in leaves.values())
    console.print(f"{checkpoint.cfg.model_type}: {parameters:,} parameters in {len(leaves)} leaves", soft_wrap=True)
    count, size = convert.compare(checkpoint.cfg, checkpoint.params, args.out)
    parts = [name for name in ("tokenizer", "chat_template") if getattr(checkpoint, name) is not None]
    extras = f", with {' and '.join(parts).replace('_', ' ')}" if parts else ", without tokenizer"
    parity = f"parity: {count} tensors ({size:,} bytes) read back from {args.out} are equal byte for byte{extras}"
    console.print(parity, soft_wrap=True, highlight=False)


def _table(rows: list[tuple[str, int, str, tuple[int, ...], str]]) -> Any:
    from rich.table import Table

    table = Table()
    for heading in ("Hugging Face tensor", "layers", "jaxmeth leaf", "shape", "type"):
        table.add_column(heading, justify="right" if heading in ("layers", "shape") else "left", overflow="fold")
    for name, count, paths, shape, dtype in rows:
        layers = str(count) if "{i}" in name else ""
        table.add_row(name, layers, paths.replace(" ", "\n"), " x ".join(map(str, shape)) or "scalar", dtype)
    return table


if __name__ == "__main__":
    sys.exit(main())
