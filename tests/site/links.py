"""A hook of MkDocs: links that leave docs/ lead to the repository instead (mkdocs.yml).

It imports nothing of ours, as the site's environment has MkDocs alone.
"""

import posixpath
import re
from typing import Any, Final

_LINK: Final = re.compile(r"\]\(((?:\.\./)+[^)\s#]*)((?:#[^)\s]*)?)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page's text with the links that a site can follow; called by MkDocs."""
    return followable(markdown, page.file.src_uri, config["repo_url"])


def followable(markdown: str, page: str, repository: str) -> str:
    """Replace links that leave docs/ by the repository's; `page`: the path below docs/."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[1]))
        if target.startswith("docs/"):
            return match[0]
        return f"]({repository.rstrip('/')}/blob/main/{target}{match[2]})"

    return _LINK.sub(link, markdown)
