"""The tree of errors: what is published for each class, and that the drawing of the tree is true."""

import re

import pytest

from dflash import errors
from dflash.cli import COMMANDS
from dflash.cli.flags import EXIT_STATUSES, flags_of
from dflash.commands.benchmark import benchmark
from dflash.commands.generate import generate
from dflash.commands.resolve_draft import resolve_draft
from dflash.errors import Cancelled, DFlashError, DraftNotFound, all_errors

CLASSES = list(all_errors())
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def drawn():
    """The lines of the tree in the docstring, as (class, parent's name, exit status, code)."""
    ancestors = {}
    for bars, name, status, code in re.findall(
        r"^ {4}([│├└─ ]*)(\w+) +(\d+) +(\w+) ", errors.__doc__, re.MULTILINE
    ):
        depth = len(bars) // 4
        ancestors[depth] = name
        yield name, ancestors.get(depth - 1), int(status), code


def test_the_drawn_tree_equals_the_classes_in_order():
    told = [(cls.__name__, cls.__base__.__name__, cls.exit_status, cls.code) for cls in CLASSES]
    told[0] = ("DFlashError", None, 1, "internal_error")
    assert list(drawn()) == told


def test_no_code_is_used_twice():
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)


@each_class
def test_each_class_has_a_code_a_documented_exit_status_and_a_hint(cls):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
    assert re.search(rf"\b{cls.exit_status} ", EXIT_STATUSES)
    assert len(cls.default_hint) > 10


@each_class
def test_each_class_states_its_code_itself(cls):
    assert "code" in vars(cls)


@each_class
def test_a_subclass_has_the_exit_status_of_its_family(cls):
    """So that a reader who knows only the family does the right thing; the root's own children set it."""
    if cls.__base__ not in (Exception, DFlashError):
        assert cls.exit_status == cls.__base__.exit_status


def test_hints_name_only_flags_that_exist():
    known = {"--help"}
    for command in (benchmark, generate, resolve_draft):
        for flag in flags_of(command).values():
            known |= {flag.spelling, "--no-" + flag.spelling[2:]}
    named = {flag for cls in CLASSES for flag in re.findall(r"--[a-z-]+", cls.default_hint)}
    assert named
    assert named <= known
    assert len(COMMANDS) == 3, "a new command: add its flags above"


def test_a_hint_can_be_given_and_details_are_kept():
    error = DraftNotFound("no draft is known for x/y", "pass --draft z", model="x/y")
    assert (error.message, error.hint, error.details) == (str(error), "pass --draft z", {"model": "x/y"})
    assert DraftNotFound("no draft").hint == DraftNotFound.default_hint


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)])
def test_cancelled_exits_with_128_plus_the_signal(number, status):
    error = Cancelled("stopped", number)
    assert (error.exit_status, error.details) == (status, {"signal": number})
