"""Data sets and rule formats on disk -> Dataset; the embedded sets."""

from funcppo.data.dataset import Dataset
from funcppo.data.files import from_text, from_triples, load
from funcppo.data.kinship import family_tree
from funcppo.data.printing import parse_query, show_atom, show_rule

__all__ = ["Dataset", "family_tree", "from_text", "from_triples", "load", "parse_query", "show_atom", "show_rule"]
