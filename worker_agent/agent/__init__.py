"""The agent of a node: it takes jobs from the service, does each in processes of its own, and reports."""
