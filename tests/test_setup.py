"""scripts/setup.sh on made-up machines: which interpreter and JAX packages it chooses, and what it says if none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What the script itself needs; the rest of PATH is the test's own folder.
TOOLS = ("bash", "dirname")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """An empty machine: a PATH without any Python, uv or NVIDIA driver, and an empty home."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    for tool in TOOLS:
        found = next(Path(d) / tool for d in os.environ["PATH"].split(":") if (Path(d) / tool).is_file())
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def executable(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{ROOT.anchor}bin/sh\n{body}\n")
    file.chmod(0o755)


def setup(machine: Path, what: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), what],
        env={"PATH": str(machine / "bin"), "HOME": str(machine / "home"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


RUNS = f'exec "{sys.executable}" "$@"'


def test_name_on_path_that_fails_when_run_is_passed_over(machine: Path) -> None:
    executable(machine / "bin" / "python3.13", 'echo "python3.13: command not found" >&2; exit 127')
    executable(machine / "bin" / "python3", RUNS)
    done = setup(machine, "python")
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable), done.stderr


def test_python_without_venv_module_or_too_old_is_passed_over(machine: Path) -> None:
    executable(machine / "bin" / "python3.12", 'echo "No module named ensurepip" >&2; exit 1')
    executable(machine / "home" / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3", RUNS)
    assert setup(machine, "python").stdout.strip() == sys.executable


def test_python_of_pyenv_root(machine: Path) -> None:
    executable(machine / "elsewhere" / "versions" / "3.13.1" / "bin" / "python3", RUNS)
    assert setup(machine, "python", PYENV_ROOT=str(machine / "elsewhere")).stdout.strip() == sys.executable


def test_python_through_uv(machine: Path) -> None:
    executable(machine / "bin" / "uv", f'[ "$1 $2" = "python find" ] && echo "{sys.executable}"')
    assert setup(machine, "python").stdout.strip() == sys.executable


def test_uv_is_asked_to_install_when_nothing_is_there(machine: Path) -> None:
    installed = machine / "installed"
    body = f"""
case "$2" in
  install) : >"{installed}" ;;
  find) [ -e "{installed}" ] && echo "{sys.executable}" ;;
esac"""
    executable(machine / "bin" / "uv", body)
    assert setup(machine, "python").stdout.strip() == sys.executable


def test_no_python_says_what_to_do(machine: Path) -> None:
    done = setup(machine, "python")
    assert done.returncode != 0
    assert "No usable Python >= 3.12" in done.stderr
    assert "PYTHON=" in done.stderr


def test_chosen_python_must_work(machine: Path) -> None:
    executable(machine / "bin" / "python3", RUNS)
    executable(machine / "old" / "python3", "exit 1")
    done = setup(machine, "python", PYTHON=str(machine / "old" / "python3"))
    assert done.returncode != 0
    assert f"PYTHON={machine / 'old' / 'python3'}" in done.stderr


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("580.65.06", "cuda"),
        ("610.10", "cuda"),
        ("575.57.08", "cuda12"),
        ("525.60.13", "cuda12"),
        ("470.256.02", "base"),
    ],
)
def test_driver_decides_the_packages(machine: Path, driver: str, expected: str) -> None:
    executable(machine / "bin" / "nvidia-smi", f"echo {driver}; echo {driver}")
    done = setup(machine, "accelerator")
    assert done.stdout.strip() == expected
    assert ("older than 525" in done.stderr) == (expected == "base")


def test_without_a_driver_it_is_the_cpu(machine: Path) -> None:
    assert setup(machine, "accelerator").stdout.strip() == "base"
    executable(machine / "bin" / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert setup(machine, "accelerator").stdout.strip() == "base"


def sanitize(machine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "sanitize.sh"), *arguments],
        env={"PATH": str(machine / "bin"), "HOME": str(machine / "home"), "CUDA_HOME": str(machine / "cuda")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_sanitizers_run_with_allocations_of_their_own(machine: Path) -> None:
    tool = machine / "cuda" / "bin" / "compute-sanitizer"
    executable(tool, 'echo "$XLA_PYTHON_CLIENT_ALLOCATOR" "$@"')
    first, second = sanitize(machine).stdout.splitlines()
    assert first.startswith("platform --tool memcheck")
    assert second.startswith("platform --tool racecheck")
    assert first.endswith("-m pytest --gpu -p no:cacheprovider tests/kernels")
    assert sanitize(machine, "-k", "fetch").stdout.splitlines()[1].endswith(" -k fetch")


def test_finding_of_a_sanitizer_is_a_failure(machine: Path) -> None:
    executable(machine / "cuda" / "bin" / "compute-sanitizer", "exit 99")
    assert sanitize(machine).returncode == 99


def test_missing_sanitizer_is_named(machine: Path) -> None:
    done = sanitize(machine)
    assert done.returncode == 1
    assert "compute-sanitizer is not here: install the CUDA toolkit" in done.stderr
