"""What a team's service keeps. A pair of functions a noun; they are taken back in reverse.

Revision ID: 0003
Revises: 0002
"""

from collections.abc import Callable

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NOUNS: tuple[tuple[Callable[[], None], Callable[[], None]], ...] = ()
"""What makes a noun's tables, and what takes them back, in order."""


def upgrade() -> None:
    """Makes them all."""
    for make, _ in NOUNS:
        make()


def downgrade() -> None:
    """Takes them all back."""
    for _, take_back in reversed(NOUNS):
        take_back()
