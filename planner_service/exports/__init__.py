"""Other systems' formats, out."""
