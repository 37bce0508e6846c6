"""Other systems' formats, out; the Chrome trace is in the core, because agents write it too."""
