"""The command group: where its commands come from, and what errors become."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from decodekit.core import absent
from decodekit.core.cli import app

BUILT_IN = ("serve", "chat", "generate", "explain", "doctor", "demo", "presets", "schema", "plugin")
Install = Callable[[str, str], None]


def call(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one entry point, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str, source: str) -> None:
        module = f"{name}_{tmp_path.name}"  # its own in each test, as modules stay imported
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[decodekit]\n{name} = {module}\n")

    return add


ACME = """
    from decodekit import hookimpl
    from decodekit.core.stage import CommandSpec

    def greet(name: str = "you") -> None:
        "Greet someone."
        print(f"hello {name}")

    @hookimpl
    def decodekit_commands():
        return [CommandSpec("greet", greet, aliases=("hail",))]
"""


def test_help_lists_every_built_in_command() -> None:
    result = call("--help")

    assert result.exit_code == 0
    assert all(f" {name} " in result.output for name in BUILT_IN)


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from decodekit.core.cli import app\n"
        "for args in (['--help'], ['chat', '--help'], ['chat', '--temperature', '-1']):\n"
        "    assert CliRunner().invoke(app, args).output\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "decodekit", "--version"], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("decodekit ")


def test_no_argument_shows_the_help() -> None:
    assert "Commands" in call().output


@pytest.mark.parametrize("row", absent.COMMANDS, ids=lambda row: row.name)
def test_an_absent_command_is_refused_with_its_sentence(row: absent.Absent) -> None:
    result = call(row.name, "--some-flag", "value")

    assert result.exit_code == 2
    assert result.stderr == f"error: {row.sentence()}\n"


@pytest.mark.parametrize("option", ["--tool-server", "--tensor-parallel-size", "--quantization"])
def test_an_absent_option_is_refused_with_its_sentence(option: str) -> None:
    result = call("chat", option, "2")

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: the option {option} is not in this version of")


def test_a_misspelt_option_keeps_the_parsers_suggestion() -> None:
    result = call("chat", "--temprature", "1")

    assert result.exit_code == 2
    assert "--temperature" in result.output


def test_an_unknown_command_is_refused_with_a_suggestion() -> None:
    result = call("chta")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: there is no command 'chta'")
    assert result.stderr.endswith("did you mean 'chat'?\n")


def test_bad_input_is_one_sentence_and_exit_code_2() -> None:
    result = call("explain", "--temperature", "-1")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: temperature must be")
    assert result.stderr.count("\n") == 1


def test_debug_adds_the_traceback() -> None:
    result = call("explain", "--temperature", "-1", "--debug")

    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "error: temperature must be" in result.stderr


def test_an_installed_plugin_adds_a_command(install: Install) -> None:
    install("acme", ACME)

    assert "Greet someone." in call("--help").output
    assert call("greet", "--name", "Ada").output == "hello Ada\n"
    assert call("hail").output == "hello you\n"


def test_the_environment_decides_which_plugins_add_commands(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", ACME)
    monkeypatch.setenv("DECODEKIT_PLUGINS", "")

    assert call("greet").exit_code == 2
    assert "Greet someone." not in call("--help").output


def test_a_plugin_cannot_take_a_built_in_command(install: Install) -> None:
    install("acme", ACME.replace('"greet"', '"plugin"'))

    assert "check and reload plugins" in call("plugin", "--help").output


def test_a_broken_plugin_leaves_the_commands_that_show_it(install: Install) -> None:
    install("broken", "raise RuntimeError('boom')")

    listed = call("plugin", "list")
    with pytest.warns(RuntimeWarning, match="broken.*boom"):
        helped = call("--help")

    assert listed.exit_code == 0
    assert "quarantined" in listed.output
    assert all(f" {name} " in helped.output for name in BUILT_IN)


def test_an_unknown_name_in_the_environment_leaves_the_built_in_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DECODEKIT_PLUGINS", "nosuch")

    result = call("--help")

    assert result.exit_code == 0
    assert "warning: DECODEKIT_PLUGINS: no plugin" in result.stderr
    assert all(f" {name} " in result.stdout for name in BUILT_IN)


def test_a_command_that_cannot_be_built_costs_a_warning(install: Install) -> None:
    install("acme", ACME.replace("name: str", "name: 'Nosuch'"))

    result = call("--help")

    assert result.exit_code == 0
    assert "warning: the command 'greet' cannot be used" in result.stderr
    assert " chat " in result.stdout


def test_ctrl_c_ends_with_130(install: Install) -> None:
    install("acme", ACME.replace('print(f"hello {name}")', "raise KeyboardInterrupt"))

    assert call("greet").exit_code == 130


def test_an_unexpected_error_is_not_hidden(install: Install) -> None:
    install("acme", ACME.replace('print(f"hello {name}")', "1 / 0"))

    assert isinstance(call("greet").exception, ZeroDivisionError)
