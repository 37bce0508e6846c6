"""Comments: notes in the targets' own comment lines, which no text of a document can leave."""


def commented(lines: list[str]) -> str:
    """Comment lines of a shell script, YAML, TOML or Python: one each, with escapes for what does not print."""
    return "".join(f"# {printable(line)}\n" for line in lines)


def printable(text: str) -> str:
    """The text on one line, in characters that every target reads; others are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
