"""Platform: the common parts of all nouns: database, lists, problems, requests, pages, settings."""
