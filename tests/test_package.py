"""What a user installs: wheel and sdist are built, installed into an environment of their own, and tried."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import wellcond

ROOT = Path(__file__).parent.parent


def build(folder: Path, kind: str, output: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(output)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return next(path for path in output.iterdir() if path.name.endswith((".whl", ".tar.gz")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the sdist, as by whoever has nothing else."""
    folder = tmp_path_factory.mktemp("built")
    sdist = build(ROOT, "sdist", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    inside = folder / sdist.name.removesuffix(".tar.gz")
    for name in ("README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "Makefile", "mkdocs.yml", "tests", "evidence"):
        assert (inside / name).exists(), name
    return build(inside, "wheel", folder / "wheel")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An environment that has the wheel, and sees the packages of this one, but not this source tree."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-compile", "--disable-pip-version-check", str(wheel)], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(command: list[str | Path], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_what_the_tree_has(wheel):
    source = ROOT / "src"
    ours = {path.relative_to(source).as_posix() for path in (source / "wellcond").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("wellcond/")}
    assert names == {name for name in ours if "__pycache__" not in name}
    assert {"wellcond/py.typed", "wellcond/report/page.css"} <= names


def test_an_installed_wheel_works(installed, tmp_path):
    where = run([installed / "python", "-c", "import wellcond; print(wellcond.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    page = "from wellcond.report import Page; print(Page('A page', 'Its lead.').to_html())"
    assert "<style>" in run([installed / "python", "-c", page], tmp_path)
    assert "measure" in run([installed / "wellcond", "--help"], tmp_path)
    assert wellcond.__version__ in run([installed / "wellcond", "info"], tmp_path)


def test_the_readme_makes_sense_without_the_repository(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in headers
    assert text.startswith("# wellcond")
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    assert [one for one in map("".join, targets) if not one.startswith(("https://", "#"))] == []


def test_with_a_home_the_readme_keeps_its_links_and_pictures():
    import runpy

    outside = runpy.run_path(str(ROOT / "hatch_build.py"))["outside"]
    readme = (
        '<picture><img src="docs/a.png"></picture>\n\n[one](docs/one.md#part), [two](https://b.org), [three](#here)'
    )
    assert outside(readme, "https://a.org/w/") == (
        '<picture><img src="https://a.org/w/raw/HEAD/docs/a.png"></picture>\n\n'
        "[one](https://a.org/w/blob/HEAD/docs/one.md#part), [two](https://b.org), [three](#here)"
    )
    assert outside(readme, None) == "one, [two](https://b.org), [three](#here)"


def test_the_version_is_the_same_everywhere():
    release = wellcond.__version__.partition(".dev")[0]
    assert f'version = "{wellcond.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["version"], cited["license"]) == (release, "Apache-2.0")
    changes = re.findall(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert changes[0] == release
