"""Platform: what every noun uses: database, lists, problems, requests, pages, settings."""
