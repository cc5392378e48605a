"""Programs that measure and check funcppo, and the records of their runs; see README.md in this folder."""
