"""Data sets and rules from files and memory, the embedded and generated data sets, and their text forms."""

from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import (
    from_text,
    from_triples,
    load,
    with_rule_file,
)
from funcppo.kg.graph.rules import (
    format_atom,
    format_rule,
    parse_query,
    proof_names,
)
from funcppo.kg.graph.samples import make_clans, make_family_tree
from funcppo.kg.graph.triples import DataConfig

__all__ = [
    "DataConfig",
    "Dataset",
    "format_atom",
    "format_rule",
    "from_text",
    "from_triples",
    "load",
    "make_clans",
    "make_family_tree",
    "parse_query",
    "proof_names",
    "with_rule_file",
]
