"""From words on a command line to a `Config`, and from exceptions to exit codes. Imports no torch.

Precedence: defaults < preset (when --model names configs/NAME.toml) < `--config FILE.toml` < flags. Settings are
`--section.leaf VALUE`, or `--leaf VALUE` where the leaf names one field; hyphens and underscores are the same, as are
`--leaf=VALUE` and `--leaf VALUE`. Switches: `--leaf`, `--no-leaf`, `--leaf false`. Lists have commas between; tables
are JSON or TOML inline.

We parse by hand because the rules above (unique leaves, aliases, switches, messages that explain other trainers'
names) are most of the work, and because `--help` has to answer before anything heavy is imported.
"""

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from qerl.config import Config
from qerl.errors import RunError, UserError
from qerl.settings.fields import FieldSpec, find_field
from qerl.settings.layers import Layer, build_config, put


@dataclass(frozen=True)
class ExtraFlag:
    """A word of one entry point's command line that is not a setting, such as --dry-run or RUN."""

    name: str
    """With underscores; it is also the name in the namespace."""
    help: str
    takes_value: bool = False
    positional: bool = False
    """Taken from the bare words, in order."""
    required: bool = False
    default: str | None = None
    """Of a flag that takes a value; the others are False when they are not given."""

    @property
    def written(self) -> str:
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")


CONFIG_FLAG = ExtraFlag("config", "Settings (TOML) that override the preset.", takes_value=True)


def parse_config(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    extra_flags: Sequence[ExtraFlag] = (),
    examples: Sequence[str] = (),
) -> tuple[Config, Namespace]:
    """Parse a command line into a validated config, and check that there is such a model.

    Args:
        argv: the words after the program's name; None takes sys.argv.
        prog: the program as it is typed, for --help.
        description: one or two sentences for --help.
        extra_flags: what else this entry point understands.
        examples: command lines shown by --help.

    Returns:
        The config, and a namespace with each extra flag under its name (underscores), `config` (the settings file or
        None), `preset` (the preset's name or None) and `given` (paths of the settings that flags set).

    Raises:
        UserError: anything wrong, in one line.
        SystemExit: 0, after --help.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    flags, namespace = parse_arguments(
        argv, prog=prog, description=description, extra_flags=extra_flags, examples=examples
    )
    config, namespace.preset = build_config(flags, namespace.config)
    # Not at the top, since --help needs no hub client (0.2 s).
    from qerl.model.source import check_model

    check_model(config.model, config.revision)
    return config, namespace


def parse_arguments(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    extra_flags: Sequence[ExtraFlag] = (),
    examples: Sequence[str] = (),
) -> tuple[Layer, Namespace]:
    """The first half of `parse_config`: words to a layer of settings, not yet validated.

    For entry points whose base is not a preset but the config of an earlier run.
    """
    described = [CONFIG_FLAG, *extra_flags]
    if "--help" in argv or "-h" in argv:
        from qerl.settings.cli_help import help_text

        sys.stdout.write(help_text(prog, description, described, examples))
        raise SystemExit(0)
    extras = {flag.name: flag for flag in described if not flag.positional}
    values: dict[str, Any] = {}
    layer: Layer = {}
    words, bare = list(argv), []
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            bare.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        value = text if equals else None
        extra = extras.get(name.replace("-", "_"))
        if extra:
            values[extra.name] = _extra_value(extra, value, words)
            continue
        field, key, negated = _find_flag(name, extras)
        if field.kind == "switch":
            value = _switch_text(word, value, negated, words)
        elif value is None:
            value = _take_value(word, field.allowed, words)
        put(layer, field, key, value, f"--{name}")
    values |= _place_bare_words(bare, [flag for flag in described if flag.positional])
    for flag in described:
        if flag.required and flag.name not in values:
            raise UserError(f"{flag.written} is missing: {flag.help}")
        values.setdefault(flag.name, flag.default if flag.takes_value or flag.positional else False)
    return layer, Namespace(**values, given=frozenset(layer))


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run an entry point and exit; what it raises becomes one line on stderr and an exit code.

    UserError 2, RunError 1, Ctrl-C 130. With QERL_DEBUG=1 the traceback is printed too. Other exceptions are defects
    and propagate.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
    except (UserError, RunError) as error:
        if os.environ.get("QERL_DEBUG") == "1":
            traceback.print_exc()
        sys.stderr.write(f"qerl: error: {' '.join(str(error).split())}\n")
        code = 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        sys.stderr.write("qerl: interrupted\n")
        code = 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): leave nothing to flush into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _find_flag(name: str, extras: Mapping[str, ExtraFlag]) -> tuple[FieldSpec, str | None, bool]:
    """Field, key inside a table, and whether the flag was written --no-NAME."""
    plain = name.replace("-", "_")
    if plain.startswith("no_"):
        try:
            field, key = find_field(plain.removeprefix("no_"), "flag", f"--{name}", extras)
        except UserError:
            pass  # The message about the name as written is the better one.
        else:
            if field.kind != "switch":
                raise UserError(f"--{name}: {field.path} is not a switch; it takes {field.allowed}")
            return field, key, True
    return *find_field(plain, "flag", f"--{name}", extras), False


def _switch_text(word: str, value: str | None, negated: bool, words: list[str]) -> str:
    truth = ("true", "false", "yes", "no", "on", "off", "1", "0", "none")
    if negated:
        if value is not None:
            raise UserError(f"{word}: --no-... takes no value")
        return "false"
    if value is None and words and words[0].lower() in truth:
        value = words.pop(0)
    return "true" if value is None else value


def _take_value(word: str, allowed: str, words: list[str]) -> str:
    if not words or (words[0].startswith("--") and len(words[0]) > 2):
        raise UserError(f"{word} needs a value: {allowed}")
    return words.pop(0)


def _extra_value(extra: ExtraFlag, value: str | None, words: list[str]) -> Any:
    if extra.takes_value:
        return value if value is not None else _take_value(extra.written, extra.help, words)
    if value is not None:
        raise UserError(f"{extra.written} takes no value")
    return True


def _place_bare_words(bare: list[str], positionals: list[ExtraFlag]) -> dict[str, str]:
    if len(bare) > len(positionals):
        raise UserError(
            f"unexpected word {bare[len(positionals)]!r}: settings are --NAME VALUE, the values of a list have "
            "commas between and no spaces, and a text of several words stands in quotes"
        )
    return {flag.name: word for flag, word in zip(positionals, bare, strict=False)}
