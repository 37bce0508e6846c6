"""Plans for others: a pure function and a file each format. What the target cannot express, the output says."""
