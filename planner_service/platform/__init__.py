"""Platform: what every noun stands on: database, lists, problems, requests, pages, settings."""
