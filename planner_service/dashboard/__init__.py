"""The pages: plans and runs, drawn from the same documents that the API sends."""
