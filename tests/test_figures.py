"""`specker figures`: the files, the table, the verdicts and the exit code."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from specker import figures
from specker.cli_theory import register
from specker.theory import Simulation, Statement, article, check_statements, simulate_article, statements

NAMES = ("1-envelopes", "2-candidates", "3-histograms", "4-mass", "5-speedup")


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return simulate_article(seed=1)


@pytest.fixture(scope="module")
def checked(simulation: Simulation) -> list[Statement]:
    return check_statements(simulation)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, simulation: Simulation) -> typer.Typer:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr("specker.theory.simulate_article", lambda seed: simulation)
    application = typer.Typer()
    # A callback keeps the names of the commands, as in an application with more of them.
    application.callback()(lambda: None)
    register(application)
    return application


def run(app: typer.Typer, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["figures", *arguments])


def test_every_statement_holds(checked: list[Statement]) -> None:
    assert [statement.quantity for statement in checked if not statement.passed] == []
    assert len({statement.quantity for statement in checked}) == len(checked) == 27


def test_command_writes_ten_pictures_and_a_table(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: list[Statement]
) -> None:
    monkeypatch.setattr("specker.theory.check_statements", lambda simulation: checked)
    result = run(app, "--out", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        f"{name}.{suffix}" for name in NAMES for suffix in ("png", "svg")
    )
    for heading in ("stated", "computed", "simulated", "within tolerance"):
        assert heading in result.output
    for number in ("5.73807", "0.2295", "0.521643", "22.1749", "9.92523", "3.95959", "1.98079"):
        assert number in result.output
    assert "It is 4.388" in result.output
    for name in NAMES:
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        picture = (tmp_path / "new" / f"{name}.svg").read_text()
        assert "</svg>" in picture


def test_axes_have_labels_with_units(simulation: Simulation) -> None:
    drawings = (figures._envelopes, figures._candidates, figures._histograms, figures._mass, figures._speedup)
    for drawing in drawings:
        for axis in drawing(simulation).axes:
            assert axis.get_xlabel() == "token" or "(" in axis.get_xlabel()
            assert "(" in axis.get_ylabel()
            assert axis.get_legend() is not None


def test_lines_differ_without_colour(simulation: Simulation) -> None:
    left = figures._speedup(simulation).axes[0]
    curves = [line for line in left.lines if str(line.get_label()).startswith("α")]
    assert len({(line.get_linestyle(), line.get_marker()) for line in curves}) == len(figures.ALPHAS)
    stars = [np.asarray(line.get_xydata())[0] for line in left.lines if line.get_marker() == "*"]
    for curve, star in zip(curves, stars, strict=True):
        points = np.asarray(curve.get_xydata())
        assert points[points[:, 1].argmax()] == pytest.approx(star)


def test_a_wrong_number_fails_the_command(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: list[Statement]
) -> None:
    wrong = [checked[0]._replace(passed=False), *checked[1:]]
    monkeypatch.setattr("specker.theory.check_statements", lambda simulation: wrong)
    monkeypatch.setattr("specker.figures.draw_figures", lambda directory, simulation: [])
    result = run(app, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "1 of 27 statements are off" in result.output
    assert "NO" in result.output


def test_a_wrong_statement_is_noticed(monkeypatch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    monkeypatch.setattr(article, "PRINTED_SPEEDUP", 1.99)
    monkeypatch.setattr(article, "ACCEPTANCES", (0.2296, 0.5216))
    lines = [
        *statements._rounds(simulation.rounds),
        *statements._proposal(article.UNIFORM, 25.0, simulation.uniform, 0),
    ]
    off = [statement.quantity for statement in lines if not statement.passed]
    assert off == ["speed-up there", "uniform, C = 25: acceptance"]


def test_a_biased_simulation_is_noticed(simulation: Simulation) -> None:
    tokens = simulation.tokens._replace(final=simulation.tokens.final + np.array([300, -300, 0]))
    rounds = simulation.rounds._replace(emitted=simulation.rounds.emitted + 1000)
    off = [
        statement.quantity
        for statement in [*statements._discrete(tokens), *statements._rounds(rounds)]
        if not statement.passed
    ]
    assert off == ["final, cat", "final, dog", "emitted in a round, gamma = 4", "speed-up there"]


def test_missing_matplotlib_is_said(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulation: Simulation
) -> None:
    real_import = builtins.__import__

    def without(package: str) -> None:
        def fake_import(name: str, *arguments: Any, **options: Any) -> Any:
            if name.startswith("matplotlib"):
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            return real_import(name, *arguments, **options)

        monkeypatch.setattr(builtins, "__import__", fake_import)

    without("matplotlib")
    with pytest.raises(figures.FiguresUnavailableError, match=r"pip install 'specker\[figures\]'"):
        figures.draw_figures(tmp_path, simulation)
    result = run(app, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "figures need matplotlib" in result.output
    # A matplotlib that is there but broken is another matter.
    without("kiwisolver")
    with pytest.raises(ModuleNotFoundError, match="kiwisolver"):
        figures.draw_figures(tmp_path, simulation)


def test_theory_needs_neither_matplotlib_nor_transformers() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = sys.modules['transformers'] = None; "
        "import specker.theory, specker.figures, specker.cli_theory; print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "imported\n"
