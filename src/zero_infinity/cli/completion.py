"""`zero-infinity completion SHELL`: a script with which bash, zsh or fish completes commands, options and files."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from importlib import import_module

EPILOG = """\
examples:
  eval "$(zero-infinity completion bash)"                          in ~/.bashrc
  eval "$(zero-infinity completion zsh)"                           in ~/.zshrc, after compinit
  zero-infinity completion fish > ~/.config/fish/completions/zero-infinity.fish

The script has the options of the version that printed it: print it again after an update.
"""
_NAME = "zero-infinity"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a script that completes commands, options and their values in a shell."
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=sorted(SHELLS), help="the shell")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell](_options()))
    return 0


class _Command:
    """What follows a command: its options with their help, the values of those that have few, and its subcommands."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.options: dict[str, str] = {}
        self.values: dict[str, list[str]] = {}
        self.words: list[str] = []
        for action in parser._actions:
            choices = list(map(str, action.choices)) if action.choices else []
            if not action.option_strings:
                self.words += choices
                if isinstance(action, argparse._SubParsersAction):
                    for chosen in action.choices.values():
                        below = _Command(chosen)
                        self.options.update(below.options)
                        self.values.update(below.values)
            for name in action.option_strings:
                if name.startswith("--"):
                    self.options[name] = " ".join((action.help or "").replace("%%", "%").split())
                    if choices:
                        self.values[name] = choices


def _options() -> dict[str, _Command]:
    """Every command; also those that take long to import are asked once, when the script is printed."""
    from zero_infinity.cli.main import COMMANDS

    found = {}
    for name in COMMANDS:
        parser = argparse.ArgumentParser(prog=_NAME)
        import_module(f"zero_infinity.cli.{name.replace('-', '_')}").add_options(parser)
        found[name] = _Command(parser)
    return found


def _bash(commands: dict[str, _Command]) -> str:
    cases = []
    for name, command in commands.items():
        values = "".join(
            f'        {option}) COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$word")); return ;;\n'
            for option, words in command.values.items()
        )
        before = f'      case "$before" in\n{values}      esac\n' if values else ""
        words = " ".join([*command.words, *command.options])
        cases.append(f"    {name})\n{before}      words={shlex.quote(words)} ;;\n")
    return (
        f"_zero_infinity() {{\n"
        f'  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words\n'
        f'  if [ "$COMP_CWORD" -eq 1 ]; then\n'
        f'    COMPREPLY=($(compgen -W {shlex.quote(" ".join([*commands, "--help", "--version"]))} -- "$word"))\n'
        f"    return\n"
        f"  fi\n"
        f'  case "${{COMP_WORDS[1]}}" in\n{"".join(cases)}  esac\n'
        f'  COMPREPLY=($(compgen -W "$words" -- "$word"))\n'
        f"}}\n"
        f"complete -o default -F _zero_infinity {_NAME}"
    )


def _zsh(commands: dict[str, _Command]) -> str:
    """zsh runs bash's functions."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(commands)}"


def _fish(commands: dict[str, _Command]) -> str:
    from zero_infinity.cli.main import COMMANDS

    lines = []
    for name, command in commands.items():
        after = f"-n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c {_NAME} -n __fish_use_subcommand -f -a {name} -d {_fish_quoted(COMMANDS[name])}")
        if command.words:
            lines.append(f"complete -c {_NAME} {after} -a {_fish_quoted(' '.join(command.words))}")
        for option, text in command.options.items():
            values = f" -x -a {_fish_quoted(' '.join(command.values[option]))}" if option in command.values else ""
            lines.append(f"complete -c {_NAME} {after} -l {option.removeprefix('--')}{values} -d {_fish_quoted(text)}")
    return "\n".join(lines)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[dict[str, _Command]], str]] = {"bash": _bash, "fish": _fish, "zsh": _zsh}
