"""The report as one HTML file that needs no other file and makes no network requests.

`page.html` is the frame, `page.css` the style, `page.js` the behavior. The figures are embedded as JSON. Strings from
the user's program, such as the name of a module, reach the page as text only: see `embedded`.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

__all__ = ["embedded", "render"]


def render(data: dict[str, Any]) -> str:
    """Return the HTML page that shows ``data``."""
    folder = files(__name__)
    style, script, frame = (
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html")
    )
    parts = {"style": style, "data": embedded(data), "script": script}
    return re.sub(r"/\*(style|data|script)\*/", lambda place: parts[place[1]], frame)


def embedded(data: object) -> str:
    """Return ``data`` as JSON that is safe inside a script element: nothing in it ends the element or begins a comment.

    >>> embedded("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
