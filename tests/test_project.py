"""The project as a whole: import names and directions, links, dependencies, locks, README, and nothing that leaks."""

import ast
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparda_jax.assets import BUNDLED_MODEL

ROOT = Path(__file__).parents[1]
LINKED = ("pallas_kernels", "train", "serve")
LOCKS = ("base", "dev", "cuda", "cuda12", "h200-compiler")
# Imported only where installed (conversion checks against them, curves are drawn with one, files of training data are
# read with two); never required.
OPTIONAL = {"matplotlib", "pyarrow", "torch", "transformers", "zstandard"}
# Libraries of the server and of the tests, which the model, the kernels and the training must run without.
NOT_IN_CORE = {
    "beartype",
    "fastapi",
    "grain",
    "llguidance",
    "openai",
    "pydantic",
    "pydantic_core",
    "starlette",
    "uvicorn",
}


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Files that are in git or would be added, relative to the root; a deleted file is left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return tuple(Path(name) for name in sorted(set(listed.stdout.split("\0"))) if name and (ROOT / name).is_file())


def python_files(*folders: str) -> list[Path]:
    """Python files of the named top-level folders, or of the whole project."""
    return [f for f in project_files() if f.suffix == ".py" and (not folders or f.parts[0] in folders)]


def module_name(file: Path) -> str:
    """The name that a file is imported under: ``train/loss.py`` is ``sparda_jax.train.loss``."""
    parts = [*file.with_suffix("").parts]
    if parts[0] in LINKED:
        parts.insert(0, "sparda_jax")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[str]:
    """Absolute names of everything that a file imports, at any depth of its code."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse((ROOT / file).read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = [*start, *([node.module] if node.module else [])]
            # `from a.b import c` may name the module a.b.c.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_linked_packages_are_imported_under_one_name() -> None:
    wrong = [f"{f}: {name}" for f in python_files() for name in imports(f) if name.split(".")[0] in LINKED]
    assert not wrong, f"import these as sparda_jax.<name>: {wrong}"


def test_links_are_relative_and_in_git() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s", "sparda_jax"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    links = {line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")}
    assert links == {f"sparda_jax/{name}" for name in LINKED}
    for name in LINKED:
        assert str((ROOT / "sparda_jax" / name).readlink()) == f"../{name}"


def test_imports_point_one_way() -> None:
    wrong = []
    for file in python_files("sparda_jax", *LINKED):
        for name in imports(file):
            if not inside(name, "sparda_jax"):
                continue
            layer = file.parts[0]
            if layer == "pallas_kernels":
                allowed = inside(name, "sparda_jax.pallas_kernels")
            else:
                above = {"sparda_jax": ("train", "serve"), "train": ("serve",), "serve": ("train",)}[layer]
                allowed = not any(inside(name, f"sparda_jax.{other}") for other in above)
            if not allowed:
                wrong.append(f"{file}: {name}")
    assert not wrong, f"pallas_kernels <- the rest of sparda_jax <- train, serve: {wrong}"


def test_core_runs_without_the_libraries_of_server_and_tests() -> None:
    files = python_files("sparda_jax", "pallas_kernels", "train")
    wrong = [f"{f}: {name}" for f in files for name in imports(f) if name.split(".")[0] in NOT_IN_CORE]
    assert not wrong, wrong


def test_package_imports_no_tests() -> None:
    files = python_files("sparda_jax", *LINKED)
    wrong = [f"{f}: {name}" for f in files for name in imports(f) if inside(name, "tests")]
    assert not wrong, wrong


@functools.cache
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(extra: str | None = None) -> dict[str, Requirement]:
    """Requirements of the project or of one extra, by canonical name."""
    project = pyproject()["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def third_party_imports(*folders: str) -> dict[str, str]:
    """Distribution name -> one file that imports it; names without a distribution stand for themselves."""
    owners = importlib.metadata.packages_distributions()
    found = {}
    for file in python_files(*folders):
        for name in imports(file):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in ("sparda_jax", "tests"):
                continue
            found[canonicalize_name(owners.get(top, [top])[0])] = str(file)
    return found


def test_dependencies_are_what_the_code_imports() -> None:
    imported, declared = third_party_imports("sparda_jax", *LINKED), requirements()
    missing = {name: file for name, file in imported.items() if name not in declared and name not in OPTIONAL}
    assert not missing, f"imported, but not among pyproject.toml's dependencies: {missing}"
    unused = set(declared) - set(imported)
    assert not unused, f"among pyproject.toml's dependencies, but imported nowhere: {unused}"


def test_tests_import_only_declared_packages() -> None:
    missing = {
        name: file
        for name, file in third_party_imports("tests").items()
        if name not in requirements() | requirements("dev") and name not in OPTIONAL
    }
    assert not missing, f"imported by tests, but not in the dev extra: {missing}"


@functools.cache
def lock(name: str) -> dict[str, str]:
    """Package -> version of one lock file."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    return dict(re.findall(r"^([a-z0-9.-]+)==([^ ;\\]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", LOCKS)
def test_lock_names_no_place_and_hashes_every_package(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    assert not re.search(r"://|^-|\s@\s", text, re.MULTILINE), "a lock must be valid for any package index"
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(lock(name))
    unhashed = [entry for entry in entries if "--hash=sha256:" not in entry]
    assert not unhashed


@pytest.mark.parametrize(("name", "extra"), [("base", None), ("dev", "dev"), ("cuda", "cuda"), ("cuda12", "cuda12")])
def test_lock_satisfies_pyproject(name: str, extra: str | None) -> None:
    for package, requirement in (requirements() | (requirements(extra) if extra else {})).items():
        version = lock(name).get(package)
        assert version is not None, f"{package} is missing in requirements/{name}.lock: run make lock"
        assert requirement.specifier.contains(version), f"{package}=={version} in {name}.lock is not {requirement}"


def test_locks_agree_with_each_other() -> None:
    versions: dict[str, set[str]] = {}
    for name in LOCKS:
        for package, version in lock(name).items():
            versions.setdefault(package, set()).add(version)
    assert not {package: found for package, found in versions.items() if len(found) > 1}


def test_jax_range() -> None:
    for requirement in (requirements()["jax"], requirements("cuda")["jax"], requirements("cuda12")["jax"]):
        assert [requirement.specifier.contains(v) for v in ("0.11.1", "0.11.2", "0.12.5", "0.13.0")] == [
            False,
            True,
            True,
            False,
        ]
    assert lock("base")["jax"] == "0.11.2"
    assert lock("cuda")["jax-cuda13-plugin"] == lock("cuda12")["jax-cuda12-plugin"] == "0.11.2"


# Written with one-letter classes, so that this list does not match itself.
LEAKS = re.compile(
    r"(^|[^A-Za-z0-9_.])/(wor[k]|roo[t]|far[m]|hom[e])/"
    r"|/op[t]/py|\.\./share[d]\b|\bshare[d]/(golden|spec)"
    r"|py[p]i\.org|python[h]osted|npm[j]s\.(org|com)|deb\.debia[n]\.org|download\.pytorc[h]"
    r"|a-see[d]-|\bclaud[e]\b|\banthropi[c]\b|\bsub-?agent[s]?\b|\bhook[s]/before-stop",
    re.IGNORECASE | re.MULTILINE,
)


def test_files_name_no_machine_and_no_host() -> None:
    leaks = []
    for file in project_files():
        try:
            text = (ROOT / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        leaks += [f"{file}: {match.group()!r}" for match in LEAKS.finditer(text)]
    assert not leaks, leaks


@functools.cache
def readme_commands() -> tuple[str, ...]:
    """Lines of README's shell blocks, continuation lines joined."""
    blocks = re.findall(
        r"^```(?:bash|sh|console)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return tuple(line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip())


def test_readme_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`make ([a-z-]+)", text)) | {
        match.group(1) for line in readme_commands() if (match := re.match(r"make ([a-z-]+)", line))
    }
    assert {"serve", "test"} <= named
    assert named <= targets, f"README or CONTRIBUTING names make targets that do not exist: {named - targets}"


@pytest.mark.parametrize("module", ["convert", "plan", "serve", "pretrain", "train"])
def test_readme_flags_exist(module: str) -> None:
    used: set[str] = set()
    for line in readme_commands():
        command = re.search(rf"(?:python -m sparda_jax\.|sparda-jax ){module}\b([^#]*)", line)
        if module == "serve" and command is None:
            command = re.match(r'make serve ARGS="([^"]*)"', line)
        if command:
            used |= set(re.findall(r"--[a-z][a-z0-9-]*", command.group(1)))
    shown = subprocess.run(
        [sys.executable, "-m", f"sparda_jax.{module}", "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "--help" in shown
    offered = set(re.findall(r"--[a-z][a-z0-9-]*", shown))
    assert used <= offered, f"README names options that {module} does not have: {used - offered}"


@pytest.mark.parametrize("number", [0, 1])
def test_readme_python_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """README's Python code, word for word, with the bundled model in place of the one that a reader would have."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    code, replaced = re.subn(r'"models/[^"]*"', repr(str(BUNDLED_MODEL)), blocks[number])
    assert replaced == 1
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_readme_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
        missing = [target for target in targets if not (ROOT / target).exists()]
        assert not missing, f"{name} links to files that do not exist: {missing}"
