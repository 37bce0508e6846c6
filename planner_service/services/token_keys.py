"""Token keys: what the secrets of tokens and sessions are hashed under."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from planner_service.services.context import Context, found
from planner_service.storage import tokens as storage

NAME = "tokens"
KEY_BYTES = 32
_FINGERPRINTED = b"the id of this key"


@dataclass(frozen=True, slots=True)
class TokenKey:
    """A key of 256 bits. A secret of 256 random bits needs no slow hash: nobody can try them all."""

    value: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """What tells keys apart without giving them away."""
        return self._digest(_FINGERPRINTED)[:16]

    def hash(self, secret: str) -> str:
        """The HMAC-SHA-256 of a secret, in hexadecimal digits."""
        return self._digest(secret.encode())

    def proves(self, secret: str, secret_hash: str) -> bool:
        """Whether the hash is that of the secret; the time that it takes says nothing of where they differ."""
        return hmac.compare_digest(self.hash(secret), secret_hash)

    def _digest(self, text: bytes) -> str:
        return hmac.digest(self.value, text, "sha256").hex()


def token_key(context: Context) -> TokenKey:
    """The key that the operator gave (PIPEPLAN_TOKEN_KEY), else the database's own, made when it is first needed."""
    if context.token_key is not None:
        return TokenKey(hashlib.sha256(context.token_key.encode()).digest())
    with context.database.read() as connection:
        value = storage.server_key(connection, NAME)
    return TokenKey(bytes.fromhex(value or _made(context)))


def _made(context: Context) -> str:
    with context.database.write() as connection:
        storage.add_server_key(connection, NAME, secrets.token_hex(KEY_BYTES), context.now())
        return found("server key", NAME, storage.server_key(connection, NAME))
