"""What a docstring gives a tool and its parameters (rule H79)."""

from __future__ import annotations

import pytest

from perdure.harness.docstring import split_docstring

GOOGLE = """Find a city.

    Looks in the gazetteer.

    Args:
        city (str): Its name,
            in any language.
        country: Where to look: a code.

    Returns:
        The city.
    """

NUMPY = """Find a city.

    Parameters
    ----------
    city : str
        Its name,
        in any language.
    country, region : str, optional
        Where to look.

    Returns
    -------
    str
    """


def test_plain_text_is_the_description() -> None:
    assert split_docstring("Find a city.\n\n    In words: that is it.\n    ") == (
        "Find a city.\n\nIn words: that is it.",
        {},
    )


def test_google_sections_describe_parameters() -> None:
    description, parameters = split_docstring(GOOGLE)
    assert description == "Find a city.\n\nLooks in the gazetteer.\n\nReturns:\n    The city."
    assert parameters == {"city": "Its name, in any language.", "country": "Where to look: a code."}


def test_numpy_sections_describe_parameters() -> None:
    description, parameters = split_docstring(NUMPY)
    assert description == "Find a city.\n\nReturns\n-------\nstr"
    assert parameters == {
        "city": "Its name, in any language.",
        "country": "Where to look.",
        "region": "Where to look.",
    }


@pytest.mark.parametrize("doc", [None, "", "   \n  "])
def test_no_docstring_says_nothing(doc: str | None) -> None:
    assert split_docstring(doc) == ("", {})
