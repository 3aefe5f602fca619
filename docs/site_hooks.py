"""What `mkdocs build` does beside: links that leave docs/ become text, pictures come along.

And every link is checked. The pages are read in the repository too, where a link to a source
file leads to it. A site has no source files.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures outside docs/ that a page shows."""
    for page in (ROOT / "docs").glob("*.md"):
        for is_picture, _, path in LINK.findall(page.read_text(encoding="utf-8")):
            if is_picture and path not in files.src_uris:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show such pictures from where they are now; of other links keep the words."""
    return LINK.sub(
        lambda found: f"![{found[2]}]({found[3]})" if found[1] else found[2], markdown
    )


class Page(HTMLParser):
    """The addresses that a built page points to, and the places that others may point to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note one tag."""
        for name, value in attributes:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src") and value and tag != "base":
                self.links.append(value)


def on_post_build(config: Any) -> None:
    """Fail if a link of the site leads to no file, or to no place in it."""
    site = Path(config["site_dir"]).resolve()
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if target.is_dir():
                target /= "index.html"
            place = unquote(address.fragment)
            if not target.is_file() or (
                place and target in pages and place not in pages[target].places
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    if broken or not pages:
        raise PluginError(
            "links that lead nowhere: " + "; ".join(broken or ["there are no pages"])
        )
