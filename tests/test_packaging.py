"""The wheel: plain folders under one name, complete, and usable next to a user's own train.py and serve.py."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_project import LINKED, ROOT, project_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy of the project's files, links kept as links."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in (*project_files(), *(Path("sparda_jax") / name for name in LINKED)):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, source / file, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    # From another folder, as a user may.
    subprocess.run([*command, "--wheel-dir", str(out), str(source)], cwd=out, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked by pip into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True)
    return target


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    expected = set()
    for file in project_files():
        if file.parts[0] in LINKED:
            expected.add(f"sparda_jax/{file.as_posix()}")
        elif file.parts[0] == "sparda_jax":
            expected.add(file.as_posix())
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_linked_packages_are_plain_folders(installed: Path) -> None:
    for name in LINKED:
        folder = installed / "sparda_jax" / name
        assert folder.is_dir()
        assert not folder.is_symlink()
        assert not (installed / name).exists(), f"{name} must not stand at the top of site-packages"


def test_a_users_own_train_and_serve_are_not_in_the_way(installed: Path, tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user\\'s own file was imported')\n")
    env = {**os.environ, "PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    code = (
        "import sparda_jax, sparda_jax.serve, sparda_jax.train, sparda_jax.pallas_kernels; print(sparda_jax.__file__)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert Path(shown.strip()).is_relative_to(installed)
    for module in ("serve", "convert", "pretrain"):
        subprocess.run(
            [sys.executable, "-m", f"sparda_jax.{module}", "--help"],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.DEVNULL,
            check=True,
        )


def test_console_script(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    script = installed / "bin" / "sparda-jax"
    shown = subprocess.run(
        [sys.executable, str(script), "--version"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    version = next(installed.glob("sparda_jax-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    assert shown.stdout.strip() == version
    listed = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert all(command in listed.stdout for command in ("convert", "serve", "pretrain"))
