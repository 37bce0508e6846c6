"""A module that cannot be imported, for reasons of its own."""

raise RuntimeError("the licence server\nis away")
