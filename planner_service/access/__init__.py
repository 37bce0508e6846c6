"""Access: who calls, what with, and what a request sent again does."""
