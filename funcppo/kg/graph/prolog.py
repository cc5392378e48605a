"""What Prolog has beside clauses of facts and rules: built-ins, the goal `true`, and directives.

    built-in       a predicate whose meaning a program cannot change, such as length/2; quotes make no difference
    library        a predicate that Prolog brings and a program may define anew, such as succ/2 or member/2
    declaration    a directive that changes no answer of a Datalog program: dynamic, discontiguous, table, style_check

`is_built_in` and `is_library_predicate` tell the first two apart; `declared_by` reads the third.

Sources: ISO/IEC 13211-1; what a program may define is what SWI-Prolog 9 lets it define.
"""

from __future__ import annotations

from funcppo.kg.graph.lexer import SPACED_PAREN, Token
from funcppo.kg.graph.parser import Atom

TRUE = Atom("true", ())
DECLARATIONS = ("dynamic", "discontiguous", "table", "style_check")

_BUILT_INS = """
    true/0 fail/0 false/0 !/0 ,/2 ;/2 ->/2 \\+/1 call/1 call/2 call/3 call/4 call/5 call/6 call/7 call/8 once/1 repeat/0
    catch/3 throw/1 findall/3 bagof/3 setof/3 halt/0 halt/1 :-/1 :-/2 ?-/1 -->/2 =>/2 :/2 |/2
    =/2 \\=/2 ==/2 \\==/2 @</2 @>/2 @=</2 @>=/2 =../2 is/2 =:=/2 =\\=/2 </2 >/2 =</2 >=/2
    var/1 nonvar/1 atom/1 number/1 integer/1 float/1 atomic/1 compound/1 callable/1 ground/1 functor/3 arg/3 copy_term/2
    compare/3 unify_with_occurs_check/2 subsumes_term/2 acyclic_term/1 term_variables/2 numbervars/3
    sort/2 keysort/2 length/2 atom_length/2 atom_concat/3 sub_atom/5 atom_chars/2 atom_codes/2 char_code/2
    number_chars/2 number_codes/2 char_conversion/2 current_char_conversion/2 op/3 current_op/3
    asserta/1 assertz/1 retract/1 retractall/1 abolish/1 clause/2 current_predicate/1 predicate_property/2
    dynamic/1 discontiguous/1 multifile/1 initialization/1 set_prolog_flag/2 current_prolog_flag/2 phrase/2 phrase/3
    read/1 read/2 read_term/2 read_term/3 write/1 write/2 writeq/1 writeq/2 write_canonical/1 write_canonical/2
    write_term/2 write_term/3 nl/0 nl/1 open/3 open/4 close/1 close/2 current_input/1 current_output/1 set_input/1
    set_output/1 set_stream_position/2 stream_property/2 flush_output/0 flush_output/1 at_end_of_stream/0
    at_end_of_stream/1 get_char/1 get_char/2 peek_char/1 peek_char/2 put_char/1 put_char/2 get_code/1 get_code/2
    peek_code/1 peek_code/2 put_code/1 put_code/2 get_byte/1 get_byte/2 peek_byte/1 peek_byte/2 put_byte/1 put_byte/2
"""
_LIBRARY_PREDICATES = """
    not/1 ignore/1 forall/2 aggregate_all/3 *->/2 is_list/1 assert/1 writeln/1 print/1 format/1 format/2 format/3 tab/1
    between/3 dif/2 consult/1 succ/2 plus/3 table/1 ensure_loaded/1 include/1 msort/2 member/2 memberchk/2 append/3
    select/3 delete/3 subtract/3 union/3 nth0/3 nth1/3 last/2 reverse/2 exclude/3 maplist/2 maplist/3 foldl/4 sum_list/2
    atomic_list_concat/2 atomic_list_concat/3 string_concat/3 atom_string/2
"""
_BUILT_IN_SET = frozenset(_BUILT_INS.split())
_LIBRARY_SET = frozenset(_LIBRARY_PREDICATES.split())

_BRACKETS_AND_COMMAS = ("(", SPACED_PAREN, ")", "[", "]", ",")


def indicator(atom: Atom) -> str:
    """The predicate indicator of an atom, such as edge/2."""
    return f"{atom.predicate}/{len(atom.args)}"


def is_built_in(atom: Atom) -> bool:
    """Whether the predicate of an atom is a built-in, which no program can define."""
    return indicator(atom) in _BUILT_IN_SET


def is_library_predicate(atom: Atom) -> bool:
    """Whether Prolog brings the predicate of an atom unless the program defines it."""
    return indicator(atom) in _LIBRARY_SET


def check_head(head: Atom) -> None:
    """Raise ValueError if the head of a clause is a built-in."""
    if is_built_in(head):
        problem = f"got the built-in {indicator(head)}"
        raise ValueError(
            f"expected a predicate that a program may define, {problem}"
        )


def check_goal(goal: Atom) -> None:
    """Raise ValueError for a goal that Prolog itself would answer: a built-in, or a library predicate."""
    if not is_built_in(goal) and not is_library_predicate(goal):
        return
    kind = "negation" if goal.predicate in ("not", "\\+") else "the built-in"
    raise ValueError(
        f"expected a predicate of facts and rules, got {kind} {indicator(goal)}"
    )


def declared_by(tokens: list[Token]) -> str:
    """The name of the declaration that a directive is.

    Args:
      tokens: of the directive, from `:-` to its full stop.

    Raises:
      ValueError: the directive is no declaration, or one that changes answers, as tabling with modes does.
    """
    name = tokens[1].text
    arguments = [
        token
        for token in tokens[2:-1]
        if token.kind not in _BRACKETS_AND_COMMAS
    ]
    is_read = (
        _are_style_options(arguments)
        if name == "style_check"
        else _are_indicators(arguments)
    )
    if name not in DECLARATIONS or not is_read:
        expected = (
            f"a fact, a rule or one of the directives {', '.join(DECLARATIONS)}"
        )
        raise ValueError(f"expected {expected}, got the directive {name}")
    return name


def _are_indicators(tokens: list[Token]) -> bool:
    """Whether the tokens are one or more of name/arity."""
    kinds = [token.kind for token in tokens]
    names = {*kinds[0::3]}
    return (
        len(kinds) % 3 == 0
        and bool(kinds)
        and names <= {"name", "quoted"}
        and {*kinds[1::3]} == {"/"}
        and {*kinds[2::3]} == {"integer"}
    )


def _are_style_options(tokens: list[Token]) -> bool:
    """Whether the tokens are options such as -singleton."""
    kinds = [token.kind for token in tokens]
    return {*kinds[0::2]} <= {"+", "-"} and {*kinds[1::2]} == {"name"}
