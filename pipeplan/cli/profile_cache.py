"""Profile cache: estimated profiles in the user's cache folder, found by what they were made from.

    profiles/KEY.CONTENT.json    KEY: a hash of everything that determines the profile; CONTENT: of the file's text

A file is an ordinary profile. A file whose text does not match its name is ignored. All files can be removed at any
time.
"""

import os
import sys
import tempfile
from pathlib import Path

from pipeplan.documents.files import parse
from pipeplan.documents.identity import text_id
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError


def cache_folder() -> Path:
    """The folder of this user's estimated profiles."""
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = given if given.is_absolute() else Path.home() / ".cache"
    return folder / "pipeplan" / "profiles"


def find(key: str) -> tuple[Path, Profile] | None:
    """The profile under a key, and its file."""
    for path in sorted(cache_folder().glob(f"{key}.*.json")):
        try:
            text = path.read_text(encoding="utf-8")
            if path.name == f"{key}.{text_id(text)}.json":
                return path, parse(Profile, text)
        except (OSError, UnicodeDecodeError, InvalidInputError):
            continue
    return None


def keep(key: str, text: str) -> Path:
    """Stores a profile's text under a key, atomically, and removes other files of the key. Returns its file. Raises
    OSError.
    """
    folder = cache_folder()
    path = folder / f"{key}.{text_id(text)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:  # in the folder, and so on the same disk
        part = Path(aside) / path.name
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    for other in folder.glob(f"{key}.*.json"):
        if other != path:
            other.unlink(missing_ok=True)
    return path
