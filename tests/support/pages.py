"""Reads the pages that fedray writes, as a browser without a network and a screen reader would."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """A page: its tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all tags of one kind."""
        return [attrs for name, attrs in self.tags if name == tag]

    def check(self) -> None:
        """Everything is in the file, tables have captions and heads, pictures have texts, and links lead somewhere."""
        targets = {attrs["id"] for _, attrs in self.tags if "id" in attrs}
        for _, attrs in self.tags:
            for address in (attrs.get("src"), attrs.get("href")):
                assert address is None or address.startswith("data:") or address.removeprefix("#") in targets
        assert len(self.all("table")) == len(self.all("caption"))
        assert all(attrs.get("scope") for attrs in self.all("th"))
        assert all(attrs["alt"] and attrs["width"] and attrs["height"] for attrs in self.all("img"))
        regions = [attrs for attrs in self.all("div") if attrs.get("role") == "region"]
        assert len(regions) == len(self.all("table")) + len(self.all("img"))
        assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in regions)
