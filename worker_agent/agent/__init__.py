"""The agent of a node: it takes jobs from the service, does each in separate processes, and reports."""
