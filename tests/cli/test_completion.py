"""`zero-infinity completion`: what a shell offers after the script was read."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from zero_infinity.cli.main import COMMANDS, main


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    line = " ".join(("zero-infinity", *words))
    asked = f"""{script}
COMP_WORDS=(zero-infinity {" ".join(repr(word) for word in words)}); COMP_CWORD={len(words)}; COMP_LINE={line!r}
_zero_infinity; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    result = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout.split()


def test_bash_offers_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "") == [*COMMANDS, "--help", "--version"]
    assert completed(script, "ge") == ["generate"]
    assert completed(script, "train", "--lora") == ["--lora", "--lora-targets"]
    assert completed(script, "train", "--stage", "") == ["0", "1", "2", "3"]
    assert completed(script, "bench", "h") == ["hardware"]
    assert completed(script, "completion", "") == ["bash", "fish", "zsh", "--help"]
    assert completed(script, "train", "some-file") == []  # then bash offers files


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_other_shells_have_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*COMMANDS, "lora-targets", "max-new-tokens"))
    if (found := shutil.which(shell)) is not None:
        subprocess.run([found, "--no-execute"], input=script, text=True, check=True)


def test_fish_keeps_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "fish"])
    line = next(line for line in capsys.readouterr().out.splitlines() if " -l data " in line)
    assert "Python\\'s standard library" in line
