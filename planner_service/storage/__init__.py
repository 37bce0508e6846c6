"""Tables and queries, a file a noun. Rows never leave: out come documents' texts and the contract's models."""
