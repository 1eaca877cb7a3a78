import sys
from typing import Any

import pytest

from pods_jax.lookup import bind, import_own, lookup, settable

TABLE: dict[str, Any] = {"alpha": 1, "beta": 2}


def test_an_entry_is_found_by_its_name():
    assert lookup(TABLE, "beta", "loss.name") == 2


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("alpa", None, "loss.name='alpa' is unknown; did you mean 'alpha'? valid: alpha, beta"),
        ("zzzz", None, "loss.name='zzzz' is unknown; valid: alpha, beta"),
        ("zzzz", (), "loss.name='zzzz' is unknown; valid: alpha, beta, module:function"),
        ("a:b", None, "loss.name='a:b' is unknown; valid: alpha, beta"),
        ("alpha:", (), "loss.name='alpha:' is unknown; did you mean 'alpha'? valid: alpha, beta, module:function"),
        (":beta", (), "loss.name=':beta' is unknown; did you mean 'beta'? valid: alpha, beta, module:function"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_all_valid_ones(name, own, words):
    with pytest.raises(ValueError, match="unknown") as refused:
        lookup(TABLE, name, "loss.name", own=own)
    assert str(refused.value) == words


def test_other_forms_are_named_in_the_refusal():
    with pytest.raises(ValueError, match=r"valid: alpha, beta, gym:<data set>$"):
        lookup(TABLE, "zzzz", "data.task", others=["gym:<data set>"])


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_entries.py").write_text("def double(x, *, eps=0):\n    return 2 * x\n\nthing = 3\n")
    (tmp_path / "own_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_entries", None)


@pytest.mark.usefixtures("own_module")
def test_an_own_function_is_imported_from_the_working_directory():
    assert lookup(TABLE, "own_entries:double", "loss.name", own=(), takes=("x",))(4) == 8  # type: ignore[operator]


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_entries:triple", "module 'own_entries' has no function 'triple'"),
        ("own_entries:thing", "module 'own_entries' has something that is no function named 'thing'"),
        ("own_missing:f", r"module 'own_missing' cannot be imported \(ModuleNotFoundError"),
        ("own_broken:f", r"module 'own_broken' cannot be imported \(ZeroDivisionError"),
    ],
)
def test_an_own_function_that_cannot_be_had_is_refused_by_name(name, words):
    with pytest.raises(ValueError, match=words) as refused:
        lookup(TABLE, name, "loss.name", own=())
    assert str(refused.value).startswith("loss.name")


@pytest.mark.parametrize("name", [":f", "own_entries:"])
def test_half_a_name_is_no_function(name):
    with pytest.raises(ValueError, match=f"loss.name='{name}' names no function"):
        import_own(name, "loss.name")


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize("takes", [("group", "key", "m="), ("x", "m="), ()])
def test_an_own_function_that_cannot_be_called_so_is_refused_before_it_is(takes):
    assert lookup(TABLE, "own_entries:double", "loss.name", own=(), takes=("x", "eps="))
    words = rf"loss.name: own_entries:double takes \(x, \*, eps=0\); expected \({', '.join(takes)}\)"
    with pytest.raises(ValueError, match=words):
        lookup(TABLE, "own_entries:double", "loss.name", own=(), takes=takes)


def scaled(x, *, factor=2.0, times=1, label="none", m=8):
    return (x * factor * times, label)


def test_numbers_of_an_entry_are_set_by_name():
    assert settable(scaled) == {"factor": 2.0, "times": 1, "m": 8}
    assert bind(scaled, [], "loss.options") is scaled
    assert bind(scaled, ["factor=0.5", "times=3"], "loss.options")(4) == (6.0, "none")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("facto=1", "has no number 'facto'; it has: factor, times"),
        ("label=x", "has no number 'label'"),
        ("x=1", "has no number 'x'"),
        ("factor", "must be factor=number"),
        ("times=1.5", "must be times=number"),
        ("m=3", "has no number 'm'"),
    ],
)
def test_an_option_that_the_entry_does_not_have_is_refused(option, words):
    with pytest.raises(ValueError, match=words):
        bind(scaled, [option], "loss.options", passed=("m",))
