"""`penstock completion SHELL`: a script with which the shell completes commands, flags and values.

The script is made from the parser, so it knows what `--help=all` knows, and starts no Python when
a key is pressed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BASH = """\
# bash: source <(penstock completion bash)
_penstock() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} at=penstock word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$at $word" in
            {commands}) at="$at $word" ;;
        esac
    done
    COMPREPLY=()
    case "$at $prev" in
{values}
    esac
    case $at in
{words}
    esac
    [[ $cur == -* || ${{#COMPREPLY[@]}} -gt 0 ]] || mapfile -t COMPREPLY < <(compgen -f -- "$cur")
}}
complete -o filenames -o bashdefault -F _penstock penstock
"""
ZSH = """\
#compdef penstock
# zsh: write it as _penstock into a folder of $fpath, or: source <(penstock completion zsh)
_penstock() {{
    local cur=${{words[CURRENT]}} prev=${{words[CURRENT-1]}} at=penstock word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$at $word" in
            {commands}) at="$at $word" ;;
        esac
    done
    case "$at $prev" in
{values}
    esac
    case $at in
{words}
    esac
    [[ $cur == -* ]] || _files
}}
if [[ $funcstack[1] == _penstock ]]; then _penstock "$@"; else compdef _penstock penstock; fi
"""
FISH = """\
# fish: penstock completion fish > ~/.config/fish/completions/penstock.fish
function __penstock_at
    set -l at penstock
    for word in (commandline -opc)[2..-1]
        switch "$at $word"
            case {commands}
                set at "$at $word"
        end
    end
    test "$at" = "$argv"
end
{lines}
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command. `values`: its choices; empty: any, or none."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its path ("penstock bench serve"), the commands below it, and its flags."""

    path: str
    commands: dict[str, str]  # their help by name
    flags: tuple[Flag, ...]


def run_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for a shell of SHELLS."""
    print(SHELLS[shell](list(commands_of(parser, "penstock"))), end="")
    return 0


def commands_of(parser: argparse.ArgumentParser, path: str) -> Iterator[Command]:
    """The command of `parser`, then all below it. Hidden flags, as vLLM's, are left out."""
    below: dict[str, argparse.ArgumentParser] = {}
    helps: dict[str, str] = {}
    flags = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
            helps |= {each.dest: each.help or "" for each in action._choices_actions}
        elif action.option_strings and action.help is not argparse.SUPPRESS:
            values = tuple(map(str, action.choices or ()))
            summary = (action.help or "").partition(";")[0].replace("%%", "%")
            takes_value = action.nargs != 0
            flags.append(Flag(tuple(action.option_strings), summary, takes_value, values))
    yield Command(path, {name: helps.get(name, "") for name in below}, tuple(flags))
    for name, each in below.items():
        yield from commands_of(each, f"{path} {name}")


def _bash(commands: list[Command]) -> str:
    def reply(words: list[str]) -> str:
        return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$cur"))'

    return BASH.format(**_cases(commands, reply))


def _zsh(commands: list[Command]) -> str:
    def reply(words: list[str]) -> str:
        return f"compadd -- {shlex.join(words)}"

    return ZSH.format(**_cases(commands, reply))


def _cases(commands: list[Command], reply: Callable[[list[str]], str]) -> dict[str, str]:
    """The branches of the three `case` statements. `reply`: the statement that offers words."""
    values, words = [], []
    for command in commands:
        names = [name for flag in command.flags for name in flag.names]
        offered = reply([*command.commands, *names])
        words.append(f"        {shlex.quote(command.path)}) {offered} ;;")
        for flag in command.flags:
            if flag.values:
                pattern = "|".join(shlex.quote(f"{command.path} {name}") for name in flag.names)
                values.append(f"        {pattern}) {reply([*flag.values])}; return ;;")
    return {
        "commands": "|".join(shlex.quote(each.path) for each in commands[1:]),
        "values": "\n".join(values),
        "words": "\n".join(words),
    }


def _fish(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        begin = f"complete -c penstock -n {_fish_text(f'__penstock_at {command.path}')}"
        for name, summary in command.commands.items():
            lines.append(f"{begin} -f -a {_fish_text(name)} -d {_fish_text(summary)}")
        for flag in command.flags:
            words = [begin]
            for name in flag.names:
                words.append(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}")
            if flag.values:
                words.append(f"-x -a {_fish_text(' '.join(flag.values))}")
            elif flag.takes_value:
                words.append("-r")
            lines.append(" ".join([*words, f"-d {_fish_text(flag.help)}"]))
    paths = " ".join(_fish_text(each.path) for each in commands[1:])
    return FISH.format(commands=paths, lines="\n".join(lines))


def _fish_text(text: str) -> str:
    """A text in single quotes, in which fish knows two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
