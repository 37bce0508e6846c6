"""Pages, read as a browser reads them: what is open and closed, what can be gone to, what is labelled."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urlsplit

VOID = frozenset({"meta", "link", "img", "input", "br", "hr"})
DRAWN = frozenset({"rect", "line", "circle", "polyline", "path"})
TITLED = frozenset({"main", "h1"})


@dataclass
class Form:
    """A form: where it is sent, how, and the fields that it has."""

    action: str
    method: str
    fields: list[str] = field(default_factory=list)


class Page(HTMLParser):
    """A page's links (`related`: by what they are to the page), forms and text.

    Raises ValueError for tags that are not closed where they must be.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.related: dict[str, str] = {}
        self.loaded: list[str] = []
        self.forms: list[Form] = []
        self.counted: dict[str, int] = dict.fromkeys(TITLED, 0)
        self.unlabelled: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        if self._open:
            raise ValueError(f"not closed: {self._open}")

    @property
    def text(self) -> str:
        """What a reader sees, a space between pieces."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag."""
        values = {name: value or "" for name, value in attrs}
        if len(values) != len(attrs):
            raise ValueError(f"an attribute twice: {tag} {attrs}")
        self.attributes += [(tag, name, value) for name, value in values.items()]
        if "id" in values:
            self.ids.append(values["id"])
        self._note(tag, values)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag that has no inside."""
        if tag not in VOID | DRAWN:
            raise ValueError(f"{tag} cannot close itself")
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        """Closes the innermost tag, and no other."""
        if not self._open or self._open[-1] != tag:
            raise ValueError(f"{tag} is closed inside {self._open}")
        self._open.pop()

    def handle_data(self, data: str) -> None:
        """Notes text."""
        self.words.append(data)

    def _note(self, tag: str, values: dict[str, str]) -> None:
        if tag in self.counted:
            self.counted[tag] += 1
        if tag == "a":
            self.links.append(values["href"])
            self.related[values.get("rel", "")] = values["href"]
        elif tag in ("link", "img", "script"):
            self.loaded.append(values.get("href") or values.get("src", ""))
        elif tag == "form":
            self.forms.append(Form(action=values["action"], method=values["method"]))
        elif tag in ("input", "select", "button"):
            self._note_field(tag, values)

    def _note_field(self, tag: str, values: dict[str, str]) -> None:
        if self.forms:
            self.forms[-1].fields.append(values.get("name", ""))
        labelled = "label" in self._open or "aria-label" in values or values.get("type") == "hidden"
        if tag != "button" and not labelled:
            self.unlabelled.append(values.get("name", tag))


def internal(address: str) -> bool:
    """Whether an address is on the service itself."""
    parts = urlsplit(address)
    return not parts.scheme and not parts.netloc
