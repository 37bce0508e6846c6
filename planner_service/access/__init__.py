"""Access: who calls, with which credential, and what a repeated request does."""
