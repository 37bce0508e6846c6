"""What the product does, a file a noun, a transaction each."""
