"""The options that commands share, each checked before any work starts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import mlxlm_flash_patch.cli
import msgspec
from flashattn_core.arguments import Precision

from flash_evals.commands.outputs import FORMATS
from flash_evals.results.errors import EvalError
from flash_evals.results.record import LARGEST

Item = TypeVar("Item")

blas = mlxlm_flash_patch.cli.blas_option


def model(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--revision", help="Branch, tag or commit of a model on the hub.  [default: main]")(command)
    return click.option(
        "--model",
        metavar="FOLDER|HUB_ID",
        help="Folder or hub id of a model in mlx-lm's layout, quantised or not.  [default: a small Qwen2]",
    )(command)


adapter_path = click.option(
    "--adapter-path",
    metavar="FOLDER",
    help="Load the adapters that mlx_lm.lora has written to this folder (LoRA, DoRA, or all weights).",
)


def given(record: type[Item], **more: object) -> Item:
    """Makes a record from the current command's options. Arguments in `more` replace options of the same name."""
    return msgspec.convert({**click.get_current_context().params, **more}, record)


def at_least(least: int) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def check(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
        if value is not None and not value >= least:
            raise EvalError(f"{parameter.opts[0]} must be at least {least}, not {value}")
        if value is not None and value > LARGEST:
            raise EvalError(f"{parameter.opts[0]} must be at most {LARGEST:,}, not {value}")
        return value

    return check


def number(*names: str, least: int, text: str, **option: Any) -> Callable[..., Any]:
    return click.option(*names, show_default=True, callback=at_least(least), help=text, **option)


def several(*names: str, read: Callable[[str], object], what: str, **option: Any) -> Callable[..., Any]:
    """An option that takes items separated by commas, without duplicates. `read` raises ValueError for a bad item."""

    def check(_: click.Context, parameter: click.Parameter, value: str | None) -> list[object] | None:
        try:
            return value if value is None else list(dict.fromkeys(read(part.strip()) for part in value.split(",")))
        except ValueError:
            raise EvalError(f"{parameter.opts[0]} takes {what} separated by commas, not {value!r}") from None

    return click.option(*names, show_default=True, callback=check, **option)


def numbers(*names: str, of: str, least: int, default: str, text: str) -> Callable[..., Any]:
    """An option that takes whole numbers separated by commas."""

    def read(item: str) -> int:
        if not item.isdecimal() or not least <= int(item) <= LARGEST:
            raise ValueError(item)
        return int(item)

    return several(*names, read=read, what=f"numbers of {of}", metavar="N,...", default=default, help=text)


def own_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Raises EvalError if another option names the same file, because one file would overwrite the other."""
    if value is not None:
        named: dict[Path, str] = context.meta.setdefault("flash_evals.files", {})
        if (other := named.setdefault(value.resolve(), parameter.opts[0])) != parameter.opts[0]:
            raise EvalError(f"{other} and {parameter.opts[0]} name the same file: {value}")
    return value


def writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    own_file(context, parameter, value)
    if value is not None:
        target = value if value.exists() else value.parent
        if value.is_dir() or not os.access(target, os.W_OK):
            reason = "this is a folder" if value.is_dir() else f"{target} is missing or not writable"
            raise EvalError(f"{parameter.opts[0]} {value}: {reason}")
    return value


def precision(default: Precision, flash: str) -> Callable[..., Any]:
    """The option --precision. In the help, `flash` follows "Precision of"."""
    return click.option(
        "--precision",
        type=click.Choice(["input", "float32"]),
        default=default,
        show_default=True,
        help=f"Precision of {flash}. input: 16-bit results are as accurate as those of MLX's own attention. "
        "float32: cast to float32, compute, cast back. On a CPU, both give the same results.",
    )


kv_bits = mlxlm_flash_patch.cli.kv_bits_option
kv_group_size = mlxlm_flash_patch.cli.kv_group_size_option
quantized_kv_start = mlxlm_flash_patch.cli.quantized_kv_start_option


def repetitions(default: int, text: str) -> Callable[..., Any]:
    return number("-r", "--repetitions", least=1, default=default, text=text)


def seed(text: str) -> Callable[..., Any]:
    return number("--seed", least=0, default=0, text=text)


def outputs(command: Callable[..., None]) -> Callable[..., None]:
    """The options -o and --json. given(Outputs) has their values."""
    command = click.option(
        "--json",
        "json_file",
        type=click.Path(path_type=Path),
        callback=writable,
        help="Write all results to this file.",
    )(command)
    return click.option(
        "-o",
        "--output",
        "format",
        type=click.Choice(FORMATS),
        default="text",
        show_default=True,
        help="Format of the results on stdout: text, Markdown or JSON.",
    )(command)
