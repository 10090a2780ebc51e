"""The documentation: links and sections exist, every page is in the navigation, and no page loads from another host."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("results/*.md")])
CAPTIONS = ["Start", "How to", "IPU", "Reference", "Method", "Contributing"]


def prose(page):
    """Returns the page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", lambda code: "`" + code.group()[1:-1].replace("]", "") + "`", text)


def anchors(page):
    """Returns the names that GitHub gives the headings of a page."""
    names = set()
    for line in prose(page).splitlines():
        match = re.match(r"#{1,6} (.*)", line)
        if match:
            name = re.sub(r"[^\w\- ]", "", match.group(1).strip().lower()).replace(" ", "-")
            count = sum(1 for other in names if re.fullmatch(re.escape(name) + r"(-\d+)?", other))
            names.add(f"{name}-{count}" if count else name)
    return names


def broken_links(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        exists = file.exists() and ROOT in [file, *file.parents]
        if not exists or (anchor and (file.suffix != ".md" or anchor not in anchors(file))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_valid(page):
    assert broken_links(page) == []


def test_a_broken_link_is_reported(tmp_path):
    page = DOCS / "install.md"
    assert "completion" in anchors(page)
    other = tmp_path / "x.md"
    other.write_text(
        "[a](nowhere.md) [b](#none) `[c](x)`\n```\n[d](y)\n```\n# One\n[e](https://example.org)\n"
    )
    assert broken_links(other) == ["nowhere.md", "#none"]


def test_every_page_is_in_the_navigation_once():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```{toctree}\n:hidden:\n:caption: ([^\n]*)\n\n(.*?)\n```", text, flags=re.S)
    assert [caption for caption, _ in trees] == CAPTIONS
    listed = [name for _, names in trees for name in names.split()]
    pages = [page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(page for page in pages if page != "index")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site."""
    missing = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the site is built with the extra 'docs'; {', '.join(missing)} not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        *["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"],
        str(DOCS),
        str(folder),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def fetched(text):
    """Returns what a browser would load from another host: scripts, styles, fonts, pictures, frames."""
    tags = r"<(?:script|img|iframe|source|video|audio|embed|object|image)\b[^>]*?(?:src|href|data)=[\"']?(?:https?:)?//"
    kinds = "stylesheet|preload|icon|modulepreload|preconnect|dns-prefetch"
    links = rf"<link\b(?=[^>]*rel=[\"']?(?:{kinds}))[^>]*href=[\"']?(?:https?:)?//"
    styles = r"(?:@import\s+|url\()\s*[\"']?(?:https?:)?//"
    return re.findall(f"{tags}[^\"'> ]*|{links}[^\"'> ]*|{styles}[^\"') ]*", text)


@pytest.mark.parametrize(
    "text, count",
    [
        ('<script src="https://a.org/x.js">', 1),
        ("<link rel=stylesheet href=//a.org/x.css>", 1),
        ('<a href="https://a.org">', 0),
        ("@font-face { src: url('https://a.org/f.woff2') }", 1),
        ('<img src="../images/x.png">', 0),
    ],
)
def test_external_resources_are_recognised(text, count):
    assert len(fetched(text)) == count


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(site):
    pages = [file for file in site.rglob("*") if file.suffix in (".html", ".css", ".svg", ".js")]
    assert len(pages) > 25
    assert {file.name: fetched(file.read_text(encoding="utf-8")) for file in pages} == {
        file.name: [] for file in pages
    }


def test_pictures_of_terminals_load_nothing_from_other_hosts():
    pictures = sorted((DOCS / "images").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert fetched(picture.read_text(encoding="utf-8")) == []
