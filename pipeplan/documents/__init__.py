"""Documents: what is measured, planned and stored, as frozen dataclasses; `files` reads and writes their JSON."""
