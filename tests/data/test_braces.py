import pytest

from stam.data.braces import expand_braces
from stam.errors import DataError


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("x.tar", ["x.tar"]),
        ("x-{08..11}.tar", ["x-08.tar", "x-09.tar", "x-10.tar", "x-11.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{0..1}", ["0", "1"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("{train-{00..01},val-{00..00}}.tar", ["train-00.tar", "train-01.tar", "val-00.tar"]),
        ("{,x}y", ["y", "xy"]),
    ],
)
def test_braces_are_expanded_as_a_shell_does(pattern, names):
    assert expand_braces(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x-{0..3.tar", "a brace in 'x-{0..3.tar' is not closed"),
        ("{x}", "expected a range such as"),
        ("{0..x}", "expected a range such as"),
        ("{}", "expected a range such as"),
        ("{0..999999999999}", "more than 100000 names"),
        ("{0..9999}{0..9999}", "more than 100000 names"),
    ],
)
def test_other_braces_are_refused(pattern, message):
    with pytest.raises(DataError, match=message):
        expand_braces(pattern)
