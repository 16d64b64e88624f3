"""What the site needs beyond mkdocs (mkdocs.yml names this file): `make docs`, or `python -m mkdocs build --strict`.

1. Links out of docs/ lead to the same files on the site: whatever a page links to in evidence/, benchmarks/, examples/
   or beside README.md is copied, Python files as pages, folders as lists. In the repository the links stay as they are.
2. Notebooks become pages, with the outputs that are stored in them.
3. Reference pages are made of `__all__`, of the commands' own help, and of the settings of a training.
4. `<details>` may hold Markdown, as it may on code hosts, and `wellcond.gray` in a text leads to its reference.

Nothing is imported that needs torch, and nothing is fetched.
"""

import base64
import functools
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")([^)"#\s]+)(?=[)"#\s])')
NAME = re.compile(r"(?<![\[`])`(wellcond\.[\w.]+)`(?![\]`])")
UNLISTED = "---\nsearch:\n  exclude: true\n---\n"

REFERENCE = {  # a page, and the modules whose public names it shows
    "numerics": ("numerics",),
    "graying": ("graying",),
    "attention": ("attention",),
    "models": ("models", "models.sequence", "models.mae"),
    "probe": ("probe", "probe.lightning", "probe.transformers"),
    "stability": ("stability",),
    "data": ("data",),
    "train": ("train", "train.tasks", "train.loop", "train.checkpoint"),
    "records": ("records", "environment"),
    "report": ("report",),
    "theory": ("theory",),
    "verdicts": ("verdicts",),
    "claims": ("claims",),
    "words": ("words",),
    "usage": ("usage",),
    "plugins": ("plugins",),
}

sources: dict[str, Path] = {}  # a page of the site, and the file of the repository whose links it has


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add notebooks, reference pages, and what pages link to outside docs/."""
    sources.clear()
    sources.update({file.src_uri: DOCS / file.src_uri for file in files.documentation_pages()})
    for path in sorted(DOCS.rglob("*.ipynb")):
        _add(files, config, path, _notebook(path))
    for uri, text in _reference():
        files.append(File.generated(config, uri, content=text))
    for uri in _nav_uris(config.nav):
        if files.get_file_from_path(uri) is None and (ROOT / uri).is_file():
            _add(files, config, ROOT / uri, (ROOT / uri).read_text(encoding="utf-8"))
    seen = 0
    while seen < len(sources):  # a page that is added has links of its own
        for path in list(sources.values())[seen:]:
            seen += 1
            for target in _outside(path):
                _bring(files, config, target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page, open its <details> to Markdown, and link public names."""
    source = sources.get(page.file.src_uri)
    if source is None:  # generated whole, with the site's own links
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        return link[0] if target in (None, source) else link[1] + posixpath.relpath(_uri(target), here)

    def named(code: re.Match[str]) -> str:
        return f"[{code[0]}][{_anchor(_public()[code[1]])}]" if code[1] in _public() else code[0]

    def prose(line: str) -> str:
        line = LINK.sub(turned, line).replace("<details>", '<details markdown="1">')
        return line if line.startswith("#") else NAME.sub(named, line)

    return "\n".join(line if code else prose(line) for line, code in _lines(markdown))


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it belongs to a block of code."""
    code = False
    for line in markdown.split("\n"):
        fence = line.lstrip().startswith("```")
        yield line, code or fence
        code ^= fence


# ---- files of the repository on the site


def _target(source: Path, link: str) -> Path | None:
    """The file or folder of the repository that a link leads to; None for one that leads elsewhere, or nowhere."""
    if "://" in link or link.startswith("data:"):
        return None
    path = (source.parent / link).resolve()
    return path if path.exists() and ROOT in path.parents else None


def _outside(source: Path) -> Iterator[Path]:
    text = _notebook(source) if source.suffix == ".ipynb" else source.read_text(encoding="utf-8")
    for line, code in _lines(text):
        for link in () if code else LINK.finditer(line):
            target = _target(source, link[2])
            if target is not None and DOCS not in target.parents:
                yield target


def _uri(path: Path) -> str:
    """Where a file of the repository is on the site, before mkdocs makes it HTML."""
    inside = path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()
    if path.is_dir():
        return f"{inside}/index.md"
    return {".py": f"{inside}.md", ".ipynb": inside.removesuffix("ipynb") + "md"}.get(path.suffix, inside)


def _add(files: Files, config: MkDocsConfig, path: Path, text: str) -> None:
    sources[_uri(path)] = path
    files.append(File.generated(config, _uri(path), content=text))


def _bring(files: Files, config: MkDocsConfig, path: Path) -> None:
    """A file outside docs/, or a folder with all its files, unless it is there."""
    if files.get_file_from_path(_uri(path)) is not None:
        return
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        for file in inside:
            _bring(files, config, file)
        links = [f"- [{name}]({name})" for name in (file.relative_to(path).as_posix() for file in inside)]
        text = "\n".join([UNLISTED, f"# {path.relative_to(ROOT).as_posix()}", "", *links])
        files.append(File.generated(config, _uri(path), content=text))
    elif path.suffix == ".md":
        _add(files, config, path, path.read_text(encoding="utf-8"))
    elif path.suffix == ".py":
        text = f"{UNLISTED}# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, _uri(path), content=text))
    else:
        files.append(File.generated(config, _uri(path), abs_src_path=str(path)))


def _nav_uris(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for one in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _nav_uris(one)


# ---- notebooks


def _notebook(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [part for cell in cells for part in _cell(cell)]
    title, _, rest = parts[0].partition("\n\n")
    note = f'*A <a href="{path.name}" download>notebook</a>: download it and run it.*'
    return "\n\n".join([title, note, rest, *parts[1:]]) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = {
            kind: "".join(text) for kind, text in output.get("data", {"text/plain": output.get("text", "")}).items()
        }
        if "image/svg+xml" in shown:
            data = base64.b64encode(shown["image/svg+xml"].encode()).decode()
            yield f"![What the code above draws](data:image/svg+xml;base64,{data})"
        else:
            yield f"```text\n{shown['text/plain'].rstrip()}\n```"


# ---- reference


@functools.cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("wellcond", search_paths=[str(ROOT / "src")])


def _exports(module: str) -> list[str]:
    return sorted(map(str, _package()[module].exports or ()), key=str.lower)


def _found(path: str) -> griffe.Object | griffe.Alias:
    """What a path means in Python: of a function and the module of its name that it is imported from, the function."""
    found = _package()[path]
    return found[found.name] if found.is_module and found.name in found.members else found


@functools.cache
def _public() -> dict[str, str]:
    """Every public name by each path that it is imported from, and the path that it is shown under."""
    import wellcond

    shown = {_found(name).canonical_path: f"wellcond.{name}" for name in wellcond.__all__ if name != "__version__"}
    found = {path: path for path in shown.values()}
    modules = [module for page in REFERENCE.values() for module in page]
    for own in (True, False):  # what a package only passes on is shown where it comes from
        for module in modules:
            for name in _exports(module):
                canonical = _found(f"{module}.{name}").canonical_path
                if own == canonical.startswith(f"wellcond.{module}."):
                    found[f"wellcond.{module}.{name}"] = shown.setdefault(canonical, f"wellcond.{module}.{name}")
    return found


def _reference() -> Iterator[tuple[str, str]]:
    """A page for each entry of REFERENCE, and an overview."""
    rows, pages, done = [], [], set()
    for page, modules in REFERENCE.items():
        parts = []
        for module in modules:
            about = _docstring(_package()[module])
            parts += [f"# wellcond.{module}" if module == page else f"## wellcond.{module}", about]
            elsewhere = []
            for name in _exports(module):
                path = _public()[f"wellcond.{module}.{name}"]
                if path in done or path.rpartition(".")[0] not in ("wellcond", f"wellcond.{module}"):
                    elsewhere.append(f"[`{name}`][{_anchor(path)}]")
                    continue
                done.add(path)
                parts.append(_entry(path, f"wellcond.{module}.{name}", level=2 if module == page else 3))
                if path == f"wellcond.{name}":
                    rows.append(f"| [`{path}`][{_anchor(path)}] | {_first(_docstring(_found(name)))} |")
            parts += [f"Also here: {', '.join(elsewhere)}."] if elsewhere else []
        pages.append(f"- [wellcond.{page}]({page}.md): {_first(_docstring(_package()[page]))}")
        yield f"reference/{page}.md", "\n\n".join(parts) + "\n"
    table = ["| name | what it is |", "|---|---|", *rows]
    yield "reference/index.md", "\n".join(["# Reference", "", INDEX, *table, "", "## By package", "", *pages]) + "\n"
    yield "reference/commands.md", _commands()
    yield "reference/settings.md", _settings()


def _anchor(path: str) -> str:
    """The path that mkdocstrings knows a name by: it would take a module for the function of the same name."""
    found = _package()[path.removeprefix("wellcond.")]
    return _found(path.removeprefix("wellcond.")).canonical_path if found.is_module else path


def _entry(path: str, alias: str, *, level: int) -> str:
    options, name = f"    options:\n      heading_level: {level}\n", path.rpartition(".")[2]
    if _anchor(path) == path:
        return f"::: {path}\n{options}"
    anchors = "".join(f"[](){{#{one}}}\n" for one in {path: 0, alias: 0})
    return f"{anchors}\n::: {_anchor(path)}\n{options}      heading: {path}\n      toc_label: {name}\n"


INDEX = """\
Every public name, from its docstring. The names in this table are imported as `wellcond.NAME`; the packages below hold
them and the rest. On the command line there are [commands](commands.md), and a training has [settings](settings.md).

"""
SETTINGS = """\
`wellcond train RECIPE --set NAME=VALUE` takes any of these, and `wellcond train --settings` prints them. A recipe
changes some of the defaults shown here.
"""


def _docstring(of: griffe.Object | griffe.Alias) -> str:
    return of.docstring.value if of.docstring else ""


def _first(text: str) -> str:
    return text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _commands() -> str:
    """Every command with its arguments and options, from its own help."""
    from wellcond.cli import app

    parts = ["# Commands", "", "What `wellcond COMMAND --help` says of each."]

    def walk(command: Any, name: str) -> None:
        for word, one in getattr(command, "commands", {}).items():
            walk(one, f"{name} {word}")
        if not hasattr(command, "commands"):
            context = typer.Context(command)
            shown = [one for one in command.params if not getattr(one, "hidden", False)]
            usage = " ".join([name, *command.collect_usage_pieces(context)]).removesuffix(" [KEY=VALUE]...")
            parts.extend(["", f"## {name}", "", command.help or "", "", "```sh", usage, "```", ""])
            records = [record for record in (one.get_help_record(context) for one in shown) if record]
            parts.extend(["| option | what it does |", "|---|---|"] if records else [])
            parts.extend(f"| `{option}` | {words.replace('[', chr(92) + '[')} |" for option, words in records)

    walk(typer.main.get_command(app), "wellcond")
    return "\n".join(parts) + "\n"


def _settings() -> str:
    """Every field of a training, by group: `wellcond train --settings` as a page."""
    from wellcond.train.config import Config
    from wellcond.train.settings import about, fields_of, groups, own_fields, title

    fields = {field.name: field for field in fields_of(Config)}
    parts = ["# Settings of a training", "", SETTINGS]
    for group in groups(Config):
        lines = about(group)
        parts += [f"## {title(group)}", "", "| setting | default | what it does |", "|---|---|---|"]
        for name in own_fields(group):
            default = f"`{fields[name].as_text()}`" if fields[name].as_text() else ""
            limits = f"({fields[name].in_words()})" if fields[name].range else ""
            parts.append(f"| `{name}` | {default} | {lines.get(name, '').replace('|', chr(92) + '|')} {limits} |")
        parts.append("")
    return "\n".join(parts) + "\n"
