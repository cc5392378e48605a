"""The version of funcppo, which the package's build reads too."""

VERSION = "0.2.0"
